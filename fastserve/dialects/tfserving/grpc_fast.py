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
from fastserve.engine import BatchQueue, note_of
from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.signature import Signature
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.known_messages import KnownMessage, KnownMessages, Source
from fastserve.serving.paths import open_path
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
        message: PredictMessage,
        version: Version,
        signature: Signature,
        aliases: Aliases,
        content: bool,
    ) -> None:
        self._model, self._number, self._label = message.model, message.version, message.label
        self._aliases, self._content = aliases, content
        self._spec = write_model_spec(version.model, version.number, signature.name)

    def lay_out_inputs(self, queue: BatchQueue, inputs: Mapping[str, Tensor], batching: bool) -> None:
        """Where tensors go; `inputs` by the model's names."""
        bare = {
            name: Tensor(inputs[name].dtype, inputs[name].shape, b"")  # without the message
            for name in queue.inputs
            if name in inputs
        }
        wanted = names_of(self._aliases)
        self.noted = queue.requests
        self._note = note_of(InferRequest({}, wanted), []) if queue.requests else b""
        self.lay_out(queue, bare, wanted, batching=batching)

    def note(self, request_id: str) -> bytes:
        return self._note

    def finder(self, catalog: Catalog) -> Callable[[], Version | None]:
        if self._label is not None:
            return partial(catalog.labelled, self._model, self._label)
        return partial(catalog.available, self._model, self._number)

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
        self._known: KnownMessages[Head] = KnownMessages(service.catalog, service.keepers)
        self.start = self._known.start

    def learn(
        self,
        outline: Outline,
        message: PredictMessage,
        version: Version,
        signature: Signature,
        aliases: Aliases,
        inputs: Mapping[str, Tensor],
        patience_ns: int,
    ) -> None:
        """Remember the head of a request that was answered; `inputs` by the model's names."""
        service = self._service
        path = open_path(version, service.traffic, Outcome(service, version.model), patience_ns)
        if path is None or not set(inputs) <= set(path.queue.inputs):
            return
        # A model that sees arrays is given all inputs of a signature; one that sees requests, what was sent.
        if not (path.queue.requests or len(inputs) == len(signature.inputs)):
            return
        if any(not tensor.dtype.item_bytes or not len(tensor.data) for tensor in inputs.values()):
            return
        sources = _sources(outline, message, signature, inputs)
        if sources is None:
            return
        head = Head(message, version, signature, aliases, service.options.tensor_content)
        head.sources = [sources[name] for name in path.queue.inputs if name in sources]
        head.lay_out_inputs(path.queue, inputs, version.batching)
        self._known.learn(outline, path, head)


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
        if field == CONTENT_FIELD:
            sources[name] = Source(hole)
        elif field != VALUE_FIELD[dtype.code]:
            return None
        elif IS_VARINT[dtype.code]:
            sources[name] = Source(hole, dtype.item_bytes, dtype.name == "bool")
        else:
            sources[name] = Source(hole)
    return sources if len(sources) == message.sent else None
