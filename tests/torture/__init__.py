"""What takes minutes: run by `make torture`, not by `make test`."""
