"""Requests whose tensors lie on the GPU that their model's workers compute on, and stay there.

Only where a batch has columns, nothing decides before its queue, and every worker is on that one device and
has said that its batches go over it (of ONNX models what is installed beside decides that); whoever asks for
anything else has the bytes carried (serving/device_regions.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from fastserve.blank import blank
from fastserve.codec import lending
from fastserve.codec.lending import LentNote, write_lent
from fastserve.devices.found import VISIBLE
from fastserve.engine.scheduler import cache_stage_of, fast_queue_of
from fastserve.repository.placement import SIMULATED
from fastserve.repository.version import Version
from fastserve.request import InferRequest, Lent
from fastserve.tensor import DType

if TYPE_CHECKING:
    from fastserve.engine.batch_queue import BatchQueue

NONE = -1
SIMULATED_DEVICE = 0  # which one a simulated device stands for


def lending_device(version: Version) -> int:
    """The GPU whose memory all workers of a version read and write where it lies; NONE without such."""
    config, queue = version.config, fast_queue_of(version)
    if queue is None or not (queue.dense and queue.on_device) or cache_stage_of(version) is not None:
        return NONE
    if not config.places or VISIBLE in config.env:
        return NONE
    devices = {SIMULATED_DEVICE if one.device == SIMULATED else one.gpu for one in config.places}
    return devices.pop() if len(devices) == 1 else NONE


def lend(
    version: Version, request: InferRequest, inputs: Mapping[str, Lent], rooms: Mapping[str, Lent]
) -> None:
    """Put into `request.lent` and `request.placed` what its workers read and write by themselves; the rest is
    left as it is. Inputs have been found to be of the right size; an output goes there only if it fits."""
    if not (inputs or rooms) or not version.batching or not request.inputs:
        return
    device, queue = lending_device(version), fast_queue_of(version)
    rows = next(iter(request.inputs.values())).shape[0]
    if device == NONE or queue is None or not 0 < rows <= queue.max_rows:
        return
    request.lent = {
        name: lent
        for name, lent in inputs.items()
        if lent.device == device and _is_aligned(lent, request.inputs[name].dtype)
    }
    for name in request.lent:  # its size is looked at, and nothing is copied of it
        tensor = request.inputs[name]
        tensor.data = blank(prod(tensor.shape) * tensor.dtype.item_bytes)
    for name in request.outputs or version.outputs:
        spec, lent = version.outputs[name], rooms.get(name)
        nbytes = rows * (spec.row_bytes or 0)
        if lent is None or lent.device != device or not _is_aligned(lent, spec.dtype):
            continue
        if 0 < nbytes <= lent.nbytes:
            request.placed[name] = replace(lent, nbytes=nbytes)


def _is_aligned(lent: Lent, dtype: DType) -> bool:
    """Else a kernel that touches it, for a result that is not contiguous, say, ends the context: the client's
    offset would have killed the worker. Allocations themselves are aligned to 256 bytes."""
    return lent.offset % (dtype.item_bytes or 1) == 0


def landing(version: Version, request: InferRequest) -> BatchQueue | None:
    """The queue in whose places a request's inputs may be put by others, once it has one, and from whose
    places its outputs may be taken; None where something looks at them before or after."""
    queue = fast_queue_of(version)
    if queue is None or cache_stage_of(version) is not None or not request.inputs:
        return None
    rows = next(iter(request.inputs.values())).shape[:1]
    return queue if not version.batching or (rows and 0 < rows[0] <= queue.max_rows) else None


def attach_lent(queue: BatchQueue, place: int, request: InferRequest) -> None:
    """Tell the place's worker. Raises ServeError when there is no room to."""
    data = write_lent(
        LentNote(_numbered(request.lent, queue.inputs), _numbered(request.placed, queue.outputs))
    )
    offset = queue.ring.lease(len(data))
    if not offset:
        raise queue.too_many()
    queue.ring.slab(offset, len(data), True)[:] = data
    queue.ring.attach_slab(place, offset, len(data))


def _numbered(lents: Mapping[str, Lent], names: Iterable[str]) -> list[lending.Lent]:
    numbers = {name: number for number, name in enumerate(names)}
    return [(numbers[name], o.handle, o.device, o.offset, o.nbytes) for name, o in lents.items()]
