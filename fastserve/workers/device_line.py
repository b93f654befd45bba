"""The front process's way to clients' device memory: the ferry (ferry.py), started when it is first needed.

    line = DeviceLine()
    await line.open(lent)              ServeError: the handle cannot be opened, or the memory is smaller
    data = await line.read(lent)
    await line.write(lent, data)
    await line.close(lent)

On a machine without a driver the first question says so, and there is never another process. A ferry that
dies or hangs fails who waits for it; the next question starts one anew, and handles are opened again as they
are named.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fastserve.devices.found import has_driver
from fastserve.errors import Kind, NoDeviceError, ServeError
from fastserve.request import Lent
from fastserve.workers.control import ControlFault
from fastserve.workers.process import ENTRY, WorkerProcess, worker_environment

log = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
"""Larger tensors are carried in pieces of this."""
ANSWER_S = 30.0
GOODBYE_S = 5.0
START_S = 60.0  # a driver that loads its kernel module first
FERRY = (*ENTRY[:-1], "fastserve.workers.ferry")
LOST = "device memory cannot be reached: {}"


class DeviceLine:
    """One ferry, on the loop it is first used on. Questions are asked one after the other."""

    def __init__(self, entry: Sequence[str] = FERRY) -> None:
        self._entry = entry
        self._process: WorkerProcess | None = None
        self._staging: mmap.mmap | None = None
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._none = False

    async def open(self, lent: Lent) -> None:
        """See whether a handle can be opened and its memory has so many bytes. Raises ServeError, and
        NoDeviceError where there are no devices."""
        await asyncio.shield(self._open(lent))

    async def read(self, lent: Lent) -> bytes:
        """What is there now. Raises ServeError."""
        return await asyncio.shield(self._read(lent))

    async def write(self, lent: Lent, data: bytes) -> None:
        """Put `data` at its beginning. Raises ServeError."""
        await asyncio.shield(self._write(lent, data))

    async def close(self, lent: Lent) -> None:
        """The memory is not read any more. A ferry that is gone has closed it already."""
        await asyncio.shield(self._close(lent))

    def stop(self) -> None:
        """End the ferry at once."""
        self._none = True
        if self._process is not None:
            self._process.abandon()
            self._lose("the server is stopping")
        self._drop_staging()

    # --- questions: each is asked to its end, also when nobody waits for it any more ------------------

    async def _open(self, lent: Lent) -> None:
        async with self._turn:
            await self._ask("open", lent, nbytes=lent.nbytes)

    async def _read(self, lent: Lent) -> bytes:
        pieces = []
        async with self._turn:
            for at in range(0, lent.nbytes, STAGING_BYTES):
                size = min(STAGING_BYTES, lent.nbytes - at)
                await self._ask("read", lent, offset=lent.offset + at, nbytes=size)
                assert self._staging is not None
                pieces.append(self._staging[:size])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _write(self, lent: Lent, data: bytes) -> None:
        async with self._turn:
            for at in range(0, len(data), STAGING_BYTES):
                piece = data[at : at + STAGING_BYTES]
                await self._start()
                assert self._staging is not None
                self._staging[: len(piece)] = piece
                await self._ask("write", lent, offset=lent.offset + at, nbytes=len(piece))

    async def _close(self, lent: Lent) -> None:
        async with self._turn:
            if self._process is None or not self._process.running:
                return
            try:
                await self._ask("close", lent)
            except ServeError as fault:
                log.warning("client memory could not be closed: %s", fault.message)

    # --- the process --------------------------------------------------------------------------------

    async def _ask(self, op: str, lent: Lent, **more: int) -> None:
        await self._start()
        told = await self._say(
            {"op": op, "handle": lent.handle.hex(), "device": lent.device, **more}, ANSWER_S
        )
        if told["op"] != "done":
            raise ServeError(Kind.INVALID_ARGUMENT, str(told["words"]))

    async def _start(self) -> None:
        self._none = self._none or not has_driver()
        if self._none:
            raise NoDeviceError
        if self._process is not None and self._process.running:
            return
        self._drop_staging()
        self._process = WorkerProcess(
            worker_environment(1, {}), self._hear, self._lose, entry=self._entry, trusted=True
        )
        staging_fd = os.memfd_create("ferry", os.MFD_CLOEXEC)
        try:
            os.ftruncate(staging_fd, STAGING_BYTES)
            self._staging = mmap.mmap(staging_fd, STAGING_BYTES)
            self._process.spawn()
            told = await self._say({"op": "keep", "staging_bytes": STAGING_BYTES}, START_S, [staging_fd])
        except OSError as error:
            raise _lost(error.strerror or "no memory") from error
        finally:
            os.close(staging_fd)
        if not told["count"]:
            self._none = True
            await self._process.stop(GOODBYE_S)
            self._drop_staging()
            raise NoDeviceError

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    async def _say(
        self, message: Mapping[str, Any], limit_s: float, fds: Sequence[int] = ()
    ) -> dict[str, Any]:
        assert self._process is not None
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            self._process.send(message, fds)
            await asyncio.wait({answer}, timeout=limit_s)
        except ControlFault:  # it is ending, and will tell of what
            await asyncio.wait({answer}, timeout=limit_s)
        if not answer.done():
            self._process.kill(f"it did not answer within {limit_s:g} s")
            raise _lost("the driver does not answer")
        told: dict[str, Any] = answer.result()
        return told

    def _hear(self, message: dict[str, Any]) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _lose(self, words: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_lost(words))


def _lost(why: str) -> ServeError:
    return ServeError(Kind.UNAVAILABLE, LOST.format(why))
