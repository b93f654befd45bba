"""The ferry: a process that carries bytes between clients' device memory and this server's own.

    python -m fastserve.workers.ferry FD

    owner                                              ferry
      | -- keep {nbytes} + a memfd --------------------->|   memory 0, for whatever is not in an arena
      | <-- devices {count} -----------------------------|   0: there is no driver, and it ends
      | -- share {memory, nbytes} + a memfd ------------>|   an arena
      | -- open {handle, device, nbytes} --------------->|   64 bytes in hex; of nbytes or more
      | -- read {handle, device, offset, nbytes, memory, at} -->|   from the device to there
      | -- write {handle, device, offset, nbytes, memory, at} ->|   from there to the device
      | -- close {handle, device} ---------------------->|
      | -- unshare {memory} ---------------------------->|
      | <-- done {} or refused {words} ------------------|   one answer each, in order

Memory is registered with CUDA as it is used, CHUNK_BYTES at a time; a copy is of one chunk, since the driver
refuses one that begins in registered memory and ends in other.

A front process never initialises CUDA: this one does, when the first client registers memory, and only with
handles of clients. It runs no model. One thread, one question at a time; the owner has as many answers as it
waits for. A handle that a ferry before this one had open is opened again when it is named.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from fastserve.devices.cuda import Cuda, CudaFault
from fastserve.devices.handles import OpenHandles
from fastserve.workers.control import Control, ControlFault, PeerGone
from fastserve.workers.tie import tie_to_owner

log = logging.getLogger(__name__)

# What the driver says of a bad argument, or of what this machine cannot; after anything else the context may
# be broken for good. By CUresult: INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_CONTEXT, MAP_FAILED,
# UNMAP_FAILED, ALREADY_MAPPED, NOT_MAPPED, PEER_ACCESS_UNSUPPORTED, OPERATING_SYSTEM, INVALID_HANDLE,
# PEER_ACCESS_ALREADY_ENABLED, TOO_MANY_PEERS, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED,
# NOT_PERMITTED, NOT_SUPPORTED.
_HARMLESS = {1, 2, 101, 201, 205, 206, 208, 211, 217, 304, 400, 704, 711, 712, 713, 800, 801}


CHUNK_BYTES = 8 << 20
"""Of an arena only what is used is touched, and stays so: registering touches all pages of a chunk, 4 ms."""


class Memory:
    """Memory that the server has as well. `fd` is closed."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises OSError."""
        try:
            self._mapped = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._starts: dict[int, tuple[int, int]] = {}  # of a chunk: where, and who has registered it

    def pieces(self, cuda: Cuda, device: int, at: int, nbytes: int) -> Iterator[memoryview]:
        """[at, at + nbytes), chunk by chunk, each registered if that can be. `device` has been entered."""
        with memoryview(self._mapped) as whole:
            while nbytes:
                number, first = divmod(at, CHUNK_BYTES)
                size = min(nbytes, CHUNK_BYTES - first)
                if number not in self._starts:
                    chunk = whole[at - first : at - first + CHUNK_BYTES]
                    self._starts[number] = _register(cuda, chunk), device
                with whole[at : at + size] as piece:
                    yield piece
                at, nbytes = at + size, nbytes - size

    def close(self, cuda: Cuda) -> None:
        """Nothing of it is copied any more. Raises CudaFault."""
        for start, device in self._starts.values():
            if start:
                cuda.enter(device)
                cuda.unregister(start)
        self._mapped.close()


def _register(cuda: Cuda, chunk: memoryview) -> int:
    """Its address, or 0: the driver then copies it through memory of its own."""
    try:
        return cuda.register(chunk)
    except CudaFault as fault:
        log.warning("memory that is copied from and to a device could not be registered: %s", fault)
        return 0


class BeyondError(Exception):
    """A client has told of more bytes than its allocation has."""


