"""The batching library: `from fastserve import BatchedService, VectorTransformer`."""

from fastserve.backends.transformer import VectorTransformer
from fastserve.batching.batched_service import BatchedService
from fastserve.errors import ServeError

__all__ = ["BatchedService", "ServeError", "VectorTransformer"]
