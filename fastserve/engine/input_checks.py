"""Checks of a request's inputs against the model's, and slices of their rows without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from fastserve._ext.flatten import walk_bytes
from fastserve.errors import invalid
from fastserve.repository.version import Version
from fastserve.tensor import DTYPES, Tensor, TensorSpec, count_items, fits_shape

_LENGTH_BYTES = 4


def check_inputs(version: Version, inputs: Mapping[str, Tensor]) -> int:
    """Return the number of rows, 0 for a model without a batch axis.

    Requests of every dialect, transport and scheduler pass this check. Later code may iterate over rows or
    elements: their number is bounded by the bytes that were sent, or small.

    Raises ServeError INVALID_ARGUMENT naming the input that is missing, unknown, of another dtype or
    shape, of the wrong size, or of another number of rows than the rest; and for more rows than
    `max_queue_rows` that bring nothing: only bytes that were sent make rows dear to a client.
    """
    rows, known, batching = -1, 0, version.batching
    for name, spec in version.inputs.items():
        tensor = inputs.get(name)
        if tensor is None:
            if name in version.config.options.optional_inputs:
                continue
            _check_names(version, inputs)
            raise invalid(f"input {name!r} is missing")
        known += 1
        _check_tensor(tensor, spec, batching)
        if batching:
            if rows not in (-1, tensor.shape[0]):
                raise invalid(f"input {name!r} has {tensor.shape[0]} rows, the inputs before it have {rows}")
            rows = tensor.shape[0]
    if known < len(inputs):
        _check_names(version, inputs)
    most = version.config.max_queue_rows
    if rows > most and not any(map(_size_of, inputs.values())):
        raise invalid(f"{rows} rows without a single element, allowed: up to {most} (max_queue_rows)")
    return max(rows, 0)


def _check_names(version: Version, inputs: Mapping[str, Tensor]) -> None:
    for name in inputs:
        if name not in version.inputs and name not in _added(version):
            raise invalid(f"input {name!r} is not one of the model's: {', '.join(version.inputs)}")


def _added(version: Version) -> set[str]:
    """Return the inputs that the scheduler adds to a request: a sequence's controls and states."""
    sequences = version.config.options.sequences
    return sequences.inputs if sequences is not None else set()


def _check_tensor(tensor: Tensor, spec: TensorSpec, batching: bool) -> None:
    if tensor.dtype is not spec.dtype:
        raise invalid(f"input {spec.name!r} is {tensor.dtype.name}, the model takes {spec.dtype.name}")
    if batching and not tensor.shape:
        raise invalid("Batching Run() input tensors must have at least one dimension")
    shape = tensor.shape[1:] if batching else tensor.shape
    if shape != spec.shape and spec.shape is not None and not fits_shape(shape, spec.shape):
        lead = [-1] if batching else []
        wanted = [*lead, *spec.shape]
        raise invalid(f"input {spec.name!r} has shape {list(tensor.shape)}, the model takes {wanted}")
    items, size = count_items(tensor.shape), _size_of(tensor)
    needed = items * (spec.dtype.item_bytes or _LENGTH_BYTES)
    exact = spec.dtype.item_bytes or not items
    if size != needed and (exact or size < needed):
        least = "" if exact else "at least "
        raise invalid(f"input {spec.name!r} brings {size} bytes, its shape needs {least}{needed}")


def _size_of(tensor: Tensor) -> int:
    return tensor.data.nbytes if isinstance(tensor.data, memoryview) else len(tensor.data)


class RowSlices:
    """Slices of a request's rows, as views. Rows of strings differ in size, so each slice is located from the
    position of the one before: slices taken in order need one pass over the data."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = inputs
        # Of the last slice: its first row and where that begins, and the same of the row behind it.
        self._known = dict.fromkeys(inputs, ((0, 0), (0, 0)))

    def take(self, start: int, rows: int) -> dict[str, Tensor]:
        """Return rows [start, start + rows) of every tensor."""
        return {name: self._slice(name, tensor, start, rows) for name, tensor in self._inputs.items()}

    def _slice(self, name: str, tensor: Tensor, start: int, rows: int) -> Tensor:
        per_row = prod(tensor.shape[1:])
        data = memoryview(tensor.data).cast("B")
        if tensor.dtype is DTYPES["bytes"]:
            row, at = next((known for known in reversed(self._known[name]) if known[0] <= start), (0, 0))
            first = at + _length_of(data[at:], (start - row) * per_row)
            last = first + _length_of(data[first:], rows * per_row)
            self._known[name] = (start, first), (start + rows, last)
        else:
            size = per_row * tensor.dtype.item_bytes
            first, last = start * size, (start + rows) * size
        return Tensor(tensor.dtype, (rows, *tensor.shape[1:]), data[first:last])


def _length_of(data: memoryview, elements: int) -> int:
    """Return how many bytes the first `elements` strings take."""
    return min(walk_bytes(data, elements)[2], len(data))


def empty_outputs(version: Version) -> dict[str, Tensor]:
    """Return the outputs of a batching model for zero rows, without a run. Free axes have length 0."""
    return {
        name: Tensor(spec.dtype, (0, *(max(n, 0) for n in spec.shape or ())), b"")
        for name, spec in version.outputs.items()
    }
