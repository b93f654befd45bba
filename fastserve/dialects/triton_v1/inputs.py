"""A header and the raw bytes beside it -> an InferRequest, checked in the original's order (spec 3.4).

    names given twice, batch size, outputs known, inputs counted, each input's name, shape and size
    -> the bytes, from the body, the raw_input entries or shared memory

Tensors are views of what was received: nothing is copied before the engine writes the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Protocol

from fastserve._ext.flatten import walk_bytes
from fastserve.dialects.triton_v1.header import (
    FLAG_END,
    FLAG_START,
    InputHeader,
    RequestHeader,
)
from fastserve.errors import invalid
from fastserve.request import InferRequest, Lent
from fastserve.serving.model_view import Dims, ModelView, TensorView
from fastserve.serving.shared_memory import Range, Regions
from fastserve.tensor import DType, Tensor

Buffer = bytes | bytearray | memoryview


class Data(Protocol):
    """Where the bytes of inputs come from, asked for in the header's order."""

    def take(self, name: str, nbytes: int) -> Buffer:
        """The bytes of the next input. Raises ServeError."""

    def finish(self) -> None:
        """Raises ServeError when bytes are left over and may not be."""


class Entries:
    """gRPC: one raw_input entry for each input; entries beyond the last are nobody's (spec 3.4)."""

    def __init__(self, entries: Sequence[Buffer], model: str) -> None:
        self._entries = entries
        self._model = model
        self._at = 0

    def take(self, name: str, nbytes: int) -> Buffer:
        if self._at == len(self._entries):  # the original counts the inputs before this one
            raise invalid(
                f"expected tensor data for at least {self._at} inputs but got only "
                f"{len(self._entries)} sets of data for model '{self._model}'"
            )
        entry = self._entries[self._at]
        self._at += 1
        if len(entry) != nbytes:
            raise invalid(
                f"unexpected size {len(entry)} for input '{name}', expecting {nbytes} "
                f"for model '{self._model}'"
            )
        return entry

    def finish(self) -> None:
        """Surplus entries are ignored."""


def read_request(
    view: ModelView, header: RequestHeader, data: Data, shared: Regions
) -> tuple[InferRequest, dict[str, Lent]]:
    """The neutral request, and inputs whose bytes are on a device, for `Regions.bring`. Raises ServeError."""
    check_header(view, header)
    measured = [measure(view, one, header.batch_size) for one in header.inputs]
    inputs, outside = {}, {}
    for one, (shape, nbytes) in zip(header.inputs, measured, strict=True):
        place = one.shared
        if place is None:
            raw, lent = data.take(one.name, nbytes), None
        else:
            _check_shared_size(view, one, place, nbytes, shared)
            raw, lent = shared.borrow(place)
        tensor = view.inputs[one.name]
        if lent is not None:
            outside[one.name] = lent
        elif not tensor.dtype.item_bytes:
            check_strings(raw, shape, one.name, view.model)
        inputs[one.name] = Tensor(tensor.dtype, shape, raw)
    data.finish()
    return build_request(header, inputs), outside


def build_request(header: RequestHeader, inputs: dict[str, Tensor]) -> InferRequest:
    """The request of a header that was checked."""
    return InferRequest(
        inputs,
        tuple(one.name for one in header.outputs),
        request_id=str(header.id) if header.id else "",
        priority=header.priority,
        sequence_id=header.correlation_id,
        sequence_start=bool(header.flags & FLAG_START),
        sequence_end=bool(header.flags & FLAG_END),
        timeout_us=header.timeout_us,
    )


def check_header(view: ModelView, header: RequestHeader) -> None:
    """Everything about a header but its inputs' own shapes. Raises ServeError INVALID_ARGUMENT."""
    _check_twice([one.name for one in header.inputs], "input '{}' already exists in request")
    _check_twice([one.name for one in header.outputs], "output '{}' already requested")
    if header.batch_size < 1:
        raise invalid(f"inference request batch-size must be >= 1 for '{view.model}'")
    if header.batch_size != 1 and header.batch_size > view.max_batch_size:
        raise invalid(f"inference request batch-size must be <= {view.max_batch_size} for '{view.model}'")
    for output in header.outputs:
        if output.name not in view.outputs:
            raise invalid(f"unexpected inference output '{output.name}' for model '{view.model}'")
    if len(header.inputs) != len(view.inputs):
        counts = f"expected {len(view.inputs)} inputs but got {len(header.inputs)} inputs"
        raise invalid(f"{counts} for model '{view.model}'")


def _check_twice(names: Sequence[str], words: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise invalid(words.format(twice))


def measure(view: ModelView, given: InputHeader, batch_size: int) -> tuple[Dims, int]:
    """The full shape as the model takes it, and the bytes the tensor must have. Raises ServeError."""
    tensor = view.inputs.get(given.name)
    if tensor is None:
        raise invalid(f"unexpected inference input '{given.name}' for model '{view.model}'")
    dims = _choose_dims(view, tensor, given.dims)
    shape = tensor.to_model((batch_size, *dims) if view.batching else dims, batching=view.batching)
    if not tensor.dtype.item_bytes:
        return shape, given.batch_byte_size
    nbytes = count_bytes(shape, tensor.dtype)
    if given.batch_byte_size not in (0, nbytes):
        raise invalid(
            f"specific batch-byte-size for input '{given.name}' does not match expected byte-size "
            f"calculated from shape and datatype for model '{view.model}'"
        )
    return shape, nbytes


def count_bytes(shape: Dims, dtype: DType) -> int:
    """Bytes of a tensor of fixed-size elements."""
    return prod(shape) * dtype.item_bytes


def _choose_dims(view: ModelView, tensor: TensorView, given: Dims) -> Dims:
    if given:
        if not tensor.fits(given):
            words = f"Expected {write_dims(tensor.dims or ())}, got {write_dims(given)}"
            raise invalid(f"unexpected shape for input '{tensor.name}' for model '{view.model}'. {words}")
        return given
    if tensor.dims is None or -1 in tensor.dims:
        raise invalid(
            f"model supports variable-size for input '{tensor.name}', "
            f"request must specify input shape for model '{view.model}'"
        )
    return tensor.dims


def _check_shared_size(
    view: ModelView, given: InputHeader, place: Range, nbytes: int, shared: Regions
) -> None:
    if place.byte_size != nbytes:
        shared.borrow(replace(place, byte_size=1))  # a region that is not there is said first
        raise invalid(
            f"unexpected shared-memory size {place.byte_size} for input '{given.name}', "
            f"expecting {nbytes} for model '{view.model}'"
        )


def check_strings(raw: Buffer, shape: Dims, name: str, model: str) -> None:
    """Raises ServeError unless `raw` is as many strings as the shape says (the original trusts them)."""
    count = prod(shape)
    found, _, end = walk_bytes(raw, min(count, len(raw)) + 1)
    if found != count or end != len(raw):
        raise invalid(f"the bytes of input '{name}' are not the strings its shape needs for model '{model}'")


def write_dims(dims: Dims) -> str:
    """A shape as the original's texts have it."""
    return f"[{','.join(map(str, dims))}]"
