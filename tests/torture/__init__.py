"""Tests that take minutes: run by `make torture`, not by `make test`."""
