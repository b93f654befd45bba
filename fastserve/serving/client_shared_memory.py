"""Client memory: regions that clients register, in shared memory or on GPUs, for inputs and outputs.

One registry serves every dialect, and refuses in the words that Triton's APIs share (spec 6). A region is an
open file under /dev/shm with a range of it, or a CUDA IPC handle and a size: they share one space of names.

Data of files goes through pread and pwrite, never a mapping: a client that shrinks its file makes a short
read, which is an error, and never a signal. Every request that uses a region holds its own duplicate of the
descriptor, so unregistering ends nothing. Names may not leave /dev/shm; ranges are checked in whole numbers
and against the file's size at each use.

This process never opens a handle: initialising CUDA is for workers (docs/gpu.md). Names, sizes, ranges and
device numbers are checked here; whether a handle can be opened, a worker finds out when a request first names
it. A device region is closed when the last request releases it; its name is free at once.

Several front processes have the same regions (replication.py). The owner of the models opens a file once, and
sends the others its descriptor: what a client does to the name afterwards makes no difference between fronts.
A device region is closed when no front uses it any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import stat
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fastserve._ext.flatten import walk_bytes
from fastserve.devices.inventory import MACHINE, DeviceInventory
from fastserve.engine import lend
from fastserve.errors import Kind, NoDeviceError, ServeError, internal, invalid, unsupported
from fastserve.repository.version import Version
from fastserve.request import InferRequest, Lent
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState, StateRecord
from fastserve.util.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from typing_extensions import Buffer


log = logging.getLogger(__name__)

HANDLE_BYTES = 64


OnClose = Callable[[bytes], Awaitable[None]]


async def keep_nothing(handle: bytes) -> None:
    """Where no worker opens handles."""


@dataclass(slots=True, eq=False)
class DeviceRegion:
    """One registered handle. `users` are requests that read or will write it, `away` other front processes
    that may have such requests."""

    name: str
    handle: bytes
    device: int
    byte_size: int
    number: int = 0
    users: int = 0
    registered: bool = True
    away: set[int] = field(default_factory=set)

    def lend(self, offset: int, nbytes: int) -> Lent:
        """A range of it, already found to lie within."""
        return Lent(self.handle, self.device, offset, nbytes, self.name)


class DeviceMemory:
    """All device regions of a front process."""

    def __init__(self, on_close: OnClose = keep_nothing, machine: DeviceInventory = MACHINE) -> None:
        """`on_close` is called with a handle that is given back, and awaited: workers may have opened it."""
        self._machine, self._on_close = machine, on_close
        self.on_unused: Callable[[int], None] | None = None
        """Where other processes close handles: called with the number of a region that is given back."""
        self._forgotten: dict[int, DeviceRegion] = {}  # by number, those that other front processes may use
        self._names: Counter[bytes] = Counter()  # how many regions a handle is registered for
        self._closing: set[asyncio.Task[None]] = set()

    async def check(self, device: int, byte_size: int) -> None:
        """Compare a registration with this machine's GPUs, which are looked for once, by a child process.
        Raises ServeError INVALID_ARGUMENT, and NoDeviceError where there are none."""
        devices = await asyncio.to_thread(self._machine.devices)
        if not devices:
            raise NoDeviceError
        if not 0 <= device < len(devices):
            raise _refused(f"device {device} was registered, there are {len(devices)}")
        there = devices[device].memory_bytes
        if not 1 <= byte_size <= there:
            raise _refused(f"{byte_size} bytes were registered, device {device} has {there}")

    def add(self, region: DeviceRegion) -> None:
        """Count a region that has been registered."""
        self._names[region.handle] += 1

    def enter(self, region: DeviceRegion) -> None:
        """One user more."""
        region.users += 1

    def leave(self, region: DeviceRegion) -> None:
        """One user less."""
        region.users -= 1
        self._look(region)

    def forget(self, region: DeviceRegion, away: Iterable[int] = ()) -> None:
        """It is not registered any more; front processes `away` say when they use it no more."""
        region.registered = False
        region.away |= set(away)
        if region.away:
            self._forgotten[region.number] = region
        self._look(region)

    def unused(self, number: int, front: int) -> None:
        """A front process uses a region no more that was forgotten."""
        region = self._forgotten.get(number)
        if region is not None:
            region.away.discard(front)
            self._look(region)

    def front_ended(self, front: int) -> None:
        """A front process has ended, and uses nothing any more."""
        for number in list(self._forgotten):
            self.unused(number, front)

    async def closed(self) -> None:
        """Return when what was forgotten so far, and is not in use, is closed."""
        if self._closing:
            await asyncio.wait(set(self._closing))

    def _look(self, region: DeviceRegion) -> None:
        if region.registered or region.users or region.away:
            return
        self._forgotten.pop(region.number, None)
        if self.on_unused is not None:
            self._drop_name(region.handle)
            self.on_unused(region.number)
            return
        task = asyncio.get_running_loop().create_task(self._close(region))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, region: DeviceRegion) -> None:
        if self._drop_name(region.handle):
            await self._on_close(region.handle)

    def _drop_name(self, handle: bytes) -> bool:
        """Return whether it is registered by no other name."""
        self._names[handle] -= 1
        if self._names[handle]:
            return False
        del self._names[handle]
        return True


class DeviceBuffer:
    """Room for one output in device memory, good until closed. The model's worker writes it."""

    __slots__ = ("_memory", "_region", "byte_size", "lent")

    def __init__(self, memory: DeviceMemory, region: DeviceRegion, lent: Lent) -> None:
        self._memory, self._region, self.lent = memory, region, lent
        self.byte_size = lent.nbytes
        memory.enter(region)

    def put(self, output: str, data: Buffer) -> None:
        """Check the size of an output that a worker has written. Raises ServeError."""
        must_fit(output, memoryview(data).nbytes, self.byte_size)

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
        raise internal(text)


