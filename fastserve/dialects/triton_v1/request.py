"""InferRequestHeader and the raw bytes beside it -> an InferRequest, checked (spec 3.1, 3.4).

    batch_size: 2 input { name: "INPUT0" dims: 16 } output { name: "OUTPUT0" cls { count: 3 } } id: 7

Clients send one header with every request and change little of it, so the part before the scalar fields at
its end is read once and cached. Checks come in the original's order: names given twice, batch size, outputs
known, inputs counted, each input's name, shape and size; then the bytes, from the body, the raw_input entries
or shared memory. Tensors are views of the request: nothing is copied before the engine writes the batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from fastserve._ext.flatten import walk_bytes
from fastserve.errors import invalid
from fastserve.protos import load
from fastserve.protos.text import schema_of
from fastserve.request import InferRequest, Lent
from fastserve.serving.client_shared_memory import Range, Regions, check_total
from fastserve.serving.model_view import Dims, ModelView, TensorView
from fastserve.settings.text_proto import TextField, parse_text
from fastserve.tensor import DType, Tensor

if TYPE_CHECKING:
    from fastserve._ext.proto_wire_v1 import SharedMemoryPlace, V1InferMessage


FLAG_START, FLAG_END = 1, 2
REMEMBERED_HEADERS = 256
REMEMBERED_CHARS = 4096

# The scalars as clients print them: in order of their numbers, after the last message, far inside 64 bits.
_TAIL = re.compile(
    r"(?: correlation_id: (?P<correlation_id>[1-9][0-9]{0,17}))?(?: id: (?P<id>[1-9][0-9]{0,17}))?"
    r"(?: flags: (?P<flags>[1-9][0-9]{0,7}))?(?: priority: (?P<priority>[1-9][0-9]{0,7}))?"
    r"(?: timeout_microseconds: (?P<timeout_us>[1-9][0-9]{0,17}))?\s*"
)


@dataclass(frozen=True, slots=True)
class InputHeader:
    """One input. The model's configuration has what is left out: no `dims`, a size of 0."""

    name: str
    dims: tuple[int, ...] = ()
    batch_byte_size: int = 0
    shared: Range | None = None


@dataclass(frozen=True, slots=True)
class OutputHeader:
    """One requested output: raw, or with `classes` > 0 its highest values."""

    name: str
    classes: int = 0
    shared: Range | None = None


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The whole header."""

    batch_size: int = 0
    inputs: tuple[InputHeader, ...] = ()
    outputs: tuple[OutputHeader, ...] = ()
    correlation_id: int = 0
    id: int = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0

    @property
    def destinations(self) -> dict[str, Range]:
        """The shared memory of outputs, by name; it is looked up before the model runs (spec 3.4)."""
        return {one.name: one.shared for one in self.outputs if one.shared is not None}


def read_header(text: str) -> RequestHeader:
    """Read a header in text format. Raises ConfigError when it is not one."""
    if len(text) > REMEMBERED_CHARS:
        return _read_whole(text)
    front, brace, tail = text.rpartition("}")
    match = _TAIL.fullmatch(tail)
    if not brace or match is None:
        return _read_whole(text)
    header = _read_remembered(front + brace)
    given: dict[str, Any] = {name: int(n) for name, n in match.groupdict().items() if n is not None}
    if not given:
        return header
    if any(getattr(header, name) for name in given):  # given twice: the reader reports it
        return _read_whole(text)
    return replace(header, **given)


def _read_whole(text: str) -> RequestHeader:
    found = parse_text(text, _schema(), "NV-InferRequest")
    inputs = (
        InputHeader(
            one.get("name", ""),
            tuple(one.get("dims", ())),
            one.get("batch_byte_size", 0),
            _range(one.get("shared_memory")),
        )
        for one in found.pop("input", ())
    )
    outputs = (
        OutputHeader(
            one.get("name", ""), one.get("cls", {}).get("count", 0), _range(one.get("shared_memory"))
        )
        for one in found.pop("output", ())
    )
    timeout_us = found.pop("timeout_microseconds", 0)
    return RequestHeader(inputs=tuple(inputs), outputs=tuple(outputs), timeout_us=timeout_us, **found)


@cache
def _schema() -> dict[str, TextField]:
    return schema_of(load("triton_v1").InferRequestHeader.DESCRIPTOR)


_read_remembered = lru_cache(maxsize=REMEMBERED_HEADERS)(_read_whole)


def _range(found: Mapping[str, Any] | None) -> Range | None:
    if found is None:
        return None
    return Range(found.get("name", ""), found.get("offset", 0), found.get("byte_size", 0))


def read_message(message: V1InferMessage) -> RequestHeader:
    """Return the header of a gRPC request."""
    return RequestHeader(
        message.batch_size,
        tuple(
            InputHeader(one.name, one.dims, one.batch_byte_size, _read_shared(one.shared_memory))
            for one in message.inputs
        ),
        tuple(
            OutputHeader(one.name, one.class_count or 0, _read_shared(one.shared_memory))
            for one in message.outputs
        ),
        message.correlation_id,
        message.id,
        message.flags,
        message.priority,
        message.timeout_us,
    )


def _read_shared(place: SharedMemoryPlace | None) -> Range | None:
    return None if place is None else Range(place.name, place.offset, place.byte_size)


Buffer = bytes | bytearray | memoryview


class InputData(Protocol):
    """The bytes of inputs, taken in the header's order."""

    def take(self, name: str, nbytes: int) -> Buffer:
        """Return the bytes of the next input. Raises ServeError."""

    def finish(self) -> None:
        """Raise ServeError when bytes are left over and may not be."""


