"""Recorded requests of a version, checked as any request is: written for its workers, or run by its ensemble.

They are taken one at a time, so that however many a version brings there is one of them in memory, beside the
file that its workers read (workers/recorded.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from time import monotonic_ns
from typing import BinaryIO

import msgspec

from fastserve.backends.registry import find_backend
from fastserve.engine.counters import WarmUp, counters_of
from fastserve.engine.engine import Engine
from fastserve.engine.rows import check_inputs
from fastserve.errors import ServeError, invalid
from fastserve.repository.version import Version
from fastserve.request import RECORDED_LENGTH as LENGTH
from fastserve.request import Recorded

MOST_BYTES = 1 << 29
"""Of all recorded inputs that a version's workers are handed, as tensors."""

ReadRecorded = Callable[[Version], Iterator[Recorded]]


def no_records(version: Version) -> Iterator[Recorded]:
    """Of servers without dialects that have any."""
    return iter(())


class Recording:
    """What one version brings to be run before it is available. `version.counters` hear of it."""

    def __init__(self, version: Version, read: ReadRecorded) -> None:
        self._version, self._read = version, read
        self._took_ns = self._records = 0
        self._origin = ""

    async def write(self) -> int:
        """A descriptor to hand to the version's workers, -1 when there is nothing to run. Raises ServeError
        for a request that could not be run, ConfigError for a file that cannot be read."""
        began_ns = monotonic_ns()
        writing = asyncio.ensure_future(asyncio.to_thread(self._write))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_drop)  # the thread goes on
            raise
        except ServeError as fault:
            self._count(fault.kind.name, monotonic_ns() - began_ns)
            raise
        finally:
            self._took_ns = monotonic_ns() - began_ns

    def ran(self, took_ns: int) -> None:
        """The version's workers have run them, in that time."""
        if self._records:
            self._count("OK", self._took_ns + took_ns)

    async def run(self, engine: Engine, limit_s: float) -> None:
        """Run them here and now, on a version that has no workers. Raises ServeError."""
        began_ns = monotonic_ns()
        deadline_ns = began_ns + int(limit_s * 1e9)
        with closing(self._each()) as found:
            while (one := await _next(found)) is not None:
                one.request.deadline_ns = deadline_ns
                await self._infer(engine, one)
        self.ran(monotonic_ns() - began_ns)

    async def _infer(self, engine: Engine, one: Recorded) -> None:
        try:
            for _ in range(one.times):
                (await engine.infer(self._version, one.request)).release()
        except ServeError as fault:
            raise ServeError(fault.kind, f"{one.origin}: {fault.message}") from fault

    def _each(self) -> Generator[Recorded, None, None]:
        for one in self._read(self._version):
            if not self._records:
                _must_be_plain(self._version)
            self._records += one.origin != self._origin  # a record may be several requests
            self._origin = one.origin
            yield one

    def _write(self) -> int:
        with closing(self._each()) as found:
            first = next(found, None)
            if first is None:
                return -1
            fd = os.memfd_create("recorded")
            try:
                with open(fd, "wb", closefd=False) as file:
                    _write_all(self._version, chain([first], found), file)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _count(self, status: str, ns: int) -> None:
        counters_of(self._version).warm_ups.append(WarmUp(status, ns, self._records))


async def _next(found: Iterator[Recorded]) -> Recorded | None:
    """Reading blocks, and may not be left half done."""
    reading = asyncio.ensure_future(asyncio.to_thread(next, found, None))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait([reading])
        raise


def _drop(writing: asyncio.Future[int]) -> None:
    if not writing.cancelled() and writing.exception() is None and writing.result() >= 0:
        os.close(writing.result())


def _write_all(version: Version, found: Iterable[Recorded], file: BinaryIO) -> None:
    total = 0
    for one in found:
        total += sum(memoryview(tensor.data).nbytes for tensor in one.request.inputs.values())
        if total > MOST_BYTES:
            raise invalid(f"{one.origin}: recorded inputs are over the limit of {MOST_BYTES} bytes")
        entry = msgspec.msgpack.encode([one.origin, one.times, _checked(version, one)])
        file.write(LENGTH.pack(len(entry)) + entry)


def _must_be_plain(version: Version) -> None:
    options = version.config.options
    kind = "" if options.ensemble is not None else find_backend(version.config.backend).takes
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
