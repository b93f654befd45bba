"""fastserve: one model inference server for the clients people already have, and a batching library."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve.service import BatchedService as BatchedService
    from fastserve.service import VectorTransformer as VectorTransformer

__all__ = ["BatchedService", "VectorTransformer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The library is imported when it is first asked for: a server never needs it."""
    if name in ("BatchedService", "VectorTransformer"):
        return getattr(import_module("fastserve.service"), name)
    raise AttributeError(f"module 'fastserve' has no attribute {name!r}")