class Ferry:
    """The handles that are open, and the copies."""

    def __init__(self, cuda: Cuda, staging: Memory) -> None:
        self._cuda = cuda
        self._memories = {0: staging}
        self._handles = OpenHandles(cuda)
        self.broken = False

    def answer(self, asked: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Do what is asked."""
        told = {name: asked[name] for name in asked if name != "op"}
        try:
            getattr(self, f"_{asked['op']}")(**told, **({"fd": fds[0]} if fds else {}))
            return {"op": "done"}
        except OSError as error:
            return {"op": "refused", "words": error.strerror or "no memory"}
        except CudaFault as fault:
            self.broken = fault.code not in _HARMLESS
            return {"op": "refused", "words": str(fault)}
        except BeyondError as fault:
            return {"op": "refused", "words": str(fault)}

    def _open(self, handle: str, device: int, nbytes: int) -> None:
        count = self._cuda.count()
        if not 0 <= device < count:
            raise BeyondError(f"device {device} was registered, there are {count}")
        known = self._handles.has(self, device, bytes.fromhex(handle))  # by another name it is good
        address = self._address(handle, device)
        try:
            self._check(address, device, nbytes)
        except BeyondError:
            if not known:
                self._close(handle, device)
            raise

    def _check(self, address: int, device: int, nbytes: int) -> None:
        """Raises BeyondError for memory of another device, or of fewer bytes."""
        where, there = self._cuda.device_of(address), self._cuda.extent(address)
        if where is not None and where != device:
            raise BeyondError(f"device {device} was registered, its memory is on device {where}")
        if there is None:  # then whether the last byte can be read is what can be known
            last = bytearray(1)
            try:
                self._cuda.to_host(last, address + max(nbytes, 1) - 1)
            except CudaFault as fault:
                if fault.code not in _HARMLESS:
                    raise
                raise BeyondError(f"{nbytes} bytes were registered, and the last cannot be read") from None
        elif not 1 <= nbytes <= there:
            raise BeyondError(f"{nbytes} bytes were registered, its memory has {there}")

    def _read(self, handle: str, device: int, offset: int, nbytes: int, memory: int, at: int) -> None:
        address = self._address(handle, device) + offset
        for piece in self._memories[memory].pieces(self._cuda, device, at, nbytes):
            self._cuda.to_host(piece, address)
            address += piece.nbytes

    def _write(self, handle: str, device: int, offset: int, nbytes: int, memory: int, at: int) -> None:
        address = self._address(handle, device) + offset
        for piece in self._memories[memory].pieces(self._cuda, device, at, nbytes):
            self._cuda.to_device(address, piece)
            address += piece.nbytes

    def _share(self, memory: int, nbytes: int, fd: int) -> None:
        self._memories[memory] = Memory(fd, nbytes)

    def _unshare(self, memory: int) -> None:
        self._memories.pop(memory).close(self._cuda)

    def _close(self, handle: str, device: int) -> None:
        self._handles.close(self, device, bytes.fromhex(handle))

    def _address(self, handle: str, device: int) -> int:
        return self._handles.open(self, device, bytes.fromhex(handle))


def main(arguments: list[str]) -> int:
    """Runs until the line is closed, or until a fault of the driver's that a context does not survive."""
    tie_to_owner(int(arguments[0]))
    os.set_inheritable(int(arguments[0]), False)
    control = Control(socket.socket(fileno=int(arguments[0])), owner=False, trusted=True)
    try:
        first, fds = control.receive()
        staging = Memory(fds[0], first["nbytes"])
        cuda = Cuda.load()
        count = 0 if cuda is None else cuda.count()
        control.send({"op": "devices", "count": count})
        if cuda is None or not count:
            return 0
        return _carry(control, Ferry(cuda, staging))
    except PeerGone:
        return 0
    finally:
        control.close()


def _carry(control: Control, ferry: Ferry) -> int:
    while not ferry.broken:
        message, fds = control.receive()
        if message["op"] == "stop":
            return 0
        control.send(ferry.answer(message, fds))
    raise ControlFault("the CUDA context is broken")


if __name__ == "__main__":
    with open("/proc/self/comm", "w") as comm:
        comm.write("fs:ferry")
    try:
        sys.exit(main(sys.argv[1:]))
    except ControlFault as fault:
        sys.exit(f"fastserve's ferry ends: {fault}")
