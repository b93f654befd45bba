"""Serving: the work on requests that all dialects share; see fast_path and docs/architecture.md."""
