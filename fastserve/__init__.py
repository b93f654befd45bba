"""fastserve: one model inference server for the clients people already have, and a batching library."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve.app.calls import App as App
    from fastserve.app.calls import serve as serve
    from fastserve.backends.batch_traces import batch_traces as batch_traces
    from fastserve.backends.cancellation import cancelled as cancelled
    from fastserve.backends.cancellation import cancelled_rows as cancelled_rows
    from fastserve.backends.script.backend import Response as Response
    from fastserve.backends.script.declaration import model as model
    from fastserve.backends.script.json_schema import Array as Array
    from fastserve.backends.script.multipart import File as File
    from fastserve.backends.script.remote import remote as remote
    from fastserve.batching import BatchedService as BatchedService
    from fastserve.batching import VectorTransformer as VectorTransformer
    from fastserve.client.clients import AsyncClient as AsyncClient
    from fastserve.client.clients import Client as Client

__all__ = [
    "App",
    "Array",
    "AsyncClient",
    "BatchedService",
    "Client",
    "File",
    "Response",
    "VectorTransformer",
    "__version__",
    "batch_traces",
    "cancelled",
    "cancelled_rows",
    "model",
    "remote",
    "serve",
]
__version__ = "0.1.0"

_PLACES = {
    "App": "fastserve.app.calls",
    "Array": "fastserve.backends.script.json_schema",
    "AsyncClient": "fastserve.client.clients",
    "BatchedService": "fastserve.batching",
    "Client": "fastserve.client.clients",
    "File": "fastserve.backends.script.multipart",
    "Response": "fastserve.backends.script.backend",
    "VectorTransformer": "fastserve.batching",
    "batch_traces": "fastserve.backends.batch_traces",
    "cancelled": "fastserve.backends.cancellation",
    "cancelled_rows": "fastserve.backends.cancellation",
    "model": "fastserve.backends.script.declaration",
    "remote": "fastserve.backends.script.remote",
    "serve": "fastserve.app.calls",
}


def __getattr__(name: str) -> Any:
    """The library, and what scripts use, is imported when it is first asked for: a server never needs it."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fastserve' has no attribute {name!r}")
