"""The front process's way to clients' device memory: the ferry (ferry.py), started when it is first needed.

    line = DeviceLine()
    await line.open(lent)              ServeError: the handle cannot be opened, or the memory is smaller
    data = await line.read(lent)
    await line.write(lent, data)
    await line.close(lent)

    await line.join(arena, front)      rows of it are read and written where they lie, from now on
    await line.ready(lent, arena)      nothing but the copy is left to do
    await line.read_into(lent, rows)   by one DMA; other memory through the staging memory, by a copy more

On a machine without a driver the first question says so, and there is never another process. A ferry that
dies or hangs fails who waits for it; the next question starts one anew, and handles are opened and arenas
joined again as they are named. Rows are let go of when their copy is over or the ferry is dead, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Buffer

from fastserve.apart import outlast
from fastserve.devices.found import has_driver
from fastserve.errors import Kind, NoDeviceError, ServeError
from fastserve.request import Lent
from fastserve.workers.arena import Arena
from fastserve.workers.control import ControlFault
from fastserve.workers.process import ENTRY, WorkerProcess, worker_environment
from fastserve.workers.shared_arenas import SharedArenas, Spot

log = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
"""Larger tensors are carried in pieces of this."""
STAGING = 0  # the number of the memory that only the two have
ANSWER_S = 30.0
# Others wait with rows that are being copied: they are in one batch.
ROWS_S = 5.0
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
        self.arenas = SharedArenas(self._part)
        self._open_here: set[tuple[bytes, int]] = set()  # what this ferry has open
        self._known: set[int] = set()  # and the memory it has
        self._handles: Counter[tuple[bytes, int]] = Counter()  # opened by clients, and not closed
        self._parting: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        """Of the ferry, 0 while there is none."""
        return self._process.pid if self._process is not None and self._running else 0

    async def open(self, lent: Lent) -> None:
        """See whether a handle can be opened and its memory has so many bytes. Raises ServeError, and
        NoDeviceError where there are no devices."""
        await outlast(self._open(lent))

    async def read(self, lent: Lent) -> bytearray:
        """What is there now. Raises ServeError."""
        data = bytearray(lent.nbytes)
        await outlast(self._read(lent, memoryview(data)))
        return data

    async def read_into(self, lent: Lent, room: memoryview) -> None:
        """Fill memory of as many bytes with what is there now; nothing writes there when this has returned.
        Raises ServeError."""
        spot = self.arenas.find(room)
        await outlast(self._read(lent, room) if spot is None else self._read_rows(lent, spot))

    async def write(self, lent: Lent, data: Buffer) -> None:
        """Put `data` at its beginning; it is not looked at when this has returned. Raises ServeError."""
        spot, view = self.arenas.find(data), memoryview(data).cast("B")
        await outlast(self._write(lent, view) if spot is None else self._write_rows(lent, spot, view.nbytes))

    async def close(self, lent: Lent) -> None:
        """The memory is not read any more. A ferry that is gone has closed it already."""
        await outlast(self._close(lent))

    async def join(self, arena: Arena, front: int) -> None:
        """See SharedArenas; until the last handle is closed."""
        await self.arenas.join(arena, front)

    async def ready(self, lent: Lent, arena: Arena) -> None:
        """Have a ferry with the memory and the handle: starting one takes long, and nobody holds rows yet.
        Raises ServeError."""
        spot = self.arenas.find(arena.memory)
        if not self._is_ready(lent, spot):
            await outlast(self._make_ready(lent, spot))

    def shares(self, data: Buffer) -> bool:
        """Whether it is the memory of an arena that was joined."""
        return self.arenas.find(data) is not None

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
            self._handles[lent.handle, lent.device] += 1

    def _is_ready(self, lent: Lent, spot: Spot | None) -> bool:
        known = spot is None or spot.number in self._known
        return self._running and known and (lent.handle, lent.device) in self._open_here

    async def _make_ready(self, lent: Lent, spot: Spot | None) -> None:
        async with self._turn:
            if not self._is_ready(lent, spot):
                await self._start()
                if spot is not None:
                    await self._share(spot)
                await self._ask("open", lent, nbytes=lent.offset + lent.nbytes)

    async def _read(self, lent: Lent, room: memoryview) -> None:
        async with self._turn:
            for at in range(0, lent.nbytes, STAGING_BYTES):
                size = min(STAGING_BYTES, lent.nbytes - at)
                await self._ask("read", lent, offset=lent.offset + at, nbytes=size, memory=STAGING, at=0)
                assert self._staging is not None
                room[at : at + size] = self._staging[:size]

    async def _read_rows(self, lent: Lent, spot: Spot) -> None:
        async with self._turn:
            if not self._is_ready(lent, spot):  # it has died since it was: a batch does not wait for another
                raise _lost("its process has ended")
            place = {"memory": spot.number, "at": spot.offset}
            await self._ask("read", lent, ROWS_S, offset=lent.offset, nbytes=lent.nbytes, **place)

    async def _write(self, lent: Lent, data: memoryview) -> None:
        async with self._turn:
            for at in range(0, len(data), STAGING_BYTES):
                piece = data[at : at + STAGING_BYTES]
                await self._start()
                assert self._staging is not None
                self._staging[: len(piece)] = piece
                size = len(piece)
                await self._ask("write", lent, offset=lent.offset + at, nbytes=size, memory=STAGING, at=0)

    async def _write_rows(self, lent: Lent, spot: Spot, nbytes: int) -> None:
        async with self._turn:
            await self._start()
            await self._share(spot)
            place = {"memory": spot.number, "at": spot.offset}
            await self._ask("write", lent, offset=lent.offset, nbytes=nbytes, **place)

    async def _close(self, lent: Lent) -> None:
        async with self._turn:
            key = lent.handle, lent.device
            self._handles[key] -= 1
            if self._handles[key] > 0:  # by another name
                return
            del self._handles[key]
            self._open_here.discard(key)
            try:
                if self._running:
                    await self._ask("close", lent)
                for number in [] if self._handles else self.arenas.leave_all():
                    await self._unshare(number)
            except ServeError as fault:
                log.warning("client memory could not be closed: %s", fault.message)

    # --- arenas -------------------------------------------------------------------------------------

    def _part(self, number: int) -> None:
        """An arena is closed: the ferry's hold on it would keep its memory."""
        if number in self._known and not self._none:
            task = asyncio.get_running_loop().create_task(self._unshare_in_turn(number))
            self._parting.add(task)
            task.add_done_callback(self._parting.discard)

    async def _unshare_in_turn(self, number: int) -> None:
        async with self._turn:
            with contextlib.suppress(ServeError):  # it is dead, and has let go of everything
                await self._unshare(number)

    async def _share(self, spot: Spot) -> None:
        if spot.number not in self._known:
            if spot.arena.memory_fd < 0:  # its version was unloaded while this waited for its turn
                raise _lost("the model's memory is gone")
            nbytes = len(spot.arena.memory)
            told = {"op": "share", "memory": spot.number, "nbytes": nbytes}
            self._known.add(spot.number)  # now: should it close meanwhile, the ferry is to let go of it
            answer = await self._say(told, ANSWER_S, [spot.arena.memory_fd])
            if answer["op"] != "done":
                self._known.discard(spot.number)
            _must_be_done(answer)

    async def _unshare(self, number: int) -> None:
        if self._running and number in self._known:
            self._known.discard(number)
            _must_be_done(await self._say({"op": "unshare", "memory": number}, ANSWER_S))

    # --- the process --------------------------------------------------------------------------------

    @property
    def _running(self) -> bool:
        return self._process is not None and self._process.running

    async def _ask(self, op: str, lent: Lent, limit_s: float = ANSWER_S, **more: int) -> None:
        await self._start()
        told = {"op": op, "handle": lent.handle.hex(), "device": lent.device, **more}
        _must_be_done(await self._say(told, limit_s))
        if op != "close":
            self._open_here.add((lent.handle, lent.device))

    async def _start(self) -> None:
        self._none = self._none or not has_driver()
        if self._none:
            raise NoDeviceError
        if self._running:
            return
        self._drop_staging()
        self._open_here.clear()
        self._known.clear()
        self._process = WorkerProcess(
            worker_environment(1, {}), self._hear, self._lose, entry=self._entry, trusted=True
        )
        staging_fd = os.memfd_create("ferry", os.MFD_CLOEXEC)
        try:
            os.ftruncate(staging_fd, STAGING_BYTES)
            self._staging = mmap.mmap(staging_fd, STAGING_BYTES)
            self._process.spawn()
            told = await self._say({"op": "keep", "nbytes": STAGING_BYTES}, START_S, [staging_fd])
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
            await self._process.wait()  # until then it may write where it was told to
            raise _lost("the driver does not answer")
        told: dict[str, Any] = answer.result()
        return told

    def _hear(self, message: dict[str, Any]) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _lose(self, words: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_lost(words))


def _must_be_done(told: Mapping[str, Any]) -> None:
    if told["op"] != "done":
        raise ServeError(Kind.INVALID_ARGUMENT, str(told["words"]))


def _lost(why: str) -> ServeError:
    return ServeError(Kind.UNAVAILABLE, LOST.format(why))
