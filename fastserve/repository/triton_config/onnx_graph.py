"""Reads names, types and shapes of an ONNX model's inputs and outputs, without ONNX Runtime and without
numpy.

    ModelProto.graph -> GraphProto.input, .output, .initializer -> ValueInfoProto -> TypeProto.Tensor

The file is mapped and walked field by field; weights are stepped over. Nothing is checked beyond what is
needed to find the tensors: the backend, which loads the model, has the last word.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastserve.tensor import DTYPES, TensorSpec

# TensorProto.DataType -> dtype
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "bytes",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class OnnxGraph:
    """The tensors of a model by name, shapes whole: -1 for a symbolic axis, None where no rank is given."""

    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """True when the first axis of every tensor may have any length."""
        specs = [*self.inputs.values(), *self.outputs.values()]
        return bool(specs) and all(spec.shape and spec.shape[0] == -1 for spec in specs)

    def without_batch(self) -> OnnxGraph:
        """Return the same graph with every first axis removed."""
        return OnnxGraph(_rows(self.inputs), _rows(self.outputs))


def _rows(specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, spec.dtype, spec.shape[1:] if spec.shape else spec.shape)
        for name, spec in specs.items()
    }


def read_onnx_graph(path: Path) -> OnnxGraph | None:
    """Return the tensors of the model in this file; None when it is no ONNX model. Raises OSError."""
    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        try:
            return _read_model(memory)
        except (IndexError, ValueError):  # UnicodeDecodeError is one
            return None


Span = tuple[int, int]  # from, to


def _read_model(memory: mmap.mmap) -> OnnxGraph | None:
    graph, weights = OnnxGraph(), set()
    found = False
    for number, value in _fields(memory, (0, len(memory))):
        if number != 7 or not isinstance(value, tuple):
            continue
        found = True
        for part, span in _fields(memory, value):
            if not isinstance(span, tuple):
                continue
            if part == 5:
                weights.add(_text(memory, span, 8))
            elif part in (11, 12):
                spec = _read_value(memory, span)
                (graph.inputs if part == 11 else graph.outputs)[spec.name] = spec
    # Before IR version 4 weights were listed among the inputs as well.
    graph.inputs = {name: spec for name, spec in graph.inputs.items() if name not in weights}
    return graph if found else None


def _read_value(memory: mmap.mmap, span: Span) -> TensorSpec:
    name = _text(memory, span, 1)
    tensor = _inner(memory, _inner(memory, span, 2), 1)
    kind, shape = 0, None
    for number, value in _fields(memory, tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 2 and isinstance(value, tuple):
            shape = tuple(_read_axis(memory, axis) for n, axis in _fields(memory, value) if n == 1)
    if kind not in _DTYPES:
        raise ValueError(f"element type {kind}")
    return TensorSpec(name, DTYPES[_DTYPES[kind]], shape)


def _read_axis(memory: mmap.mmap, span: int | Span) -> int:
    sizes = [value for number, value in _fields(memory, span) if number == 1 and isinstance(value, int)]
    return sizes[-1] if sizes and 0 < sizes[-1] < 2**63 else -1


def _inner(memory: mmap.mmap, span: int | Span, number: int) -> Span:
    """Return the message in field `number`, an empty one when it is not given."""
    found = [value for part, value in _fields(memory, span) if part == number and isinstance(value, tuple)]
    return found[-1] if found else (0, 0)


def _text(memory: mmap.mmap, span: Span, number: int) -> str:
    start, end = _inner(memory, span, number)
    return memory[start:end].decode()


def _fields(memory: mmap.mmap, span: int | Span) -> Iterator[tuple[int, int | Span]]:
    """Yield field numbers with their varint or the place of their bytes. Raises IndexError, ValueError."""
    if isinstance(span, int):
        raise ValueError("a number where a message is due")
    at, end = span
    while at < end:
        tag, at = _varint(memory, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(memory, at)
            yield tag >> 3, value
        elif wire == _BYTES:
            length, at = _varint(memory, at)
            if length > end - at:
                raise ValueError("a field that ends past its message")
            yield tag >> 3, (at, at + length)
            at += length
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")


def _varint(memory: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = memory[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")
