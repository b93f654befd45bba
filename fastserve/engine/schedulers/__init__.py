"""Schedulers: how requests of a version are queued, batched and run."""
