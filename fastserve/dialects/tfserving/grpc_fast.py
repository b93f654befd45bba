"""The fast path of Predict over gRPC: a request like one that has been answered is not read again.

    message --outline--> (head, first axes, data)    the head is known: a version, a signature, its outputs
            --copy--> rows reserved in shared memory ... worker ... views of outputs --write--> reply

Tensors lie two messages deep, in entries of a map, so a change of rows changes the lengths around them: the
outline takes these for holes too. Learned are requests with all of a signature's inputs, each in one piece of
numbers of a fixed size. For anything else, errors included, `start` returns False having left no trace, and
the general path reads the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from fastserve._ext.proto_outline import DATA, LEAD, First, Outline, Scheme
from fastserve._ext.proto_wire import WireFault
from fastserve._ext.tensor_proto import (
    CONTENT_FIELD,
    IS_VARINT,
    VALUE_FIELD,
    PredictMessage,
    write_model_spec,
    write_predict_response,
)
from fastserve.dialects.tfserving.grpc_spec import refuse_rpc
from fastserve.dialects.tfserving.service import Service
from fastserve.errors import Kind, ServeError
from fastserve.repository.signature import Signature
from fastserve.repository.version import Version
from fastserve.request import InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.known_messages import KnownMessage, Source
from fastserve.serving.prepared import Described, Memory
from fastserve.tensor import DTYPE_BY_CODE, DTYPES, Tensor

# PredictRequest: of each entry of inputs its TensorProto, and of that the first axis, and its values.
_SHAPE = {2: First({1: LEAD})}
BYTES = DTYPES["bytes"].code
_VALUES = {CONTENT_FIELD, *VALUE_FIELD.values()} - {VALUE_FIELD[BYTES]}
SCHEME = Scheme({2: {2: {2: _SHAPE, **dict.fromkeys(_VALUES, DATA)}}})
TOO_LARGE = "the response is too large for a gRPC message"
API = "Predict"

Aliases = Mapping[str, str]  # the signature's names of outputs -> the model's
Writer = Callable[[Sequence[Memory]], bytes]  # the outputs that the model gave -> a response
Output = tuple[str, int, tuple[int, ...]]  # its alias, the code of its type, its shape
# The same, and where it is among those that the model gives.
Given = Sequence[tuple[str, int, int, tuple[int, ...]]]
PLAIN_BYTES = 65536  # of values, up to which a response is joined with the interpreter held


def names_of(aliases: Aliases) -> tuple[str, ...]:
    """The model's outputs to ask for."""
    return tuple(dict.fromkeys(aliases.values()))


def write_outputs(outputs: Mapping[str, Tensor], aliases: Aliases, spec: bytes, content: bool) -> bytes:
    """A serialized PredictResponse. Raises ServeError."""
    given = [(alias, outputs[name]) for alias, name in aliases.items()]
    described = [(alias, tensor.dtype.code, tensor.shape) for alias, tensor in given]
    return write_response(described, [tensor.data for _, tensor in given], spec, content)


def write_response(described: Any, raw: Sequence[Memory], spec: bytes, content: bool) -> bytes:
    """The same of outputs that are described apart. Raises ServeError."""
    try:
        return write_predict_response(described, raw, spec, content)
    except (WireFault, OverflowError):
        raise ServeError(Kind.RESOURCE_EXHAUSTED, TOO_LARGE) from None


def make_writer(found: Given, spec: bytes, content: bool) -> Writer:
    """What writes responses with these outputs."""
    order = [index for _, index, _, _ in found]
    described = [(alias, code, shape) for alias, _, code, shape in found]
    template = make_template(described, spec, content)

    def join(memory: Sequence[Memory]) -> bytes:
        pieces = template.copy()
        pieces[1::2] = [memory[index] for index in order]
        return b"".join(pieces)

    def write(memory: Sequence[Memory]) -> bytes:
        return write_response(described, [memory[index] for index in order], spec, content)

    return join if template else write


def make_template(described: Sequence[Output], spec: bytes, content: bool) -> list[Memory]:
    """Responses with such outputs: what stands before the values of the first, a place for these, and so on,
    and what stands behind the last. Empty where lengths change with the values, or a response is large."""
    if any(code == BYTES or (IS_VARINT[code] and not content) for _, code, _ in described):
        return []
    sizes = [DTYPE_BY_CODE[code].item_bytes * prod(shape) for _, code, shape in described]
    if sum(sizes) > PLAIN_BYTES:
        return []
    behind, template = write_response([], [], spec, content), list[Memory]()
    for output, size in zip(described, sizes, strict=True):
        alone = write_response([output], [bytes(size)], spec, content)
        template += (alone[: len(alone) - len(behind) - size], b"")
    return [*template, behind]


class Head(KnownMessage):
    """Messages with one head."""

    def __init__(
        self,
        service: Service,
        message: PredictMessage,
        version: Version,
        signature: Signature,
        aliases: Aliases,
    ) -> None:
        self._aliases, self._content = aliases, service.options.tensor_content
        self._spec = write_model_spec(version.model, version.number, signature.name)
        catalog, model = service.catalog, message.model
        if message.label is not None:
            self.find_version = partial(catalog.labelled, model, message.label)
        else:
            self.find_version = partial(catalog.available, model, message.version)

    def make_writer(self, described: Described) -> Writer:
        given = {name: (index, dtype.code, shape) for index, (name, dtype, shape) in enumerate(described)}
        found = [(alias, *given[name]) for alias, name in self._aliases.items()]
        return make_writer(found, self._spec, self._content)

    def write(
        self, exchange: RpcExchange, writer: Writer, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        exchange.reply(writer(memory))

    def write_response(
        self, exchange: RpcExchange, response: InferResponse, request_id: str, held: None
    ) -> None:
        exchange.reply(write_outputs(response.outputs, self._aliases, self._spec, self._content))


class Outcome:
    """How RPCs of one model end."""

    def __init__(self, service: Service, model: str) -> None:
        self._service, self._model = service, model
        observed = self._observe if service.options.monitoring else None
        self.answered: Callable[[Any, int, int], None] | None = observed

    def _observe(self, prepared: Head, took_ns: int, ran_ns: int) -> None:
        self._service.observe(self._model, API, took_ns, ran_ns, "GRPC")

    def refused(self, exchange: RpcExchange, prepared: Head, request_id: str, fault: ServeError) -> None:
        exchange.refuse(refuse_rpc(self._service, self._model, fault))


def find_sources(
    outline: Outline, message: PredictMessage, signature: Signature, inputs: Mapping[str, Tensor]
) -> dict[str, Source] | None:
    """Which hole each input is in, by the model's names; None where one has not just that."""
    if message.sent != len(message.inputs):
        return None
    if [owner for owner, _ in outline.fields] != list(range(message.sent)):
        return None
    sources = {}
    for hole, (alias, (_, field)) in enumerate(zip(message.inputs, outline.fields, strict=True)):
        name = signature.input_names[alias]
        dtype = inputs[name].dtype
        if field not in (CONTENT_FIELD, VALUE_FIELD[dtype.code]):
            return None
        varints = field != CONTENT_FIELD and IS_VARINT[dtype.code]
        sources[name] = Source.of(hole, dtype, varints=varints)
    return sources if len(sources) == message.sent else None
