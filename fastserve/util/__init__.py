"""General helpers: work in threads, logs, request ids, Python's memory."""