def _refused(text: str) -> ServeError:
    log.warning("device memory of a client's was refused: %s", text)
    return invalid(text)


class FileBuffer:
    """Room for one output in a client's memory, good until closed."""

    __slots__ = ("_fd", "_offset", "_region", "byte_size")

    def __init__(self, region: str, fd: int, offset: int, byte_size: int) -> None:
        self._region = region
        self._fd = fd
        self._offset = offset
        self.byte_size = byte_size

    def __enter__(self) -> FileBuffer:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """It will not be written any more."""
        os.close(self._fd)

    def put(self, output: str, data: Buffer) -> None:
        """Write an output that has to fit. Raises ServeError."""
        must_fit(output, memoryview(data).nbytes, self.byte_size)
        self.write(data)

    def write(self, data: Buffer) -> None:
        """Write into the client's memory. Raises ServeError when its file has shrunk: it is never grown."""
        view = memoryview(data).cast("B")
        if self._offset + len(view) > os.fstat(self._fd).st_size:
            raise beyond(self._region)
        at = 0
        try:
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], self._offset + at)
        except OSError as error:  # a file with placeholders, and no memory is left to fill them
            raise broken(self._region, error) from None


OutputBuffer = FileBuffer | DeviceBuffer


class OutputBuffers(dict[str, OutputBuffer]):
    """Client memory for outputs by their names, good until closed; and what is `kept` as long."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Callable[[], None]] = []

    @property
    def offload(self) -> bool:
        """Return whether an output is on a device: writing it then goes to a thread."""
        return any(isinstance(room, DeviceBuffer) for room in self.values())

    def __enter__(self) -> OutputBuffers:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """None of them will be written any more; a second time is none."""
        while self:
            self.popitem()[1].close()
        while self.kept:
            self.kept.pop()()


def beyond(region: str) -> ServeError:
    """Of a range that leaves its region."""
    return invalid(f"Invalid offset + byte size for shared memory region: '{region}'")


def broken(region: str, error: OSError) -> ServeError:
    """Of memory that the system does not give."""
    return ServeError(Kind.UNAVAILABLE, f"shared memory region '{region}' cannot be used: {error.strerror}")


FOLDER = "/dev/shm"

RESERVED = "triton_python_backend_shm_region_"

UINT64_MAX = 2**64 - 1

REGIONS_MAX = 4096

KEY_BYTES = 255

LENGTH_BYTES, PIECE_BYTES = 4, 1 << 20  # of a string; of strings that are looked at at once

LARGE_BYTES = 8 << 20

"""Of inputs in regions, from here on: 7 ms of copying. They are read in a thread."""

_KINDS = {"system": "system", "cuda": "CUDA"}

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


@dataclass(frozen=True, slots=True)
class Region:
    """One registered region. `fd` is the registry's own."""

    name: str
    key: str
    offset: int
    byte_size: int
    fd: int


AnyRegion = Region | DeviceRegion

