"""Outputs of the engine -> InferResponseHeader and the raw bytes beside it (spec 3).

All requests of one shape have the same header of raw outputs, except for its last field, `id`. The part
before it is written once and cached in each of its three forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from fastserve._ext.proto_wire_v1 import write_v1_header
from fastserve.codec.byte_formats import write_varint
from fastserve.dialects.triton_v1.request import Buffer, OutputHeader, RequestHeader, write_dims
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.protos.text import print_line, print_lines
from fastserve.repository.triton_config.completion import DATA_TYPE
from fastserve.repository.version import Version
from fastserve.serving.client_memory import OutputBuffers
from fastserve.serving.model_view import Class, Dims, ModelView, check_order, classify
from fastserve.tensor import Tensor

REMEMBERED_HEADERS = 64
_ID_TAG = b"\x28"  # field 5, varint


@dataclass(frozen=True, slots=True)
class RawOutput:
    """An output returned as bytes; `dims` as clients see them."""

    name: str
    dims: Dims
    nbytes: int


@dataclass(frozen=True, slots=True)
class ClassOutput:
    """An output returned as its highest values, for each row."""

    name: str
    rows: list[list[Class]]


class ResponseHeader:
    """One InferResponseHeader without its id, in three forms: each is made at its first use."""

    def __init__(
        self, version: Version, batch_size: int, described: Sequence[RawOutput | ClassOutput]
    ) -> None:
        self._version = version
        self._batch_size = batch_size
        self._outputs = described

    @property
    def nbytes(self) -> int:
        """The bytes of its raw outputs."""
        return sum(one.nbytes for one in self._outputs if isinstance(one, RawOutput))

    def line(self, request_id: int = 0) -> bytes:
        """Return the header as one line of text."""
        return b"%b id: %d" % (self._line, request_id) if request_id else self._line

    def binary(self, request_id: int = 0) -> bytes:
        """Return the header as a serialized message."""
        return self._binary + write_id(request_id) if request_id else self._binary

    def trailer(self, request_id: int = 0, *, binary: bool) -> bytes:
        """Return the header as it follows the outputs of an HTTP reply."""
        if binary:
            return self.binary(request_id)
        return b"%bid: %d\n" % (self._lines, request_id) if request_id else self._lines

    @cached_property
    def _binary(self) -> bytes:
        version = self._version
        outputs = [
            (one.name, one.dims, one.nbytes, None)
            if isinstance(one, RawOutput)
            else (one.name, (), 0, one.rows)
            for one in self._outputs
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


# The header, and a view of each output in order, empty where nothing is sent.
# The views are valid until the response is released.
Answer = tuple[ResponseHeader, list[Buffer]]


class AnswerWriter:
    """Writes the answers of one version."""

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._remember = lru_cache(REMEMBERED_HEADERS)(partial(ResponseHeader, view.version))

    def write(self, header: RequestHeader, outputs: dict[str, Tensor], held: OutputBuffers) -> Answer:
        """Return the header, and the bytes sent beside it; `held` has the outputs in shared memory.

        Raises ServeError when an output cannot be classified or does not fit its shared memory.
        """
        described: list[RawOutput | ClassOutput] = []
        raws: list[Buffer] = []
        for wanted in header.outputs:
            tensor = self._find(outputs, wanted.name)
            if wanted.classes:
                described.append(self._classify(wanted, tensor))
                raws.append(b"")
                continue
            raw = self.describe(wanted.name, tensor.shape, memoryview(tensor.data).nbytes)
            described.append(raw)
            raws.append(_place(wanted, tensor, held))
        return self.forms(header.batch_size, described), raws

    def _find(self, outputs: Mapping[str, Tensor], name: str) -> Tensor:
        tensor = outputs.get(name)
        if tensor is None:
            text = f"model '{self._view.model}' did not return output '{name}'"
            raise ServeError(Kind.INTERNAL, text)
        return tensor

    def describe(self, name: str, shape: Dims, nbytes: int) -> RawOutput:
        """Return an output of this shape, batch axis included.

        Raises ServeError where the model's config forbids it.
        """
        dims = self._view.client_shape(name, shape)[self._view.batching :]
        output = self._view.outputs[name]
        if output.dims is not None and not output.fits(dims):
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"output '{name}' for model '{self._view.model}' has shape {write_dims(dims)} "
                f"but model configuration specifies shape {write_dims(output.dims)}",
            )
        return RawOutput(name, dims, nbytes)

    def _classify(self, wanted: OutputHeader, tensor: Tensor) -> ClassOutput:
        view, name = self._view, wanted.name
        check_order(tensor, f"output '{name}'", DATA_TYPE.get(tensor.dtype.name, tensor.dtype.name))
        rows = classify(tensor, wanted.classes, view.labels(name), batching=view.batching)
        return ClassOutput(name, rows)

    def forms(self, batch_size: int, described: Sequence[RawOutput | ClassOutput]) -> ResponseHeader:
        """Return the header of these outputs."""
        if all(isinstance(one, RawOutput) for one in described):
            return self._remember(batch_size, tuple(described))
        return ResponseHeader(self._view.version, batch_size, described)


def _place(wanted: OutputHeader, tensor: Tensor, held: OutputBuffers) -> Buffer:
    """Return the bytes to send of a raw output: none when it goes into shared memory."""
    if wanted.shared is None:
        return tensor.data
    held[wanted.name].put(wanted.name, tensor.data)
    return b""


def write_id(number: int) -> bytes:
    """Return the `id` field of an InferResponseHeader; nothing for 0."""
    return _ID_TAG + write_varint(number) if number else b""
