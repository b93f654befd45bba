"""Memory of clients on the worker's own GPU, as tensors: requests whose rows are there and in no column.

    lent = LentMemory(device, inputs, outputs)
    for one in lent.read(ring, slot):            each place that brings any; a handle is opened once
        one.inputs["x"]                          [rows, ...] on the device, read and never written
        one.outputs["y"]                         [rows, ...] on the device, where the answer goes
    lent.close(handle)                           its client has taken it back
    lent.close_all()                             the worker ends; others in its process may go on

The context is the one torch has: the primary one of the device. The order of what is done there is the
caller's; a handle is closed only when nothing that was enqueued uses it any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from fastserve.backends.torch_tensors import torch_dtype
from fastserve.codec.lending import Lent, read_lent
from fastserve.devices.cuda import CudaFault
from fastserve.devices.handles import process_handles
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.tensor import TensorSpec

log = logging.getLogger(__name__)

Tensor = Any
Span = tuple[int, int]  # first row, and the row behind the last
OWN = 0  # the worker's own device is the first it sees
UNREADABLE = "client memory on the GPU cannot be opened: {}"


@dataclass(slots=True)
class LentPlace:
    """What one request brings, by the names of tensors; `fault`: why it cannot be used."""

    row: int
    rows: int
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    fault: ServeError | None = None


class _Pointed:
    """Bytes at an address of the device, as torch takes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class LentMemory:
    """The handles this worker has opened. `device` is torch's name; one that is simulated has the host's
    memory, and the driver's addresses are the host's too."""

    def __init__(
        self, device: str, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
    ) -> None:
        self._device = device
        self._inputs, self._outputs = list(inputs.values()), list(outputs.values())
        self._opened: dict[bytes, int] = {}  # those that this worker has not closed, and their addresses

    def read(self, ring: BatchRing, slot: int) -> list[LentPlace]:
        """The places of a slot that bring device memory."""
        return [
            self._read_place(row, rows, bytes(ring.slab(offset, nbytes)))
            for row, rows, offset, nbytes in ring.places(slot)
            if offset
        ]

    def close(self, handle: bytes) -> None:
        """Let go of it; nothing of this worker's may be using it."""
        handles = process_handles() if self._opened.pop(handle, None) is not None else None
        if handles is not None:
            with _told():
                handles.close(self, OWN, handle)

    def close_all(self) -> None:
        """The same of all of them."""
        for handle in list(self._opened):
            self.close(handle)

    def _read_place(self, row: int, rows: int, data: bytes) -> LentPlace:
        place = LentPlace(row, rows)
        try:
            note = read_lent(data)
            for lents, specs, found in (
                (note.inputs, self._inputs, place.inputs),
                (note.outputs, self._outputs, place.outputs),
            ):
                for lent in lents:
                    spec = specs[lent[0]]
                    found[spec.name] = self._tensor(lent, spec, rows)
        except (CudaFault, ValueError, LookupError) as error:
            place.inputs, place.outputs = {}, {}
            place.fault = ServeError(Kind.UNAVAILABLE, UNREADABLE.format(error))
        return place

    def _tensor(self, lent: Lent, spec: TensorSpec, rows: int) -> Tensor:
        import torch

        _, handle, _, offset, nbytes = lent
        shape, dtype = (rows, *(spec.shape or ())), torch_dtype(spec.dtype.name)
        if nbytes != prod(shape) * spec.dtype.item_bytes:
            raise ValueError("not as many bytes as its rows have")
        address = self._address(handle) + offset
        if self._device.startswith("cuda"):
            flat = torch.as_tensor(_Pointed(address, nbytes), device=self._device)
            if flat.data_ptr() != address:  # of another device's memory torch makes a copy, that nobody reads
                raise ValueError("it is not memory of this worker's device")
        else:
            flat = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
        return flat.view(dtype).reshape(shape)

    def _address(self, handle: bytes) -> int:
        address = self._opened.get(handle)
        if address is None:
            handles = process_handles()
            if handles is None:
                raise LookupError("there is no driver")
            address = self._opened[handle] = handles.open(self, OWN, handle)
        return address


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except CudaFault as fault:
        log.warning("client memory could not be closed: %s", fault)


def gaps(places: Iterable[Span], end: int) -> Iterator[Span]:
    """The rows below `end` that none of these, in order, has."""
    at = 0
    for first, last in places:
        if first > at:
            yield at, first
        at = last
    if at < end:
        yield at, end
