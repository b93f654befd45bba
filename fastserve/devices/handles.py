"""Handles of clients' device memory that a process has open: each once, however many in it use it.

    handles = process_handles()             None: this machine has no driver
    at = handles.open(me, 0, handle)        the address; me: whoever will close it
    handles.close(me, 0, handle)            nothing, where `me` has not opened it

A driver counts how often a context has opened a handle (older ones tell nothing of that), and closing it once
too often takes it from whoever else in the process uses it: a shared worker has a thread for each model, in
one context. So the driver sees the first who opens it and the last who closes it, and who has not opened it
cannot close it. Opening and closing are done under one lock: nobody is given an address that is being closed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fastserve.devices.cuda import Cuda

Key = tuple[int, bytes]  # device, handle


@dataclass(slots=True)
class _Opened:
    """One that is open. `owners` are told apart by identity."""

    address: int
    owners: dict[int, object] = field(default_factory=dict)


class OpenHandles:
    """Those of one process. Any method may raise CudaFault, and enters the device on the calling thread."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._turn = threading.Lock()
        self._opened: dict[Key, _Opened] = {}

    def open(self, owner: object, device: int, handle: bytes) -> int:
        """Its address, which is `owner`'s to use until it closes it; a second time is none."""
        with self._turn:
            self.cuda.enter(device)
            found = self._opened.get((device, handle))
            if found is None:
                found = self._opened[device, handle] = _Opened(self.cuda.open_handle(handle))
            found.owners[id(owner)] = owner
            return found.address

    def has(self, owner: object, device: int, handle: bytes) -> bool:
        """Whether it is open, and `owner` is one of those who have opened it."""
        with self._turn:
            found = self._opened.get((device, handle))
            return found is not None and id(owner) in found.owners

    def close(self, owner: object, device: int, handle: bytes) -> None:
        """`owner` uses it no more: nothing of its own that is enqueued may."""
        with self._turn:
            found = self._opened.get((device, handle))
            if found is None or found.owners.pop(id(owner), None) is None or found.owners:
                return
            del self._opened[device, handle]  # also where the driver refuses: it would again
            self.cuda.enter(device)
            self.cuda.close_handle(found.address)


_begin = threading.Lock()
_ours: OpenHandles | None = None


def process_handles() -> OpenHandles | None:
    """Those of this process; the first call initialises CUDA. None where there is no driver that works."""
    global _ours
    with _begin:
        if _ours is None:
            cuda = Cuda.load()
            _ours = None if cuda is None else OpenHandles(cuda)
        return _ours
