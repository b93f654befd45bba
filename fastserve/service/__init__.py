"""The batching library: `from fastserve import BatchedService, VectorTransformer`."""

from fastserve.backends.transformer import VectorTransformer
from fastserve.errors import ServeError
from fastserve.service.batched_service import BatchedService

__all__ = ["BatchedService", "ServeError", "VectorTransformer"]
