"""Shared memory as this API asks for it: registering, listing, and the places requests name.

The registry itself is handed in by the server, since both Triton dialects show the same regions.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastserve.dialects.triton_v1.header import SharedPlace
from fastserve.dialects.triton_v1.inputs import Buffer, invalid

CUDA_HANDLE_BYTES = 64


class Region(Protocol):
    """One registered region of system shared memory."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def byte_size(self) -> int: ...


class Destination(Protocol):
    """Room for one output, good until the request that holds it has ended."""

    def write(self, data: Buffer) -> None:
        """Raises ServeError when the region has shrunk."""


class SharedRegions(Protocol):
    """The registry. Everything raises ServeError; a place that is not there NOT_FOUND or INVALID_ARGUMENT."""

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None: ...
    def unregister(self, name: str) -> None:
        """An unknown name is no error."""

    def unregister_all(self) -> None: ...
    def regions(self) -> Iterable[Region]: ...
    def read(self, place: SharedPlace) -> Buffer: ...
    def read_into(self, place: SharedPlace, memory: memoryview) -> None: ...
    def hold(self, place: SharedPlace) -> AbstractContextManager[Destination]: ...


def register_cuda(name: str, handle: bytes) -> None:
    """Always raises: what a server without a GPU answers (spec 6)."""
    if len(handle) != CUDA_HANDLE_BYTES:
        raise invalid("unexpected size for CUDA shared-memory handle, expecting 64 bytes")
    raise invalid(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")


def list_regions(shared: SharedRegions, message: Any) -> Any:
    """Fill `shared_memory_region` of a message with every region; the message."""
    for region in shared.regions():
        one = message.shared_memory_region.add(name=region.name, byte_size=region.byte_size)
        one.system_shared_memory.shared_memory_key = region.key
        one.system_shared_memory.offset = region.offset
    return message
