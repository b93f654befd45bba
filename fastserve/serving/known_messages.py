"""Messages of gRPC that are as one before but for their holes: ids, data, the rows with all they change.

    outline = SCHEME.read(data)                     where the holes are is the dialect's (_ext.proto_outline)
    known.start(outline, exchange, deadline_ns)     False: nobody knows it, or it is not quite the same
    known.learn(outline, path, prepared)            after the general path has answered one like it

Equal heads make equal requests, whatever the number of rows. A dialect prepares what it has understood
(`KnownMessage`); that no request is taken for another is checked here, once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from fastserve._ext.proto_outline import Outline
from fastserve.engine import BatchQueue
from fastserve.repository.catalog import Catalog
from fastserve.repository.keepers import Keepers
from fastserve.repository.version import Version
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.fast_path import FastPath
from fastserve.serving.prepared import PreparedRequest
from fastserve.serving.prepared_cache import PreparedCache

MOST_HEADS = 256


class Source(NamedTuple):
    """Which hole an input is in. Numbers of a packed field have the `width` that is kept of them."""

    hole: int
    width: int = 0
    truth: bool = False


class KnownMessage(PreparedRequest):
    """Messages with one head. `sources` are in the order of the inputs laid out."""

    sources: Sequence[Source]
    leads: tuple[int, ...]
    find_version: Callable[[], Version | None]  # as `finder` has made it

    def finder(self, catalog: Catalog) -> Callable[[], Version | None]:
        """What finds the version that such a request asks for now."""
        raise NotImplementedError

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


class KnownMessages(Generic[Prepared]):
    """What one dialect knows of heads, in one front process."""

    def __init__(self, catalog: Catalog, keepers: Keepers) -> None:
        self._catalog = catalog
        self._heads: PreparedCache[Prepared] = PreparedCache(keepers, MOST_HEADS)

    def start(self, outline: Outline, exchange: RpcExchange, deadline_ns: int) -> bool:
        """Take the request, or return False: nothing has happened then."""
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

    def learn(self, outline: Outline, path: FastPath, prepared: Prepared) -> None:
        """Remember a request that the general path has answered, if its holes are all that its inputs have:
        a first axis each, which are all the rows or none is."""
        prepared.leads, prepared.find_version = outline.leads, prepared.finder(self._catalog)
        if len(prepared.sources) != len(outline.sizes):
            return
        if prepared.batching and len(outline.leads) != len(prepared.sources):
            return
        if prepared.is_met_by(outline, path.queue):
            self._heads.learn(outline.head, path, prepared)
