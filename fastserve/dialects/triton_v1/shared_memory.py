"""Shared memory as this API asks for it: listing it, and what it says of memory on a GPU."""

from __future__ import annotations

from typing import Any

from fastserve.dialects.triton_v1.inputs import invalid
from fastserve.serving.shared_memory import Regions

CUDA_HANDLE_BYTES = 64


def register_cuda(name: str, handle: bytes) -> None:
    """Always raises: what a server without a GPU answers (spec 6)."""
    if len(handle) != CUDA_HANDLE_BYTES:
        raise invalid("unexpected size for CUDA shared-memory handle, expecting 64 bytes")
    raise invalid(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")


def list_regions(shared: Regions, message: Any) -> Any:
    """Fill `shared_memory_region` of a message with every region; the message."""
    for region in shared.list():
        one = message.shared_memory_region.add(name=region.name, byte_size=region.byte_size)
        one.system_shared_memory.shared_memory_key = region.key
        one.system_shared_memory.offset = region.offset
    return message
