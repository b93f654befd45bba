"""Messages of gRPC that are as one before but for their holes: ids, data, the rows with all they change.

    known = KnownMessages(service, SCHEME)          where the holes are is the dialect's (_ext.proto_outline)
    outline = known.read(data)                      None for a message without any
    known.start(outline, exchange, deadline_ns)     False: nobody knows it, or it is not quite the same
    known.learn(outline, version, request, ...)     after the general path has answered one like it

Equal heads make equal requests, whatever the number of rows. A dialect prepares what it has understood
(`KnownMessage`); that no request is taken for another is checked here, once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from fastserve._ext.proto_outline import Outline, Scheme
from fastserve.engine import BatchQueue
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.serving.exchange import RpcExchange
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


class KnownMessage(PreparedRequest):
    """Messages with one head. `sources` are in the order of the inputs laid out; `find_version` finds the
    version that such a request asks for now."""

    sources: Sequence[Source]
    find_version: Callable[[], Version | None]
    leads: tuple[int, ...]  # of the one it was learned from

    def is_met_by(self, outline: Outline, queue: BatchQueue) -> bool:
        """Whether the first axes are rows that fit, or without rows the same; then they are the request's."""
        if not self.batching:
            self.rows = 1
            return outline.leads == self.leads
        self.rows = outline.rows
        return 0 < self.rows <= queue.max_rows

    def fill(self, source: Outline, memory: list[memoryview]) -> bool:
        for (hole, width, truth), view in zip(self.sources, memory, strict=True):
            if not source.copy_data(hole, view, width, truth):
                return False
        return True


Prepared = TypeVar("Prepared", bound=KnownMessage)
# Of a request without its data, for a queue; None for one that has none.
Prepare = Callable[[BatchQueue, InferRequest], Prepared | None]


class KnownMessages(Generic[Prepared]):
    """What one dialect knows of the heads of one kind of messages, in one front process."""

    def __init__(self, service: DialectService, scheme: Scheme) -> None:
        self._traffic, self.read = service.traffic, scheme.read
        self._heads: PreparedCache[Prepared] = PreparedCache(service.keepers, MOST_HEADS)

    def take(self, data: bytes, exchange: Exchange) -> bool:
        """Take a request, or return False: nothing has happened then. For `Method.start`."""
        outline = self.read(data)
        return outline is not None and self.start(outline, exchange, exchange.deadline_ns)

    def start(self, outline: Outline, exchange: RpcExchange, deadline_ns: int) -> bool:
        """The same of one whose outline is known, and the time it has."""
        known = self._heads.find(outline.head)
        if known is None:
            return False
        path, prepared = known
        if prepared.find_version() is not path.version:
            self._heads.drop(outline.head)
            return False
        if not prepared.is_met_by(outline, path.queue):
            return False
        return path.start(exchange, prepared, outline, outline.id, deadline_ns)

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
        found = None if path is None else ordinary_inputs(path.queue, request, batching=version.batching)
        if path is None or found is None:
            return
        prepared = prepare(path.queue, replace(request, inputs=found[1]))
        if prepared is None or len(prepared.sources) != len(outline.sizes):
            return
        prepared.leads = outline.leads
        if prepared.batching and len(outline.leads) != len(prepared.sources):
            return
        if prepared.is_met_by(outline, path.queue):
            self._heads.learn(outline.head, path, prepared)
