"""The suite. It mirrors the package: tests/net tests fastserve/net, and so on."""
