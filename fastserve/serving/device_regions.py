"""Client memory on GPUs: regions that are a handle (cudaIpcMemHandle_t) and a size.

This process never opens one: initialising CUDA is for workers (docs/gpu.md). What can be known without is
checked here: names, sizes, ranges, device numbers. Whether a handle can be opened, and how much memory there
is behind it, the ferry finds out when it is registered (workers/device_line.py).

A region that is unregistered goes when the last request lets go of it; its name is free at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastserve.errors import Kind, ServeError
from fastserve.request import Lent

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from fastserve.engine import BatchQueue
    from fastserve.workers.arena import Arena

log = logging.getLogger(__name__)

HANDLE_BYTES = 64


OnClose = Callable[[bytes], Awaitable[None]]


async def keep_nothing(handle: bytes) -> None:
    """Where no worker opens handles."""


class Line(Protocol):
    """What carries bytes to and from device memory; see `workers.device_line`."""

    async def open(self, lent: Lent) -> None:
        """Raises ServeError when it cannot be opened, NoDeviceError where there are no devices."""

    async def read(self, lent: Lent) -> bytearray:
        """Raises ServeError."""

    async def write(self, lent: Lent, data: Buffer) -> None:
        """Nothing looks at `data` when this has returned. Raises ServeError."""

    async def join(self, arena: Arena, front: int) -> None:
        """Views of it are copied from and to where they lie, from now on."""

    async def ready(self, lent: Lent, arena: Arena) -> None:
        """See to it that a copy is all that is left to do. Raises ServeError."""

    async def read_into(self, lent: Lent, room: memoryview) -> None:
        """Nothing writes into `room` when this has returned. Raises ServeError."""

    def shares(self, data: Buffer) -> bool:
        """Whether a view is of an arena that was joined. From any thread."""

    async def close(self, lent: Lent) -> None:
        """It is not used any more."""

    def stop(self) -> None:
        """Nothing is any more."""


@dataclass(slots=True, eq=False)
class DeviceRegion:
    """One registered handle. `users` are requests that read or will write it."""

    name: str
    handle: bytes
    device: int
    byte_size: int
    users: int = 0
    registered: bool = True

    def lend(self, offset: int, nbytes: int) -> Lent:
        """A range of it, already found to lie within."""
        return Lent(self.handle, self.device, offset, nbytes, self.name)


class DeviceMemory:
    """The way to all device regions of a front process."""

    def __init__(self, line: Line, on_close: OnClose = keep_nothing) -> None:
        """`on_close` is told of a handle that is given back, and awaited: workers may have opened it too."""
        self._line, self._on_close = line, on_close
        self._names: Counter[bytes] = Counter()  # how many regions a handle is open for
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, region: DeviceRegion) -> None:
        """It can be read and written from now on, until it is forgotten. Raises ServeError."""
        try:
            await self._line.open(region.lend(0, region.byte_size))
        except ServeError as fault:
            log.warning("device memory of a client's was refused: %s", fault.message)
            raise
        self._names[region.handle] += 1

    async def read(self, lent: Lent) -> bytearray:
        """Raises ServeError."""
        with _named(lent):
            return await self._line.read(lent)

    async def join(self, queue: BatchQueue) -> None:
        """What is read into the queue's places, and written out of them, is copied where it lies."""
        await self._line.join(queue.arena, queue.ring.front)

    async def ready(self, lent: Lent, queue: BatchQueue) -> None:
        """Before a place is taken for it. Raises ServeError."""
        with _named(lent):
            await self._line.ready(lent, queue.arena)

    async def read_into(self, lent: Lent, room: memoryview) -> None:
        """See Line. Raises ServeError."""
        with _named(lent):
            await self._line.read_into(lent, room)

    async def write(self, lent: Lent, data: Buffer) -> None:
        """See Line. Raises ServeError."""
        with _named(lent):
            await self._line.write(lent, data)

    def shares(self, data: Buffer) -> bool:
        """See Line."""
        return self._line.shares(data)

    def enter(self, region: DeviceRegion) -> None:
        """One user more."""
        region.users += 1

    def leave(self, region: DeviceRegion) -> None:
        """One user less."""
        region.users -= 1
        self._look(region)

    def forget(self, region: DeviceRegion) -> None:
        """It is not registered any more."""
        region.registered = False
        self._look(region)

    async def closed(self) -> None:
        """Return when what was forgotten so far, and is not in use, is closed."""
        if self._closing:
            await asyncio.wait(set(self._closing))

    def stop(self) -> None:
        """Let go of everything at once."""
        self._line.stop()

    def _look(self, region: DeviceRegion) -> None:
        if region.registered or region.users:
            return
        task = asyncio.get_running_loop().create_task(self._close(region))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, region: DeviceRegion) -> None:
        self._names[region.handle] -= 1
        if not self._names[region.handle]:  # else it is registered by another name as well
            del self._names[region.handle]
            await self._on_close(region.handle)
        await self._line.close(region.lend(0, 0))


class DeviceDestination:
    """Room for one output in device memory, good until closed. What is put there is on the device when
    `flush` returns; its response is released after that: rows of a batch are copied where they lie."""

    __slots__ = ("_data", "_memory", "_region", "byte_size", "filled", "lent")

    def __init__(self, memory: DeviceMemory, region: DeviceRegion, lent: Lent) -> None:
        self._memory, self._region, self.lent = memory, region, lent
        self.byte_size = lent.nbytes
        self.filled = False  # by a worker, before anybody puts anything here
        self._data: Buffer | None = None
        memory.enter(region)

    def put(self, output: str, data: Buffer) -> None:
        """Take an output that has to fit. Raises ServeError."""
        must_fit(output, memoryview(data).nbytes, self.byte_size)
        if not self.filled:
            self._data = data if self._memory.shares(data) else bytes(data)

    async def flush(self) -> None:
        """Raises ServeError."""
        data, self._data = self._data, None
        if data is not None:
            await self._memory.write(self.lent, data)

    def close(self) -> None:
        """It will not be written any more."""
        self._memory.leave(self._region)


def must_fit(output: str, nbytes: int, there: int) -> None:
    """Raises ServeError for an output larger than the room for it."""
    if nbytes > there:
        text = (
            f"shared memory size specified with the request for output '{output}' ({there} "
            f"bytes) should be at least {nbytes} bytes to hold the results"
        )
        raise ServeError(Kind.INTERNAL, text)


@contextlib.contextmanager
def _named(lent: Lent) -> Iterator[None]:
    """What goes wrong is told with the region's name."""
    try:
        yield
    except ServeError as fault:
        text = f"shared memory region '{lent.region}' cannot be used: {fault.message}"
        raise ServeError(Kind.UNAVAILABLE, text) from None