class RawEntries:
    """One raw_input entry of a gRPC request for each input; surplus entries are ignored (spec 3.4)."""

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
        """Ignore surplus entries."""


def read_request(
    view: ModelView, header: RequestHeader, data: InputData, shared: Regions
) -> tuple[InferRequest, dict[str, Lent]]:
    """Return the engine's request, and inputs on a device for `Regions.bring`. Raises ServeError.

    Client memory is read after every check that needs none of it.
    """
    check_header(view, header)
    measured = [measure(view, one, header.batch_size) for one in header.inputs]
    inputs: dict[str, Tensor] = {}
    outside: dict[str, Lent] = {}
    places: dict[str, Range] = {}
    for one, (shape, nbytes) in zip(header.inputs, measured, strict=True):
        dtype = view.inputs[one.name].dtype
        raw: Buffer = b""
        if one.shared is None:
            raw = data.take(one.name, nbytes)
            if not dtype.item_bytes:
                check_strings(raw, shape, one.name, view.model)
        else:
            _check_shared_size(view, one, one.shared, nbytes, shared)
            lent, places[one.name] = shared.locate(one.shared), one.shared
            check_total(view.version, places.values())
            if lent is not None:
                outside[one.name] = lent
            elif not dtype.item_bytes:
                walked = shared.walk(one.shared, min(prod(shape), nbytes) + 1)
                _check_walk(walked, one.shared.byte_size, shape, one.name, view.model)
        inputs[one.name] = Tensor(dtype, shape, raw)
    data.finish()
    for name in places.keys() - outside.keys():
        tensor = inputs[name]
        tensor.data = shared.read(places[name])
        if not tensor.dtype.item_bytes:  # its client may have written them meanwhile
            check_strings(tensor.data, tensor.shape, name, view.model)
    return build_request(header, inputs), outside


def build_request(header: RequestHeader, inputs: dict[str, Tensor]) -> InferRequest:
    """Return the engine's request of a checked header."""
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
    """Check a header except for its inputs' shapes. Raises ServeError INVALID_ARGUMENT."""
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
    """Return an input's full shape as the model takes it, and its size in bytes. Raises ServeError."""
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
    """Return the bytes of a tensor of fixed-size elements."""
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
        shared.locate(replace(place, byte_size=1))  # a missing region is reported first
        raise invalid(
            f"unexpected shared-memory size {place.byte_size} for input '{given.name}', "
            f"expecting {nbytes} for model '{view.model}'"
        )


def check_strings(raw: Buffer, shape: Dims, name: str, model: str) -> None:
    """Raise ServeError unless `raw` is as many strings as the shape says; the original does not check."""
    _check_walk(walk_bytes(raw, min(prod(shape), len(raw)) + 1), len(raw), shape, name, model)


def _check_walk(walked: tuple[int, int, int], nbytes: int, shape: Dims, name: str, model: str) -> None:
    """Raise ServeError unless `walk_bytes` found as many strings in `nbytes` as the shape says."""
    found, _, end = walked
    if found != prod(shape) or end != nbytes:
        raise invalid(f"the bytes of input '{name}' are not the strings its shape needs for model '{model}'")


def write_dims(dims: Dims) -> str:
    """Return a shape as the original's texts have it."""
    return f"[{','.join(map(str, dims))}]"
