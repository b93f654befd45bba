"""What every dialect does with a request, done once; see fast_path, and docs/architecture.md."""