PART = "regions"  # of the state that all front processes have alike

_NAMES: dict[type[AnyRegion] | None, str] = {None: "", Region: "file", DeviceRegion: "device"}
_KIND_BY_NAME = {name: kind for kind, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Range:
    """Where in which region a tensor is; `offset` counts from the region's start."""

    region: str
    offset: int
    byte_size: int


class Regions(ReplicatedPart):
    """The regions of one front process. With `allowed` false nothing can be registered.

    What changes them returns what is to be awaited, if anything: until all front processes know, and until a
    GPU's memory is given back.
    """

    def __init__(self, allowed: bool, folder: str = FOLDER, state: ReplicatedState | None = None) -> None:
        self.allowed = allowed
        self.devices: DeviceMemory | None = None
        self.budget: MemoryBudget | None = None  # of the process, for what requests bring from regions
        self._folder = folder
        self._state = state or ReplicatedState()
        self._regions: dict[str, AnyRegion] = {}
        self._lock = threading.Lock()  # held while a descriptor is looked up, and while one is closed
        self._numbers = itertools.count(1)

    def open(self, devices: DeviceMemory) -> None:
        """Begin to have what other front processes have."""
        self.devices = devices
        note = self._state.note
        if note is not None:
            devices.on_unused = lambda number: note(PART, {"unused": number})
        self._state.add(PART, self)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> Awaitable[None] | None:
        """Open a client's memory. Raises ServeError in the original's words."""
        if self._state.ask is not None:
            given = {"name": name, "key": key, "offset": offset, "byte_size": byte_size}
            return self._ask("register", given)
        self._must_be_free(name)
        fd = self._open(name, key)
        try:
            _check_range(name, fd, offset, byte_size)
        except ServeError:
            os.close(fd)
            if any(region.key == key for region in self.list_files()):
                raise internal(f"Invalid shared memory region: '{key}'") from None  # as 24.10 tells it
            raise
        region = self._regions[name] = Region(name, key, offset, byte_size, fd)
        return self._publish([_record(region)])

    async def register_device(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Register a client's memory on a GPU. Workers open the handle when a request first names it. Raises
        ServeError, INVALID_ARGUMENT for what no GPU of this machine has, and NoDeviceError where there are
        none; the message of a refusal is the dialect's."""
        self._must_be_free(name)
        if self.devices is None:
            raise NoDeviceError
        await self.devices.check(device, byte_size)
        if self._state.ask is not None:
            given = {"name": name, "handle": handle.hex(), "device": device, "byte_size": byte_size}
            await self._ask("register_device", given)
            return
        self._must_be_free(name)  # another may have come meanwhile
        region = DeviceRegion(name, handle, device, byte_size, next(self._numbers))
        self._regions[name] = region
        self.devices.add(region)
        published = self._publish([_record(region)])
        if published is not None:
            await published

    def unregister(self, name: str, kind: type[AnyRegion] | None = None) -> Awaitable[None] | None:
        """Forget one region; an unknown name is no fault, nor is one of the other kind."""
        self.must_be_allowed()
        if self._state.ask is not None:
            return self._ask("unregister", {"name": name, "kind": _NAMES[kind]})
        region = self._regions.get(name)
        if region is None or (kind is not None and not isinstance(region, kind)):
            return None
        return self._forget_all([region])

    def unregister_all(self, kind: type[AnyRegion] | None = None) -> Awaitable[None] | None:
        """Forget every region, as a client asks for it."""
        self.must_be_allowed()
        if self._state.ask is not None:
            return self._ask("unregister_all", {"kind": _NAMES[kind]})
        return self._forget_all([r for r in self._regions.values() if kind is None or isinstance(r, kind)])

    # --- as one part of what all front processes have alike (replication.py)

    async def carry_out(self, change: Content) -> None:
        """Do what a client of another front process asked for. Raises ServeError."""
        done: Awaitable[None] | None
        asked, given = change["do"], change["given"]
        if asked == "register":
            done = self.register(given["name"], given["key"], given["offset"], given["byte_size"])
        elif asked == "register_device":
            handle = bytes.fromhex(given["handle"])
            done = self.register_device(given["name"], handle, given["device"], given["byte_size"])
        elif asked == "unregister":
            done = self.unregister(given["name"], _KIND_BY_NAME[given["kind"]])
        else:
            done = self.unregister_all(_KIND_BY_NAME[given["kind"]])
        if done is not None:
            await done

    def apply(self, content: Content, fds: list[int]) -> None:
        """Take over what the owner has registered or forgotten."""
        if "forget" in content:
            for name in content["forget"]:
                self._forget(self._regions[name])
        elif "key" in content:
            self._regions[content["name"]] = Region(**content, fd=fds[0])
        else:
            region = DeviceRegion(**{**content, "handle": bytes.fromhex(content["handle"])})
            self._regions[region.name] = region
            assert self.devices is not None
            self.devices.add(region)

    def records(self) -> Iterator[StateRecord]:
        """Every region, for a new front process."""
        return map(_record, list(self._regions.values()))

    def noted(self, front: int, content: Content) -> None:
        """A front process uses a region no more."""
        if self.devices is not None:
            self.devices.unused(content["unused"], front)

    def front_ended(self, front: int) -> None:
        """A front process has ended."""
        if self.devices is not None:
            self.devices.front_ended(front)

    def _ask(self, do: str, given: Content) -> Awaitable[None]:
        self.must_be_allowed()
        assert self._state.ask is not None
        return self._state.ask(PART, {"do": do, "given": given})

    def _publish(self, records: list[StateRecord]) -> Awaitable[None] | None:
        """Let all front processes know; None where there is but this one."""
        publish = self._state.publish
        return None if publish is None else publish(PART, records)

    # --- what is registered

    def list_files(self, name: str = "") -> list[Region]:
        """All regions that are files, or one. Raises ServeError NOT_FOUND."""
        return [region for region in self._named(name, "system") if isinstance(region, Region)]

    def list_devices(self, name: str = "") -> list[DeviceRegion]:
        """All regions on GPUs, or one. Raises ServeError NOT_FOUND."""
        return [region for region in self._named(name, "cuda") if isinstance(region, DeviceRegion)]

    def must_be_allowed(self) -> None:
        """Raises ServeError UNIMPLEMENTED unless the server was told to allow client memory."""
        if not self.allowed:
            raise unsupported(DISABLED)

    def locate(self, range: Range) -> Lent | None:
        """Return the device memory of a range; None for a file's, which `read` reads. From any thread. Raises
        ServeError."""
        region = self._find(range)
        return region.lend(range.offset, range.byte_size) if isinstance(region, DeviceRegion) else None

    def count_bytes(self, version: Version, ranges: Iterable[Range | None]) -> int:
        """Return how many bytes of files a request with these ranges will read, unless it is refused."""
        held = (range for range in ranges if range is not None)
        files = (one.byte_size for one in held if isinstance(self._regions.get(one.region), Region))
        return min(sum(files), most_bytes(version))

    def read(self, range: Range) -> bytes:
        """The bytes of a range as they are now; from any thread. Call it when the model can take as many
        (`check_total`). Raises ServeError."""
        with self._opened(range) as (region, fd):
            return _read_exactly(region, fd, range.byte_size, range.offset)

    def walk(self, range: Range, most: int) -> tuple[int, int, int]:
        """(count, last, end) of the strings in a range, as `walk_bytes` has them of memory. They are read
        piece by piece, and no further than `most` go: what follows from it has to be found again in what is
        read later, since a client may write meanwhile. From any thread. Raises ServeError."""
        count = last = end = 0
        with self._opened(range) as (region, fd):
            while count < most and end <= range.byte_size - LENGTH_BYTES:
                size = min(PIECE_BYTES, range.byte_size - end)
                piece = _read_exactly(region, fd, size, range.offset + end)
                found, begins, ends = walk_bytes(piece, most - count)
                count, last, end = count + found, end + begins, end + ends
        return count, last, end

    @contextmanager
    def _opened(self, range: Range) -> Iterator[tuple[Region, int]]:
        """A region that is a file, and a descriptor of it that stays open. Raises ServeError."""
        with self._lock:
            region = self._find_file(range)
            try:
                fd = os.dup(region.fd)
            except OSError as error:  # no descriptor is left
                raise broken(region.name, error) from None
        try:
            yield region, fd
        finally:
            os.close(fd)

    def bring(
        self, version: Version, request: InferRequest, outside: Mapping[str, Lent], rooms: OutputBuffers
    ) -> None:
        """Leave a checked request's tensors on devices to the model's workers: inputs `outside` and outputs
        in `rooms`. Raises ServeError: UNIMPLEMENTED for memory that the workers cannot access in place,
        INTERNAL for an output that does not fit."""
        places = {n: room for n, room in rooms.items() if isinstance(room, DeviceBuffer)}
        if self.devices is None or not (outside or places):
            return
        for lent in outside.values():
            region = self._find_device(lent)
            self.devices.enter(region)
            rooms.kept.append(partial(self.devices.leave, region))
        lend(version, request, outside, {name: room.lent for name, room in places.items()})
        for name, lent in outside.items():
            if name not in request.lent:
                raise _not_in_place(version, lent)
        for name, room in places.items():
            if name in request.placed:
                continue
            spec, rows = version.outputs.get(name), _count_rows(version, request)
            must_fit(name, rows * (spec.row_bytes or 0) if spec is not None else 0, room.byte_size)
            raise _not_in_place(version, room.lent)

    def read_into(self, range: Range, memory: memoryview) -> None:
        """Fill `memory`, as many bytes as the range has: the only copy there is. Raises ServeError, also for
        device memory: it cannot be read at once."""
        region = self._find_file(range)
        try:
            count = os.preadv(region.fd, [memory], region.offset + range.offset)
        except OSError as error:
            raise broken(region.name, error) from None
        if count != range.byte_size:
            raise beyond(region.name)

    def hold(self, range: Range) -> OutputBuffer:
        """Where an output will be written, to be closed; stays good if the region is unregistered meanwhile.
        Raises ServeError."""
        region = self._find(range)
        if isinstance(region, DeviceRegion):
            assert self.devices is not None
            return DeviceBuffer(self.devices, region, region.lend(range.offset, range.byte_size))
        try:
            fd = os.dup(region.fd)
        except OSError as error:  # no descriptor is left
            raise broken(region.name, error) from None
        return FileBuffer(region.name, fd, region.offset + range.offset, range.byte_size)

    def close(self) -> None:
        """Forget every region."""
        for region in self.list_files():
            self._forget(region)
        self._regions.clear()

    def _must_be_free(self, name: str) -> None:
        self.must_be_allowed()
        if name in self._regions:
            raise ServeError(Kind.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._regions) >= REGIONS_MAX:
            raise ServeError(Kind.UNAVAILABLE, f"there are {REGIONS_MAX} shared memory regions already")

    def _named(self, name: str, kind: str) -> list[AnyRegion]:
        if not name:
            return [self._regions[known] for known in sorted(self._regions)]
        region = self._regions.get(name)
        if region is None:
            raise ServeError(Kind.NOT_FOUND, f"Unable to find {kind} shared memory region: '{name}'")
        is_kind = "cuda" if isinstance(region, DeviceRegion) else "system"
        if is_kind != kind:
            text = f"is registered as {_KINDS[is_kind]} shared memory, not {_KINDS[kind]} shared memory"
            raise ServeError(Kind.NOT_FOUND, f"The region named '{name}' {text}")
        return [region]

    def _forget_all(self, regions: list[AnyRegion]) -> Awaitable[None] | None:
        if not regions:
            return None
        for region in regions:
            self._forget(region)
        published = self._publish([StateRecord({"forget": [region.name for region in regions]})])
        devices = self.devices if any(isinstance(region, DeviceRegion) for region in regions) else None
        if published is None:
            return None if devices is None else devices.closed()
        return _close_after(published, devices)

    def _forget(self, region: AnyRegion) -> None:
        if isinstance(region, DeviceRegion):
            del self._regions[region.name]
            assert self.devices is not None
            self.devices.forget(region, self._state.fronts())
            return
        with self._lock:
            del self._regions[region.name]
            os.close(region.fd)

    def _find_device(self, lent: Lent) -> DeviceRegion:
        region = self._regions.get(lent.region)
        if not isinstance(region, DeviceRegion) or region.handle != lent.handle:
            raise _unknown(lent.region)  # unregistered since
        if lent.offset + lent.nbytes > region.byte_size:  # and registered again
            raise beyond(region.name)
        return region

    def _find_file(self, range: Range) -> Region:
        region = self._find(range)
        if isinstance(region, DeviceRegion):
            raise _unknown(range.region)
        return region

    def _find(self, range: Range) -> AnyRegion:
        region = self._regions.get(range.region)
        if region is None:
            raise _unknown(range.region)
        if range.offset >= region.byte_size:
            raise invalid(f"Invalid offset for shared memory region: '{region.name}'")
        # Nothing at the very start is what a range without a size says, and is refused as in the original.
        if not 0 < range.offset + range.byte_size <= region.byte_size:
            raise beyond(region.name)
        return region

    def _open(self, name: str, key: str) -> int:
        bare = key.lstrip("/")
        if bare.startswith(RESERVED):
            raise invalid(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains "
                f"the reserved prefix '{RESERVED}'"
            )
        if (
            not bare
            or bare in (".", "..")
            or "/" in bare
            or "\0" in bare
            or len(os.fsencode(bare)) > KEY_BYTES
        ):
            raise invalid(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(os.path.join(self._folder, bare), flags)
        except OSError:
            raise internal(f"Unable to open shared memory region: '{key}'") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe or a device has no range of bytes
            os.close(fd)
            raise internal(f"Unable to open shared memory region: '{key}'")
        return fd


async def _close_after(published: Awaitable[None], devices: DeviceMemory | None) -> None:
    """Return when all front processes know, and what they do not use is closed."""
    await published
    if devices is not None:
        await devices.closed()


def _record(region: AnyRegion) -> StateRecord:
    """Return what another front process needs to have the region."""
    content: dict[str, Any] = {"name": region.name, "byte_size": region.byte_size}
    if isinstance(region, DeviceRegion):
        handle = region.handle.hex()
        return StateRecord({**content, "handle": handle, "device": region.device, "number": region.number})
    return StateRecord({**content, "key": region.key, "offset": region.offset}, (region.fd,))


def most_bytes(version: Version) -> int:
    """Return how many bytes a request of this version may bring in client memory, or have once they are
    converted: its largest batch, or `max_queue_bytes` where that is more."""
    config = version.config
    row_bytes = (spec.row_bytes or 0 for spec in version.inputs.values())
    return max(config.max_queue_bytes, max(config.max_batch_size, 1) * sum(row_bytes))


def check_total(version: Version, ranges: Iterable[Range]) -> None:
    """Raise ServeError for more bytes in client memory than a request of this version may bring."""
    total = sum(range.byte_size for range in ranges)
    if total <= version.config.max_queue_bytes:
        return
    most = most_bytes(version)
    if total > most:
        text = f"inputs in shared memory have {total} bytes, model '{version.model}' takes at most {most}"
        raise invalid(f"{text} (max_queue_bytes)")


def hold_files(regions: Regions, ranges: Mapping[str, Range]) -> OutputBuffers:
    """Rooms for outputs, none of them on a device; close them. Raises ServeError, also for device memory."""
    rooms = hold_buffers(regions, ranges)
    if rooms.offload:
        rooms.close()
        raise invalid("outputs in device memory are written by those who can wait for it")
    return rooms


def hold_buffers(regions: Regions, ranges: Mapping[str, Range]) -> OutputBuffers:
    """Rooms for outputs; close them. Raises ServeError."""
    rooms = OutputBuffers()
    try:
        for name, range in ranges.items():
            rooms[name] = regions.hold(range)
    except BaseException:
        rooms.close()
        raise
    return rooms


def _read_exactly(region: Region, fd: int, size: int, offset: int) -> bytes:
    """Raises ServeError for a file that has become shorter."""
    try:
        data = os.pread(fd, size, region.offset + offset)
    except OSError as error:
        raise broken(region.name, error) from None
    if len(data) != size:
        raise beyond(region.name)
    return data


def _check_range(name: str, fd: int, offset: int, byte_size: int) -> None:
    failed = f"failed to register shared memory region '{name}'"
    if offset % mmap.ALLOCATIONGRANULARITY:  # the original maps from there
        raise invalid(f"{failed}: unable to process address spaceInvalid argument")
    if byte_size < 1 or offset + byte_size > min(os.fstat(fd).st_size, UINT64_MAX):
        raise invalid(f"{failed}: invalid args")


def _count_rows(version: Version, request: InferRequest) -> int:
    first = next(iter(request.inputs.values()), None)
    return first.shape[0] if first is not None and first.shape and version.batching else 0


def _not_in_place(version: Version, lent: Lent) -> ServeError:
    where = f"CUDA memory of device {lent.device} in place; use system shared memory"
    text = (
        f"shared memory region '{lent.region}' cannot be used: model '{version.model}' cannot access {where}"
    )
    return unsupported(text)


def _unknown(region: str) -> ServeError:
    return ServeError(Kind.NOT_FOUND, f"Unable to find shared memory region: '{region}'")
