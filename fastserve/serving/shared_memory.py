"""Client shared memory: regions that clients register, read and written through their file.

One registry serves every dialect, and refuses in the words that Triton's APIs share (spec 6).

A region is an open file under /dev/shm with a range of it, or memory on a GPU (device_regions.py): they share
one space of names. Data of files goes through pread and pwrite, never a
mapping: a client that shrinks its file makes a short read, which is an error, and never a signal. Every
request that uses a region holds its own duplicate of the descriptor, so unregistering ends nothing.

Names and ranges come from clients: names may not leave /dev/shm, ranges are checked in whole numbers
and against the file's size at each use.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fastserve.apart import outlast
from fastserve.blank import blank
from fastserve.engine import landing, lend
from fastserve.errors import Kind, NoDeviceError, ServeError, internal, invalid
from fastserve.repository.version import Version
from fastserve.request import InferRequest, Lent
from fastserve.serving.device_regions import DeviceDestination, DeviceMemory, DeviceRegion
from fastserve.serving.rooms import Destination, Room, Rooms, beyond, broken

if TYPE_CHECKING:
    pass

FOLDER = "/dev/shm"
RESERVED = "triton_python_backend_shm_region_"
UINT64_MAX = 2**64 - 1
REGIONS_MAX = 4096
KEY_BYTES = 255
LARGE_BYTES = 8 << 20
"""Of inputs in regions, from here on: 7 ms of copying. They are read apart from the event loop."""
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


@dataclass(frozen=True, slots=True)
class Range:
    """Where in which region a tensor is; `offset` counts from the region's start."""

    region: str
    offset: int
    byte_size: int


