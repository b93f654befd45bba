"""Outputs of the engine -> InferResponseHeader and the raw bytes beside it (spec 3).

A header of raw outputs is the same for every request of one shape but for its `id`, the last field:
what comes before it is written once and remembered, in all three forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from fastserve._ext.proto_wire_v1 import write_v1_header
from fastserve.codec.proto_fields import write_varint
from fastserve.dialects.triton_v1.header import OutputHeader, RequestHeader
from fastserve.dialects.triton_v1.inputs import Buffer, write_dims
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.protos.text import print_line, print_lines
from fastserve.repository.triton_defaults import DATA_TYPE
from fastserve.repository.version import Version
from fastserve.serving.classification import Class, check_order, classify
from fastserve.serving.model_view import Dims, ModelView
from fastserve.serving.rooms import Rooms
from fastserve.tensor import Tensor

REMEMBERED_HEADERS = 64
_ID_TAG = b"\x28"  # field 5, varint


@dataclass(frozen=True, slots=True)
class Raw:
    """An output returned as bytes; `dims` as clients see them."""

    name: str
    dims: Dims
    nbytes: int


@dataclass(frozen=True, slots=True)
class Classes:
    """An output returned as its highest values, for each row."""

    name: str
    rows: list[list[Class]]


class HeaderForms:
    """One InferResponseHeader in its three forms, but for the id: each is made when it is first asked for."""

    def __init__(self, version: Version, batch_size: int, told: Sequence[Raw | Classes]) -> None:
        self._version = version
        self._batch_size = batch_size
        self._told = told

    @property
    def nbytes(self) -> int:
        """Of its raw outputs."""
        return sum(one.nbytes for one in self._told if isinstance(one, Raw))

    def line(self, request_id: int = 0) -> bytes:
        """In text on one line."""
        return b"%b id: %d" % (self._line, request_id) if request_id else self._line

    def binary(self, request_id: int = 0) -> bytes:
        """As a serialized message."""
        return self._binary + write_id(request_id) if request_id else self._binary

    def trailer(self, request_id: int = 0, *, binary: bool) -> bytes:
        """As it stands behind the outputs of an HTTP reply."""
        if binary:
            return self.binary(request_id)
        return b"%bid: %d\n" % (self._lines, request_id) if request_id else self._lines

    @cached_property
    def _binary(self) -> bytes:
        version = self._version
        outputs = [
            (one.name, one.dims, one.nbytes, None) if isinstance(one, Raw) else (one.name, (), 0, one.rows)
            for one in self._told
        ]
        return write_v1_header(version.model, version.number, self._batch_size, 0, outputs)

    @cached_property
    def _line(self) -> bytes:
        return print_line(self._message).encode()

    @cached_property
    def _lines(self) -> bytes:
        return print_lines(self._message).encode()

    @property
    def _message(self) -> Any:
        return load("triton_v1").InferResponseHeader.FromString(self._binary)


# The header, and views of the engine's outputs, one for each in order, empty where nothing is sent; they are
# valid until the response is released.
Answer = tuple[HeaderForms, list[Buffer]]


class Answers:
    """Writes the answers of one version."""

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._remember = lru_cache(REMEMBERED_HEADERS)(partial(HeaderForms, view.version))

    def write(self, header: RequestHeader, outputs: dict[str, Tensor], held: Rooms) -> Answer:
        """The header, and what is sent beside it. `held` is where outputs into shared memory go.

        Raises ServeError when an output cannot be classified or does not fit its shared memory.
        """
        told: list[Raw | Classes] = []
        raws: list[Buffer] = []
        for wanted in header.outputs:
            tensor = self._find(outputs, wanted.name)
            if wanted.classes:
                told.append(self._classify(wanted, tensor))
                raws.append(b"")
                continue
            raw = self.describe(wanted.name, tensor.shape, memoryview(tensor.data).nbytes)
            told.append(raw)
            raws.append(_place(wanted, tensor, held))
        return self.forms(header.batch_size, told), raws

    def _find(self, outputs: Mapping[str, Tensor], name: str) -> Tensor:
        tensor = outputs.get(name)
        if tensor is None:
            text = f"model '{self._view.model}' did not return output '{name}'"
            raise ServeError(Kind.INTERNAL, text)
        return tensor

    def describe(self, name: str, shape: Dims, nbytes: int) -> Raw:
        """An output of this shape, batch axis included. Raises ServeError for one the model must
        not answer."""
        dims = self._view.client_shape(name, shape)[self._view.batching :]
        output = self._view.outputs[name]
        if output.dims is not None and not output.fits(dims):
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"output '{name}' for model '{self._view.model}' has shape {write_dims(dims)} "
                f"but model configuration specifies shape {write_dims(output.dims)}",
            )
        return Raw(name, dims, nbytes)

    def _classify(self, wanted: OutputHeader, tensor: Tensor) -> Classes:
        view, name = self._view, wanted.name
        check_order(tensor, f"output '{name}'", DATA_TYPE.get(tensor.dtype.name, tensor.dtype.name))
        rows = classify(tensor, wanted.classes, view.labels(name), batching=view.batching)
        return Classes(name, rows)

    def forms(self, batch_size: int, told: Sequence[Raw | Classes]) -> HeaderForms:
        """The header of these outputs."""
        if all(isinstance(one, Raw) for one in told):
            return self._remember(batch_size, tuple(told))
        return HeaderForms(self._view.version, batch_size, told)


def _place(wanted: OutputHeader, tensor: Tensor, held: Rooms) -> Buffer:
    """What is sent of a raw output: everything, or nothing when it goes into shared memory."""
    if wanted.shared is None:
        return tensor.data
    held[wanted.name].put(wanted.name, tensor.data)
    return b""


def write_id(number: int) -> bytes:
    """The `id` field of an InferResponseHeader; nothing for 0."""
    return _ID_TAG + write_varint(number) if number else b""
