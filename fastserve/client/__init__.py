"""Clients of a running server, for Python: `from fastserve import Client, AsyncClient`."""
