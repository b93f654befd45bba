"""Messages of gRPC that are as one before but for their holes: ids, data, the rows with all they change.

    known = KnownMessages(service, SCHEME)          where the holes are is the dialect's (_ext.proto_outline)
    outline = known.read(data)                      None for a message without any
    known.start(outline, exchange, deadline_ns)     False: nobody knows it, or it is not quite the same
    known.learn(outline, version, request, ...)     after the general path has answered one like it

Equal heads make equal requests, whatever the number of rows. A dialect prepares what it has understood
(`KnownMessage`); that no request is taken for another is checked here, once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from fastserve._ext.proto_outline import KnownFields, MessagesPath, Outline, Scheme
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.serving.fast_path import Outcome
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import PreparedRequest, ordinary_inputs
from fastserve.serving.prepared_cache import PreparedCache
from fastserve.serving.service import DialectService
from fastserve.tensor import DType
from fastserve.wire.grpc import Exchange

MOST_HEADS = 256


class Source(NamedTuple):
    """Which hole an input is in. Numbers of a packed field have the `width` that is kept of them."""

    hole: int
    width: int = 0
    truth: bool = False

    @classmethod
    def of(cls, hole: int, dtype: DType, *, varints: bool) -> Source:
        """That of an input of this type, as it lies in memory, or written as varints."""
        return cls(hole, dtype.item_bytes, dtype.name == "bool") if varints else cls(hole)


class KnownMessage(KnownFields, PreparedRequest):
    """Messages with one head. `sources` (of `Source`) are in the order of the inputs laid out; `find_version`
    finds the version that such a request asks for now. What is asked at each request is compiled."""


Prepared = TypeVar("Prepared", bound=KnownMessage)
# What is known of a message, and where each input is, by the model's names. None: others cannot be like it.
Prepare = Callable[[], tuple[Prepared, Mapping[str, Source]] | None]


class KnownMessages(MessagesPath, Generic[Prepared]):
    """What one dialect knows of the heads of one kind of messages, in one front process."""

    def __init__(self, service: DialectService, scheme: Scheme) -> None:
        self._traffic, self.read = service.traffic, scheme.read
        self._heads: PreparedCache[Prepared] = PreparedCache(service.keepers, MOST_HEADS)
        self.find, self.drop = self._heads.find, self._heads.drop

    def take(self, data: bytes, exchange: Exchange) -> bool:
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
        patience_ns: int,
    ) -> None:
        """Remember a request that the general path has answered, if others may be like it and its holes are
        all that its inputs have: a first axis each, which are all the rows or none is."""
        path = open_path(version, self._traffic, outcome, patience_ns)
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