class Regions:
    """The regions of one front process. With `allowed` false nothing can be registered."""

    def __init__(self, allowed: bool, folder: str = FOLDER) -> None:
        self.allowed = allowed
        self.devices: DeviceMemory | None = None
        self._folder = folder
        self._regions: dict[str, AnyRegion] = {}
        self._lock = threading.Lock()  # held while a descriptor is looked up, and while one is closed
        self.largest_bytes = 0  # of the regions there have been

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a client's memory. Raises ServeError in the original's words."""
        self._must_be_free(name)
        fd = self._open(name, key)
        try:
            _check_range(name, fd, offset, byte_size)
        except ServeError:
            os.close(fd)
            if any(region.key == key for region in self.list_files()):
                raise internal(f"Invalid shared memory region: '{key}'") from None  # as 24.10 tells it
            raise
        self._regions[name] = Region(name, key, offset, byte_size, fd)
        self.largest_bytes = max(self.largest_bytes, byte_size)

    async def register_device(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Open a client's memory on a GPU. Raises ServeError, and NoDeviceError where there are no devices;
        the words for a handle that cannot be opened are the dialect's. It is gone through with when its
        client leaves: what is open is in the list, and may be unregistered."""
        self._must_be_free(name)
        if self.devices is None:
            raise NoDeviceError
        await outlast(self._register_device(self.devices, DeviceRegion(name, handle, device, byte_size)))

    async def _register_device(self, devices: DeviceMemory, region: DeviceRegion) -> None:
        await devices.open(region)
        try:
            self._must_be_free(region.name)  # another may have come meanwhile
        except ServeError:
            devices.forget(region)
            raise
        self._regions[region.name] = region

    def unregister(self, name: str, kind: type[AnyRegion] | None = None) -> Awaitable[None] | None:
        """Forget one region; an unknown name is no fault, nor is one of the other kind. To be awaited, if
        anything, until the memory is given back."""
        self.must_be_allowed()
        region = self._regions.get(name)
        if region is None or (kind is not None and not isinstance(region, kind)):
            return None
        return self._forget_all([region])

    def unregister_all(self, kind: type[AnyRegion] | None = None) -> Awaitable[None] | None:
        """Forget every region, as a client asks for it."""
        self.must_be_allowed()
        return self._forget_all([r for r in self._regions.values() if kind is None or isinstance(r, kind)])

    def list_files(self, name: str = "") -> list[Region]:
        """All regions that are files, or one. Raises ServeError NOT_FOUND."""
        return [region for region in self._named(name, "system") if isinstance(region, Region)]

    def list_devices(self, name: str = "") -> list[DeviceRegion]:
        """All regions on GPUs, or one. Raises ServeError NOT_FOUND."""
        return [region for region in self._named(name, "cuda") if isinstance(region, DeviceRegion)]

    def must_be_allowed(self) -> None:
        """Raises ServeError UNIMPLEMENTED unless the server was told to allow client memory."""
        if not self.allowed:
            raise ServeError(Kind.UNIMPLEMENTED, DISABLED)

    def read(self, range: Range) -> bytes:
        """The bytes of a range as they are now; from any thread. Raises ServeError."""
        with self._lock:
            region = self._find_file(range)
            try:
                fd = os.dup(region.fd)
            except OSError as error:  # no descriptor is left
                raise broken(region.name, error) from None
        try:
            data = os.pread(fd, range.byte_size, region.offset + range.offset)
        except OSError as error:
            raise broken(region.name, error) from None
        finally:
            os.close(fd)
        if len(data) != range.byte_size:
            raise beyond(region.name)
        return data

    def borrow(self, range: Range) -> tuple[bytes, Lent | None]:
        """The bytes of a range, or what `bring` brings them by. From any thread. Raises ServeError."""
        region = self._find(range)
        if isinstance(region, DeviceRegion):
            return b"", region.lend(range.offset, range.byte_size)
        return self.read(range), None

    async def bring(
        self, version: Version, request: InferRequest, outside: Mapping[str, Lent], rooms: Rooms
    ) -> None:
        """See to it that a checked request's tensors on devices reach its model: inputs `outside` are left
        to its workers to read, or carried once it has a place; or their bytes are fetched. What the workers
        will write is said in `rooms`. Raises ServeError."""
        places = {n: room for n, room in rooms.items() if isinstance(room, DeviceDestination)}
        if self.devices is None or not (outside or places):
            return
        for lent in outside.values():
            region = self._find_device(lent)
            self.devices.enter(region)
            rooms.kept.append(partial(self.devices.leave, region))
        lend(version, request, outside, {name: room.lent for name, room in places.items()})
        for name in request.placed:
            places[name].filled = True
        if queue := landing(version, request):
            await self.devices.join(queue)
        for name, lent in outside.items():
            tensor = request.inputs[name]
            if name in request.lent:
                continue
            if queue is None or not tensor.dtype.item_bytes or not lent.nbytes:
                tensor.data = await self.devices.read(lent)
                continue
            await self.devices.ready(lent, queue)
            tensor.data = blank(lent.nbytes)  # its size is looked at, and nothing is copied of it
            request.carried[name] = partial(self.devices.read_into, lent)

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

    def hold(self, range: Range) -> Room:
        """Where an output will be written, to be closed; stays good if the region is unregistered meanwhile.
        Raises ServeError."""
        region = self._find(range)
        if isinstance(region, DeviceRegion):
            assert self.devices is not None
            return DeviceDestination(self.devices, region, region.lend(range.offset, range.byte_size))
        try:
            fd = os.dup(region.fd)
        except OSError as error:  # no descriptor is left
            raise broken(region.name, error) from None
        return Destination(region.name, fd, region.offset + range.offset, range.byte_size)

    def close(self) -> None:
        """Forget every region."""
        for region in self.list_files():
            self._forget(region)
        self._regions.clear()
        if self.devices is not None:
            self.devices.stop()

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
        for region in regions:
            self._forget(region)
        held = any(isinstance(region, DeviceRegion) for region in regions)
        return self.devices.closed() if held and self.devices is not None else None

    def _forget(self, region: AnyRegion) -> None:
        if isinstance(region, DeviceRegion):
            del self._regions[region.name]
            assert self.devices is not None
            self.devices.forget(region)
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


def hold_files(regions: Regions, ranges: Mapping[str, Range]) -> Rooms:
    """Rooms for outputs, of which none has to be flushed; close them. Raises ServeError, also for device
    memory, which is not for those who cannot wait."""
    rooms = hold_rooms(regions, ranges)
    if rooms.apart:
        rooms.close()
        raise invalid("outputs in device memory are written by those who can wait for it")
    return rooms


def hold_rooms(regions: Regions, ranges: Mapping[str, Range]) -> Rooms:
    """Rooms for outputs; close them. Raises ServeError.

    Who puts anything into them calls `flush` before it answers."""
    rooms = Rooms()
    try:
        for name, range in ranges.items():
            rooms[name] = regions.hold(range)
    except BaseException:
        rooms.close()
        raise
    return rooms


def _check_range(name: str, fd: int, offset: int, byte_size: int) -> None:
    failed = f"failed to register shared memory region '{name}'"
    if offset % mmap.ALLOCATIONGRANULARITY:  # the original maps from there
        raise invalid(f"{failed}: unable to process address spaceInvalid argument")
    if byte_size < 1 or offset + byte_size > min(os.fstat(fd).st_size, UINT64_MAX):
        raise invalid(f"{failed}: invalid args")


def _unknown(region: str) -> ServeError:
    return ServeError(Kind.NOT_FOUND, f"Unable to find shared memory region: '{region}'")
