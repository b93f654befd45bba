"""The grps API over HTTP and gRPC; see dialect, and docs/dialects/grps.md."""
