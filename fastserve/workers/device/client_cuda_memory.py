"""Clients' memory on the worker's own GPU, as tensors: inputs and outputs that are in no column of the arena.

    lent = LentMemory(device, inputs, outputs)
    for one in lent.read(ring, slot):            each lease that brings any; a handle is opened once
        one.inputs["x"]                          [rows, ...] on the device, read and never written
        one.outputs["y"]                         [rows, ...] on the device, where the answer goes
    lent.close(handle)                           its client has unregistered it
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

from fastserve.backends.frameworks.torch_tensors import torch_dtype
from fastserve.backends.model_errors import DeviceLost
from fastserve.codec.slab_contents import LentTensor, read_lent
from fastserve.devices.cuda import HARMLESS, Cuda, CudaFault, process_handles
from fastserve.errors import Kind, ServeError, invalid

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.tensor import TensorSpec

log = logging.getLogger(__name__)

Tensor = Any
Span = tuple[int, int]  # first row, and the row behind the last
OWN = 0  # the worker's own device is the first it sees
CANNOT_OPEN = "shared memory region '{}' cannot be used: client memory on the GPU cannot be opened: {}"
OUTSIDE = "shared memory region '{}' cannot be used: {}"


class OutsideError(Exception):
    """A client has named more than its allocation has, or memory of another device."""


@dataclass(slots=True)
class OpenHandle:
    """An opened allocation: its address and, where the driver tells, its size in bytes. Where it does not,
    `readable` bytes have been found to be there."""

    address: int
    nbytes: int | None
    readable: int = 0


@dataclass(slots=True)
class ClientRanges:
    """The device tensors of one request, by name; `fault`: why they cannot be used."""

    row: int
    rows: int
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    fault: ServeError | None = None


class _Pointed:
    """Bytes at an address of the device, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class ClientMemory:
    """The handles that this worker has opened. `device` is torch's name; with "cpu", in tests, the driver's
    addresses are the host's."""

    def __init__(
        self, device: str, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
    ) -> None:
        self._device = device
        self._inputs, self._outputs = list(inputs.values()), list(outputs.values())
        self._opened: dict[bytes, OpenHandle] = {}  # those that this worker has not closed

    def read(self, ring: BatchRing, slot: int) -> list[ClientRanges]:
        """The leases of a slot that bring device memory."""
        return [
            self._read_place(row, rows, bytes(ring.slab(offset, nbytes)))
            for row, rows, offset, nbytes in ring.leases(slot)
            if offset
        ]

    def close(self, handle: bytes) -> None:
        """Close a handle; nothing that this worker has enqueued may use it."""
        handles = process_handles() if self._opened.pop(handle, None) is not None else None
        if handles is not None:
            with _logged():
                handles.close(self, OWN, handle)

    def close_all(self) -> None:
        """Close every handle."""
        for handle in list(self._opened):
            self.close(handle)

    def _read_place(self, row: int, rows: int, data: bytes) -> ClientRanges:
        lease, region = ClientRanges(row, rows), ""
        try:
            note = read_lent(data)
            for lents, specs, found in (
                (note.inputs, self._inputs, lease.inputs),
                (note.outputs, self._outputs, lease.outputs),
            ):
                for lent in lents:
                    spec, region = specs[lent[0]], lent[-1]
                    found[spec.name] = self._tensor(lent, spec, rows)
        except OutsideError as error:
            lease.inputs, lease.outputs = {}, {}
            lease.fault = invalid(OUTSIDE.format(region, error))
        except (CudaFault, ValueError, LookupError) as error:
            lease.inputs, lease.outputs = {}, {}
            lease.fault = ServeError(Kind.UNAVAILABLE, CANNOT_OPEN.format(region, error))
        return lease

    def _tensor(self, lent: LentTensor, spec: TensorSpec, rows: int) -> Tensor:
        import torch

        _, handle, _, offset, nbytes, _ = lent
        shape, dtype = (rows, *(spec.shape or ())), torch_dtype(spec.dtype.name)
        if nbytes != prod(shape) * spec.dtype.item_bytes:
            raise ValueError("not as many bytes as its rows have")
        address = self._address(handle, offset + nbytes) + offset
        if self._device.startswith("cuda"):
            flat = torch.as_tensor(_Pointed(address, nbytes), device=self._device)
            if flat.data_ptr() != address:  # of another device's memory torch makes a copy, that nobody reads
                raise ValueError("it is not memory of this worker's device")
        else:
            flat = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
        return flat.view(dtype).reshape(shape)

    def _address(self, handle: bytes, end: int) -> int:
        """Open the handle, once. Raises OutsideError where its memory has fewer than `end` bytes, or is of
        another device; LookupError, CudaFault, DeviceLost."""
        handles = process_handles()
        if handles is None:
            raise LookupError("there is no driver")
        memory = self._opened.get(handle)
        if memory is None:
            address = handles.open(self, OWN, handle)
            memory = self._opened[handle] = OpenHandle(address, handles.cuda.extent(address))
            if handles.cuda.device_of(address) not in (None, OWN):
                self.close(handle)
                raise OutsideError("its memory is on another device than the one that was registered")
        if memory.nbytes is None and end > memory.readable:
            _read_last(handles.cuda, memory.address, end)
            memory.readable = end
        elif memory.nbytes is not None and end > memory.nbytes:
            raise OutsideError(f"{end} bytes of it are named, its memory has {memory.nbytes}")
        return memory.address


def _read_last(cuda: Cuda, address: int, end: int) -> None:
    """Read the last byte, for drivers that tell no range of memory that another process has allocated. Raises
    OutsideError, and DeviceLost where the context does not survive the attempt."""
    try:
        cuda.to_host(bytearray(1), address + end - 1)
    except CudaFault as fault:
        if fault.code not in HARMLESS:
            raise DeviceLost(fault) from fault
        raise OutsideError(f"{end} bytes of it are named, and the last cannot be read") from None


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except CudaFault as fault:
        log.warning("client memory could not be closed: %s", fault)


def gaps(leases: Iterable[Span], end: int) -> Iterator[Span]:
    """Yield the rows below `end` that none of the spans, in order, covers."""
    at = 0
    for first, last in leases:
        if first > at:
            yield at, first
        at = last
    if at < end:
        yield at, end
