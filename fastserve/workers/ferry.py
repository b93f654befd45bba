"""The ferry: a process that carries bytes between clients' device memory and this server's own.

    python -m fastserve.workers.ferry FD

    owner                                              ferry
      | -- keep {staging_bytes} + a memfd -------------->|
      | <-- devices {count} -----------------------------|   0: there is no driver, and it ends
      | -- open {handle, device, nbytes} --------------->|   64 bytes in hex; of nbytes or more
      | -- read {handle, device, offset, nbytes} ------->|   into the staging memory
      | -- write {handle, device, offset, nbytes} ------>|   out of it
      | -- close {handle, device} ---------------------->|
      | <-- done {} or refused {words} ------------------|   one answer each, in order

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
from typing import Any

from fastserve.devices.cuda import Cuda, CudaFault
from fastserve.workers.control import Control, ControlFault, PeerGone
from fastserve.workers.tie import tie_to_owner

log = logging.getLogger(__name__)

# What the driver says of a bad argument, or of what this machine cannot; after anything else the context may
# be broken for good. By CUresult: INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_CONTEXT, MAP_FAILED,
# UNMAP_FAILED, ALREADY_MAPPED, NOT_MAPPED, PEER_ACCESS_UNSUPPORTED, OPERATING_SYSTEM, INVALID_HANDLE,
# PEER_ACCESS_ALREADY_ENABLED, TOO_MANY_PEERS, NOT_PERMITTED, NOT_SUPPORTED.
_HARMLESS = {1, 2, 101, 201, 205, 206, 208, 211, 217, 304, 400, 704, 711, 800, 801}


class BeyondError(Exception):
    """A client has told of more bytes than its allocation has."""


class Ferry:
    """The handles that are open, and the copies."""

    def __init__(self, cuda: Cuda, staging: mmap.mmap) -> None:
        self._cuda, self._staging = cuda, staging
        self._opened: dict[tuple[str, int], int] = {}
        self._pinned = False  # or has been tried
        self.broken = False

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        try:
            getattr(self, f"_{asked['op']}")(**{name: asked[name] for name in asked if name != "op"})
            return {"op": "done"}
        except CudaFault as fault:
            self.broken = fault.code not in _HARMLESS
            return {"op": "refused", "words": str(fault)}
        except BeyondError as fault:
            return {"op": "refused", "words": str(fault)}

    def _open(self, handle: str, device: int, nbytes: int) -> None:
        count = self._cuda.count()
        if not 0 <= device < count:
            raise BeyondError(f"device {device} was registered, there are {count}")
        address = self._address(handle, device)
        try:
            self._check(address, device, nbytes)
        except BeyondError:
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

    def _read(self, handle: str, device: int, offset: int, nbytes: int) -> None:
        with memoryview(self._staging) as staging:
            self._cuda.to_host(staging[:nbytes], self._address(handle, device) + offset)

    def _write(self, handle: str, device: int, offset: int, nbytes: int) -> None:
        with memoryview(self._staging) as staging:
            self._cuda.to_device(self._address(handle, device) + offset, staging[:nbytes])

    def _close(self, handle: str, device: int) -> None:
        address = self._opened.pop((handle, device), None)
        if address is not None:
            self._cuda.enter(device)
            self._cuda.close_handle(address)

    def _address(self, handle: str, device: int) -> int:
        self._cuda.enter(device)
        if not self._pinned:
            self._pin()
        found = self._opened.get((handle, device))
        if found is None:
            found = self._opened[handle, device] = self._cuda.open_handle(bytes.fromhex(handle))
        return found

    def _pin(self) -> None:
        """Once there is a context; without it the driver copies through memory of its own."""
        self._pinned = True
        try:
            self._cuda.register(self._staging)
        except CudaFault as fault:
            log.warning("the ferry's memory could not be registered: %s", fault)


def main(arguments: list[str]) -> int:
    """Runs until the line is closed, or until a fault of the driver's that a context does not survive."""
    tie_to_owner(int(arguments[0]))
    os.set_inheritable(int(arguments[0]), False)
    control = Control(socket.socket(fileno=int(arguments[0])), owner=False, trusted=True)
    try:
        first, fds = control.receive()
        staging = mmap.mmap(fds[0], first["staging_bytes"])
        os.close(fds[0])
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
        message = control.receive().message
        if message["op"] == "stop":
            return 0
        control.send(ferry.answer(message))
    raise ControlFault("the CUDA context is broken")


if __name__ == "__main__":
    with open("/proc/self/comm", "w") as comm:
        comm.write("fs:ferry")
    try:
        sys.exit(main(sys.argv[1:]))
    except ControlFault as fault:
        sys.exit(f"fastserve's ferry ends: {fault}")
