"""Request templates: a request that the general path has answered, with fields for what may differ.

    known = MessageTemplates(service, SCHEME)       gRPC; the dialect says which fields (_ext.proto_outline)
    skeleton = known.read(data)                     None for a message without fields
    known.start(skeleton, exchange, deadline_ns)    False: no template fits it
    known.learn(skeleton, version, request, ...)    cache the template, after the general path has answered

Equal skeletons make equal requests, whatever the number of rows. A dialect prepares what it has understood
(`MessageTemplate`); that no request is taken for another is checked here, once for all of them. JsonTemplates
are those of JSON texts (`_ext.infer_frame`), cached as long as they are met again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from fastserve._ext.infer_frame import InferFrame, InferFrames
from fastserve._ext.proto_outline import KnownFields, MessagesPath, Outline, Scheme
from fastserve.net.grpc import GrpcExchange
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.serving.dialect import DialectService
from fastserve.serving.fast_path import Outcome, PreparedCache, open_path
from fastserve.serving.prepared_requests import PreparedRequest, ordinary_inputs
from fastserve.tensor import DType

MOST_TEMPLATES = 256


class FieldSource(NamedTuple):
    """Field that holds an input. Numbers of a packed field have the `width` that is kept of them."""

    hole: int
    width: int = 0
    truth: bool = False

    @classmethod
    def of(cls, hole: int, dtype: DType, *, varints: bool) -> FieldSource:
        """Return the field of an input of this type, as it lies in memory, or written as varints."""
        return cls(hole, dtype.item_bytes, dtype.name == "bool") if varints else cls(hole)


class MessageTemplate(KnownFields, PreparedRequest):
    """Messages with one head. `sources` (of `Source`) are in the order of the inputs laid out; `find_version`
    finds the version that such a request asks for now. What is asked at each request is compiled."""


Prepared = TypeVar("Prepared", bound=MessageTemplate)

# What is known of a message, and where each input is, by the model's names. None: others cannot be like it.
Prepare = Callable[[], tuple[Prepared, Mapping[str, FieldSource]] | None]


class MessageTemplates(MessagesPath, Generic[Prepared]):
    """Templates of one kind of messages of one dialect, in one front process."""

    def __init__(self, service: DialectService, scheme: Scheme) -> None:
        self._traffic, self.read = service.traffic, scheme.read
        self._heads: PreparedCache[Prepared] = PreparedCache(service.keepers, MOST_TEMPLATES)
        self.find, self.drop = self._heads.find, self._heads.drop

    def take(self, data: bytes, exchange: GrpcExchange) -> bool:
        """Take a request, or return False: nothing has happened then. For `Method.start`."""
        outline = self.read(data)
        return outline is not None and self.start(outline, exchange, exchange.deadline_ns)

    def learn(
        self,
        outline: Outline,
        version: Version,
        request: InferRequest,
        outcome: Outcome,
        prepare: Prepare[Prepared],
    ) -> None:
        """Remember a request that the general path has answered, if others may be like it and its holes are
        all that its inputs have: a first axis each, which are all the rows or none is."""
        path = open_path(version, self._traffic, outcome)
        if path is None:
            return
        batching = version.batching
        found = ordinary_inputs(path.queue, request, batching=batching)
        known = None if found is None else prepare()
        if found is None or known is None or len(known[1]) != len(outline.sizes):
            return
        bare, (prepared, sources) = replace(request, inputs=found[1]), known
        if batching and len(outline.leads) != len(sources):
            return
        prepared.leads, prepared.sources = outline.leads, [sources[name] for name in bare.inputs]
        prepared.lay_out_like(path.queue, bare, batching=batching)
        if prepared.is_met_by(outline, path.queue):
            self._heads.learn(outline.head, path, prepared)


# Frames never met again, beyond which nothing is learned until so many requests have been missed.
MOST_UNUSED, LEARN_AGAIN = 8, 64


class JsonTemplates:
    """At most `most` of them."""

    def __init__(self, most: int) -> None:
        self._frames = InferFrames(most)
        self.find = self._frames.find
        self._missed = self._vain = 0  # requests without a frame, and those of them that can have none

    def learn(self, make: Callable[[], InferFrame | None]) -> None:
        """Remember the frame of a request that had none; `make` gives None for one that can have none."""
        self._missed += 1
        if self._frames.unused() + self._vain >= MOST_UNUSED:
            if self._missed % LEARN_AGAIN:
                return
            self._frames.forget_unused()
            self._vain = 0
        frame = make()
        if frame is None:
            self._vain += 1
        else:
            self._frames.add(frame)
