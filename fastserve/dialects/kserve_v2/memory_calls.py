"""The shared memory calls as HTTP has them (spec 6): bodies read, statuses written."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from fastserve.dialects.kserve_v2.document import as_string, as_uint, find, need, read_json
from fastserve.dialects.kserve_v2.errors import invalid, not_found
from fastserve.serving.shared_memory import Regions

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value

CUDA_HANDLE_BYTES = 64


def register_system(regions: Regions, name: str, body: bytes | bytearray) -> None:
    """Raises ServeError."""
    regions.must_be_allowed()
    if not name:
        raise invalid("'region name' is necessary to register system shared memory region")
    request = read_json(body)
    key = as_string(_required(request, "key"))
    found, offset = find(request, "offset")
    start = as_uint(offset) if found else 0
    regions.register(name, key, start, as_uint(_required(request, "byte_size")))


def register_cuda(regions: Regions, name: str, body: bytes | bytearray) -> None:
    """What a server without a GPU answers: the handle is checked, and cannot be opened. Raises ServeError."""
    regions.must_be_allowed()
    if not name:
        raise invalid("'region name' is necessary to register cuda shared memory region")
    request = read_json(body)
    handle = as_string(need(_required(request, "raw_handle"), "b64"))
    as_uint(need(request, "byte_size"))
    as_uint(need(request, "device_id"))
    open_cuda(_decode(handle))


def unregister(regions: Regions, name: str) -> None:
    """One region, or all of them for "". Raises ServeError."""
    if name:
        regions.unregister(name)
    else:
        regions.unregister_all()


def _required(request: Value, field: str) -> Value:
    found, value = find(request, field)
    if not found:
        raise invalid(f"Shared memory register request has no '{field}' field")
    return value


def open_cuda(handle: bytes) -> None:
    """Always raises ServeError: there is no GPU whose memory could be opened."""
    if len(handle) != CUDA_HANDLE_BYTES:
        raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    raise invalid("failed to register shared memory region: invalid args")


def system_status(regions: Regions, name: str) -> list[dict[str, Any]]:
    """Raises ServeError NOT_FOUND."""
    return [
        {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
        for r in regions.list(name)
    ]


def cuda_status(regions: Regions, name: str) -> list[dict[str, Any]]:
    """Always empty. Raises ServeError NOT_FOUND for a name."""
    if name in regions:
        raise not_found(
            f"The region named '{name}' is registered as system shared memory, not CUDA shared memory"
        )
    if name:
        raise not_found(f"Unable to find cuda shared memory region: '{name}'")
    return []


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
