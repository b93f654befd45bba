"""The shared memory calls as HTTP has them (spec 6): bodies read, statuses written."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from fastserve.dialects.kserve_v2.document import as_object, as_string, as_uint, find, need, read_object
from fastserve.dialects.kserve_v2.errors import invalid, not_found
from fastserve.dialects.kserve_v2.regions import Regions

CUDA_HANDLE_BYTES = 64
_REQUEST = "Shared memory register request has no '{}' field"


def register_system(regions: Regions, name: str, body: bytes | bytearray) -> None:
    """Raises ServeError."""
    regions.must_be_allowed()
    if not name:
        raise invalid("'region name' is necessary to register system shared memory region")
    members = read_object(body)
    for field in ("key", "byte_size"):
        if field.encode() not in members:
            raise invalid(_REQUEST.format(field))
    key = as_string(need(members, "key"), "Unable to parse 'key'")
    found, offset = find(members, "offset")
    regions.register(
        name,
        key,
        as_uint(offset, "Unable to parse 'offset'") if found else 0,
        as_uint(need(members, "byte_size"), "Unable to parse 'byte_size'"),
    )


def register_cuda(regions: Regions, name: str, body: bytes | bytearray) -> None:
    """What a server without a GPU answers: the handle is checked, and cannot be opened. Raises ServeError."""
    regions.must_be_allowed()
    if not name:
        raise invalid("'region name' is necessary to register cuda shared memory region")
    members = read_object(body)
    for field in ("raw_handle", "device_id", "byte_size"):
        if field.encode() not in members:
            raise invalid(_REQUEST.format(field))
    handle = as_object(need(members, "raw_handle"), "Unable to parse 'raw_handle'")
    as_uint(need(members, "device_id"), "Unable to parse 'device_id'")
    as_uint(need(members, "byte_size"), "Unable to parse 'byte_size'")
    open_cuda(_decode(as_string(need(handle, "b64"), "Unable to parse 'b64'")))


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
