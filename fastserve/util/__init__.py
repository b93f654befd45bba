"""General helpers: work in threads, logs, request ids, memory and its budget."""
