"""The fast path of ModelInfer and its stream: a message like one that has been answered is not read again.

    message --outline--> (head, id, first axes, data)    the head is known: a version, its reply's form
            --copy--> memory reserved for its inputs ... worker ... views of its outputs --copy--> reply

A head is every field but the id, the first axes of the shapes and the tensors' data, raw or typed (model,
version, names, requested outputs, parameters), so equal heads make equal requests. Heads are learned from
requests with all their inputs of fixed size, and nothing of them in client memory or classified. For
anything else, errors included, `start` returns False having left no trace, and the general path reads the
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastserve._ext.proto_outline import DATA, LEADS, TEXT, Outline, Scheme, write_known
from fastserve._ext.proto_wire import InferMessage, WireFault, write_infer_response, write_stream_response
from fastserve.dialects.kserve_v2.errors import tell
from fastserve.dialects.kserve_v2.messages import FINAL, TOO_LARGE, write_message
from fastserve.dialects.kserve_v2.request import Asked
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.known_messages import KnownMessage, Source
from fastserve.serving.model_view import ModelView
from fastserve.serving.prepared import Described, Memory
from fastserve.serving.rooms import Rooms
from fastserve.serving.streams import Turn
from fastserve.tensor import KSERVE_NAME

# ModelInferRequest: the id; of each input its shape and its contents, from bool to fp64; raw contents.
SCHEME = Scheme({3: TEXT, 5: {3: LEADS, 5: dict.fromkeys(range(1, 8), DATA)}, 7: DATA})
RAW = (-1, 7)
VARINTS = range(1, 6)  # contents that are packed as such


class Head(KnownMessage):
    """Messages with one head."""

    streams = False

    def __init__(self, view: ModelView, message: InferMessage, asked: Asked) -> None:
        self.model, self.version = message.model_name, message.model_version
        number = view.version.number if message.model_version else None
        self.find_version = partial(view.catalog.available, view.model, number)
        self._view, self._asked, self._number = view, asked, str(view.version.number)
        self._before = write_infer_response(view.model, self._number, "", None, (), ())

    def make_writer(self, described: Described) -> Any:
        """What comes between the id and the tensors."""
        return write_infer_response("", "", "", None, self._describe(described), ())

    def _describe(self, described: Described) -> list[tuple[str, str, tuple[int, ...], None]]:
        return [
            (name, KSERVE_NAME[dtype.name], self._view.client_shape(name, shape), None)
            for name, dtype, shape in described
        ]

    def write(
        self, exchange: RpcExchange, writer: Any, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        try:
            message = write_known(self._before, request_id, writer, memory)
        except (WireFault, OverflowError):
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
        exchange.reply(message)

    def write_response(
        self, exchange: RpcExchange, response: InferResponse, request_id: str, held: None
    ) -> None:
        rooms = Rooms()
        message = write_message(self._view, self._asked, response, request_id, rooms, streams=self.streams)
        exchange.reply(message)


class StreamHead(Head):
    """The same in a stream, whose responses have the answer as one field."""

    streams = True

    def make_writer(self, described: Described) -> Any:
        return self._describe(described)

    def write(
        self, exchange: RpcExchange, writer: Any, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        names = "", self._view.model, self._number
        try:
            message = write_stream_response(*names, request_id, {FINAL: True}, writer, memory)
        except (WireFault, OverflowError):
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
        exchange.reply(message)


class Outcome:
    """How RPCs of one model end."""

    answered = None

    def __init__(self, service: Service, model: str) -> None:
        self._traffic, self._model = service.traffic, model

    def refused(self, exchange: RpcExchange, prepared: Head, request_id: str, fault: ServeError) -> None:
        told = tell(fault, request_id)
        self._traffic.refused(self._model, fault.kind.name)
        if isinstance(exchange, Turn):
            exchange.stream.refuse(exchange, told, prepared.model, prepared.version, request_id)
        else:
            exchange.refuse(told)


def find_sources(outline: Outline, message: InferMessage, request: InferRequest) -> dict[str, Source] | None:
    """Which hole each input's data is in: all of them raw, or each in its own contents. None where not."""
    fields, names = outline.fields, [given.name for given in message.inputs]
    if len(request.inputs) != len(names):
        return None
    if list(fields) == [RAW] * len(names):
        return {name: Source(hole) for hole, name in enumerate(names)}
    if [owner for owner, _ in fields] != list(range(len(names))):
        return None
    return {
        name: Source.of(hole, request.inputs[name].dtype, varints=field in VARINTS)
        for hole, (name, (_, field)) in enumerate(zip(names, fields, strict=True))
    }
