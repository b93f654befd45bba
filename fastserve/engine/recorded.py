"""Recorded requests of a version, checked as any request is, and written for its workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec

from fastserve.backends.registry import find_backend
from fastserve.engine.rows import check_inputs
from fastserve.errors import ServeError, invalid
from fastserve.repository.version import Version
from fastserve.request import Recorded

MOST_BYTES = 1 << 29
"""Of all recorded inputs of a version, as tensors."""

ReadRecorded = Callable[[Version], Sequence[Recorded]]


def no_records(version: Version) -> Sequence[Recorded]:
    """Of servers without dialects that have any."""
    return ()


async def record(version: Version, read: ReadRecorded) -> int:
    """A descriptor to hand to the version's workers, -1 when there is nothing to run. Raises ServeError for a
    request that could not be run, ConfigError for a file that cannot be read."""
    writing = asyncio.ensure_future(asyncio.to_thread(_record, version, read))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_drop)  # the thread goes on
        raise


def _drop(writing: asyncio.Future[int]) -> None:
    if not writing.cancelled() and writing.exception() is None and writing.result() >= 0:
        os.close(writing.result())


def _record(version: Version, read: ReadRecorded) -> int:
    found = read(version)
    if not found:
        return -1
    _must_be_plain(version)
    total, entries = 0, []
    for one in found:
        entries.append([one.origin, one.times, _checked(version, one)])
        total += sum(memoryview(tensor.data).nbytes for tensor in one.request.inputs.values())
        if total > MOST_BYTES:
            raise invalid(f"{one.origin}: recorded inputs are over the limit of {MOST_BYTES} bytes")
    fd = os.memfd_create("recorded")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(entries))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _must_be_plain(version: Version) -> None:
    options = version.config.options
    kind = find_backend(version.config.backend).takes
    special = {
        "generates text": kind == "text",
        "answers several times": options.decoupled,
        "has sequences": options.sequences is not None,
        "is told where requests begin": options.tells_requests,
        "takes inputs in another shape than clients send": bool(options.reshaped_inputs),
    }
    for what, so in special.items():
        if so:
            raise invalid(f"recorded requests are not run on a model that {what}")


def _checked(version: Version, one: Recorded) -> dict[str, list[object]]:
    try:
        rows = check_inputs(version, one.request.inputs)
        most = version.config.most_rows
        if version.batching and 0 < most < rows:
            raise invalid(f"Task size {rows} is larger than maximum input batch size {most}")
    except ServeError as fault:
        raise ServeError(fault.kind, f"{one.origin}: {fault.message}") from None
    return {
        name: [tensor.dtype.name, tensor.shape, tensor.data] for name, tensor in one.request.inputs.items()
    }
