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
from fastserve.engine import BatchQueue
from fastserve.errors import Kind, ServeError
from fastserve.repository.signature import Signature
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.known_messages import KnownMessage, KnownMessages, Source
from fastserve.serving.prepared import Described, Memory
from fastserve.tensor import DTYPES, Tensor

# PredictRequest: of each entry of inputs its TensorProto, and of that the first axis, and its values.
_SHAPE = {2: First({1: LEAD})}
BYTES = DTYPES["bytes"].code
_VALUES = {CONTENT_FIELD, *VALUE_FIELD.values()} - {VALUE_FIELD[BYTES]}
SCHEME = Scheme({2: {2: {2: _SHAPE, **dict.fromkeys(_VALUES, DATA)}}})
TOO_LARGE = "the response is too large for a gRPC message"
API = "Predict"

Aliases = Mapping[str, str]  # the signature's names of outputs -> the model's
# What a response says of its outputs; where each is among those the model gave, None: in its place.
Writer = tuple[list[tuple[str, int, tuple[int, ...]]], list[int] | None]


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


class Head(KnownMessage):
    """Messages with one head."""

    def __init__(
        self,
        service: Service,
        message: PredictMessage,
        version: Version,
        signature: Signature,
        aliases: Aliases,
        queue: BatchQueue,
        request: InferRequest,
        sources: Mapping[str, Source],
    ) -> None:
        """`request` and `sources` by the model's names."""
        self._aliases, self._content = aliases, service.options.tensor_content
        self._spec = write_model_spec(version.model, version.number, signature.name)
        self.sources = [sources[name] for name in request.inputs]
        self.lay_out(queue, request.inputs, request.outputs, batching=version.batching)
        if queue.requests:
            self.tell(request)
        catalog, model = service.catalog, message.model
        if message.label is not None:
            self.find_version = partial(catalog.labelled, model, message.label)
        else:
            self.find_version = partial(catalog.available, model, message.version)

    def make_writer(self, described: Described) -> Writer:
        given = {name: (index, dtype.code, shape) for index, (name, dtype, shape) in enumerate(described)}
        found = [(alias, *given[name]) for alias, name in self._aliases.items()]
        order = [index for _, index, _, _ in found]
        in_place = order == list(range(len(described)))
        return [(alias, code, shape) for alias, _, code, shape in found], None if in_place else order

    def write(
        self, exchange: RpcExchange, writer: Writer, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        described, order = writer
        raw = memory if order is None else [memory[index] for index in order]
        exchange.reply(write_response(described, raw, self._spec, self._content))

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


class FastGrpc:
    """What is known of heads. One per front process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: KnownMessages[Head] = KnownMessages(service, SCHEME)
        self.read, self.start = self._known.read, self._known.take

    def learn(
        self,
        outline: Outline,
        message: PredictMessage,
        version: Version,
        signature: Signature,
        aliases: Aliases,
        request: InferRequest,
        patience_ns: int,
    ) -> None:
        """Remember the head of a request that was answered."""
        service = self._service

        def prepare(queue: BatchQueue, bare: InferRequest) -> Head | None:
            sources = _sources(outline, message, signature, bare.inputs)
            if sources is None:
                return None
            return Head(service, message, version, signature, aliases, queue, bare, sources)

        self._known.learn(outline, version, request, Outcome(service, version.model), prepare, patience_ns)


def _sources(
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
