"""The suite. It mirrors the package: tests/wire tests fastserve/wire, and so on."""
