"""Client memory on GPUs (CUDA IPC): which requests read and write it in place, and how it is taken back.

A request's tensors stay on the GPU only if its batches are dense, no scheduler decides before the queue, and
every worker computes on that device and has said that its batches go over it (for ONNX models that depends on
the packages installed). Other requests that name such memory are refused (serving/client_shared_memory.py).

A client frees memory once it is unregistered, and memory freed under an open handle is undefined in CUDA:

    number = closing.begin()                     sent to workers with the handle, returned by them when closed
    await closing.all_closed(asked, number)      every worker has closed it, is dead, or is late

Closings are numbered: a handle may be registered, opened and taken back again before a worker has reported
the first closing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from fastserve.codec import slab_contents
from fastserve.codec.slab_contents import LentNote, write_lent
from fastserve.devices.inventory import VISIBLE
from fastserve.engine.engine import cache_stage_of, fast_queue_of
from fastserve.repository.version import Version
from fastserve.request import InferRequest, Lent
from fastserve.tensor import DType
from fastserve.util.memory import zero_view

if TYPE_CHECKING:
    from fastserve.engine.batch_queue import BatchQueue


NO_DEVICE = -1


def lending_device(version: Version) -> int:
    """Return the GPU whose memory all workers of a version read and write in place; NO_DEVICE if none."""
    config, queue = version.config, fast_queue_of(version)
    if queue is None or not (queue.dense and queue.on_device) or cache_stage_of(version) is not None:
        return NO_DEVICE
    if not config.places or VISIBLE in config.env:
        return NO_DEVICE
    devices = {one.gpu for one in config.places}
    return devices.pop() if len(devices) == 1 else NO_DEVICE


def lend(
    version: Version, request: InferRequest, inputs: Mapping[str, Lent], rooms: Mapping[str, Lent]
) -> None:
    """Put the tensors that workers can access in place into `request.lent` and `request.placed`, no others.
    The sizes of inputs were checked before; an output is placed only if it fits."""
    if not (inputs or rooms) or not version.batching or not request.inputs:
        return
    device, queue = lending_device(version), fast_queue_of(version)
    rows = next(iter(request.inputs.values())).shape[0]
    if device == NO_DEVICE or queue is None or not 0 < rows <= queue.max_rows:
        return
    request.lent = {
        name: lent
        for name, lent in inputs.items()
        if lent.device == device and _is_aligned(lent, request.inputs[name].dtype)
    }
    for name in request.lent:  # its size is looked at, and nothing is copied of it
        tensor = request.inputs[name]
        tensor.data = zero_view(prod(tensor.shape) * tensor.dtype.item_bytes)
    for name in request.outputs or version.outputs:
        spec, lent = version.outputs[name], rooms.get(name)
        nbytes = rows * (spec.row_bytes or 0)
        if lent is None or lent.device != device or not _is_aligned(lent, spec.dtype):
            continue
        if 0 < nbytes <= lent.nbytes:
            request.placed[name] = replace(lent, nbytes=nbytes)


def _is_aligned(lent: Lent, dtype: DType) -> bool:
    """Whether the client's offset is a multiple of the element size. A kernel that reads misaligned memory
    fails, its CUDA context with it, and the worker dies. Allocations are aligned to 256 bytes."""
    return lent.offset % (dtype.item_bytes or 1) == 0


def attach_lent(queue: BatchQueue, place: int, request: InferRequest) -> None:
    """Attach the request's client memory to its place, for the worker. Raises ServeError without room."""
    data = write_lent(
        LentNote(_numbered(request.lent, queue.inputs), _numbered(request.placed, queue.outputs))
    )
    offset = queue.ring.allocate_slab(len(data))
    if not offset:
        raise queue.too_many()
    queue.ring.slab(offset, len(data), True)[:] = data
    queue.ring.attach_slab(place, offset, len(data))


def _numbered(lents: Mapping[str, Lent], names: Iterable[str]) -> list[slab_contents.LentTensor]:
    numbers = {name: number for number, name in enumerate(names)}
    return [(numbers[name], o.handle, o.device, o.offset, o.nbytes, o.region) for name, o in lents.items()]


log = logging.getLogger(__name__)

# A worker lets go of it when what it has on its device has landed. One that takes longer hangs.
CLOSE_LIMIT_S = 5.0

WorkerKey = tuple[int, int, int]  # version, part, worker


class RegionClosings:
    """Closings of client regions that workers have not confirmed yet."""

    def __init__(self) -> None:
        self._waited: dict[tuple[WorkerKey, int], asyncio.Future[None]] = {}
        self._last = 0

    def begin(self) -> int:
        """Return the number of a new closing."""
        self._last += 1
        return self._last

    async def all_closed(self, asked: Iterable[WorkerKey], number: int) -> None:
        """Return when all workers in `asked` have closed the region, or after LIMIT_S."""
        loop = asyncio.get_running_loop()
        waited = {(who, number) for who in asked}
        futures = [self._waited.setdefault(key, loop.create_future()) for key in waited]
        if not futures:
            return
        _, late = await asyncio.wait(futures, timeout=CLOSE_LIMIT_S)
        if late:
            log.warning("%d workers still have a client's GPU memory open that is unregistered", len(late))
        for key in waited:  # nobody waits for the late ones any more: who hangs for ever keeps nothing here
            if self._waited.get(key) in late:
                del self._waited[key]

    def closed(self, who: WorkerKey, number: int) -> None:
        """Record that a worker has closed a region."""
        self._settle([(who, number)])

    def gone(self, who: WorkerKey) -> None:
        """Record that a worker is dead: all that it had open is closed."""
        self._settle([key for key in self._waited if key[0] == who])

    def version_gone(self, version: int) -> None:
        """Record that all workers of a version have ended."""
        self._settle([key for key in self._waited if key[0][0] == version])

    def _settle(self, keys: list[tuple[WorkerKey, int]]) -> None:
        for key in keys:
            future = self._waited.pop(key, None)
            if future is not None and not future.done():
                future.set_result(None)
