"""The fast path: from a prepared request to the batch it runs in, and from there to its answer.

    start    reserve -> fill -> hold -> submit            or False, without any effect
    answer   read -> write -> release -> count            or refuse, or fail: the client always gets an answer

The only place where this is done, for every dialect and transport. No task, no future, no object per number,
and no check that preparing the request has made already. An error on the way in gives the rows back; an error
on the way out is sent to the client, and the rows go back too. A large answer is written in a task, in a
thread: its memory stays taken until then. Code that runs for every request is compiled, in `_ext.fast_path`.

CachedPath is the fast path of a version with a response cache: fill -> key -> hit: write, and the lease goes
back; miss: the lease runs, and its answer is kept.
PathCache, PerVersion and PreparedCache keep paths and prepared
requests for the next request, and drop them with their version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic_ns
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fastserve._ext.fast_path import Lifecycle
from fastserve.engine import (
    BatchQueue,
    CacheStage,
    Entry,
    Miss,
    Ticket,
    cache_stage_of,
    fast_queue_of,
    keep_response,
    read_response,
    respond,
    sampler_of,
)
from fastserve.errors import ServeError
from fastserve.metrics.names import Traffic
from fastserve.repository.catalog import VersionListeners
from fastserve.repository.version import Version
from fastserve.serving.exchange import Exchange, internal_error
from fastserve.serving.prepared_requests import BoundedDict, PreparedRequest
from fastserve.tensor import DTYPE_BY_CODE
from fastserve.util.spans import FAST


class Outcome(NamedTuple):
    """The callbacks of a dialect for the end of a request, beside what is counted for every dialect.

    `refused(exchange, prepared, request_id, fault)` answers with the dialect's error and counts it.
    `answered(prepared, took_ns, ran_ns)` follows a good answer; `ran_ns` counts from the rows being in the
    batch, 0 for an answer from the cache.
    """

    refused: Callable[[Any, Any, Any, ServeError], None]
    answered: Callable[[Any, int, int], None] | None = None


class FastPath(Lifecycle):
    """The fast path of one version."""

    queue: BatchQueue

    def __init__(
        self,
        version: Version,
        queue: BatchQueue,
        traffic: Traffic,
        outcome: Outcome,
        *,
        replies: bool = False,
    ) -> None:
        requests, duration = traffic.succeeded(version.model, version.number)
        decode, encode = traffic.stages(version.model, version.number)
        metrics = requests, duration, decode, encode
        super().__init__(queue, ServeError, metrics, outcome.answered, FAST, replies)
        self.version, self.accounted = version, traffic.accounted
        self.refuse = outcome.refused
        self._large: set[asyncio.Task[None]] = set()

    def takes_arrived(self, prepared: PreparedRequest) -> bool:
        """Whether nobody asks for the bytes of such requests once they are in their place: they may be read
        there out of the socket then."""
        return not prepared.outside

    def respond(
        self, exchange: Exchange, prepared: PreparedRequest, ticket: Ticket, request_id: Any, held: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Answer as the general path does."""
        response = read_response(self.queue, ticket, prepared.wanted)
        return prepared.write_response(exchange, response, request_id, held)

    def answer_later(self, ticket: Ticket, later: Coroutine[Any, Any, None]) -> None:
        """The answer is large: `later` writes it, and then everything goes the way of all answers."""
        exchange, prepared, request_id, held = ticket.context

        def let_go() -> None:
            self.queue.release(ticket)
            if held is not None:
                held.close()

        ran_ns = monotonic_ns() - ticket.submitted_ns
        self.write_later(exchange, prepared, request_id, later, let_go, ran_ns)

    def write_later(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        request_id: Any,
        later: Coroutine[Any, Any, None],
        let_go: Callable[[], object],
        ran_ns: int = 0,
    ) -> None:
        """In a task, which ends by itself: what `let_go` gives back is read until then."""
        work = self._write_later(exchange, prepared, request_id, later, let_go, ran_ns)
        task = asyncio.get_running_loop().create_task(work)
        self._large.add(task)
        task.add_done_callback(self._large.discard)

    async def _write_later(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        request_id: Any,
        later: Coroutine[Any, Any, None],
        let_go: Callable[[], object],
        ran_ns: int,
    ) -> None:
        began_ns = monotonic_ns()
        try:
            try:
                await later
            finally:
                let_go()
            self.count(exchange, prepared, began_ns, ran_ns)
        except ServeError as fault:
            self.refuse(exchange, prepared, request_id, fault)
        except Exception as error:
            self.failed(exchange, prepared, request_id, error)
        span = FAST.get(exchange)
        if span is not None:
            span.ended(exchange, None)

    def failed(
        self, exchange: Exchange, prepared: PreparedRequest, request_id: Any, error: Exception
    ) -> None:
        """Log an unexpected error and answer with an internal error in the dialect's form."""
        try:
            self.refuse(exchange, prepared, request_id, internal_error(exchange, error))
        except Exception:  # it was answered before
            exchange.fail(error)


class CachedPath(FastPath):
    """The fast path before a cache stage."""

    def __init__(self, version: Version, stage: CacheStage, traffic: Traffic, outcome: Outcome) -> None:
        super().__init__(version, stage.queue, traffic, outcome, replies=True)
        self._stage = stage

    def takes_arrived(self, prepared: PreparedRequest) -> bool:
        """No: who waits for its like does so on the general path."""
        return False

    def start(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        source: Any,
        request_id: Any = None,
        deadline_ns: int = 0,
    ) -> bool:
        """Take the request, or return False: nothing has happened then."""
        if prepared.outside or (self.accounted and not self.admits(exchange)):
            return False
        try:
            return self._start(exchange, prepared, source, request_id, deadline_ns)
        except ServeError:
            return False
        except Exception as error:
            self.failed(exchange, prepared, request_id, error)
            return True

    def _start(
        self, exchange: Exchange, prepared: PreparedRequest, source: Any, request_id: Any, deadline_ns: int
    ) -> bool:
        reserved = self.fill(prepared, source, request_id)
        if reserved is None:
            return False
        found: Entry | Miss | None = None
        try:
            found = self._stage.find(prepared.key_head(self._stage.head), reserved[1])
        finally:
            if not isinstance(found, Miss):
                prepared.layout_in.abandon(reserved, prepared.rows)
        if isinstance(found, Miss):
            self.submit(exchange, prepared, reserved, request_id, found, deadline_ns)
        elif found is not None:
            self.decoded(exchange)
            self._reply_kept(exchange, prepared, found, request_id)
        return found is not None

    def _reply_kept(
        self, exchange: Exchange, prepared: PreparedRequest, entry: Entry, request_id: Any
    ) -> None:
        began_ns = monotonic_ns()
        form = entry.form
        writer = prepared.writers.get(form) or prepared.add_writer(
            form, [(name, DTYPE_BY_CODE[code], shape) for name, code, shape in form]
        )
        try:
            if writer is None or entry.parameters:
                later = prepared.write_response(exchange, respond(entry), request_id, None)
            else:
                later = prepared.write(exchange, writer, entry.memory, request_id, None)
            if later is None:
                self.count(exchange, prepared, began_ns)
            else:
                self.write_later(exchange, prepared, request_id, later, lambda: None)
        except ServeError as fault:
            self.refuse(exchange, prepared, request_id, fault)
        except Exception as error:
            self.failed(exchange, prepared, request_id, error)

    def reply(
        self, exchange: Exchange, prepared: PreparedRequest, ticket: Ticket, request_id: Any, held: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Answer, and keep the answer: what is held is the miss."""
        found = prepared.layout_out.read(ticket.lease, ticket.rows)
        writer = None if found is None else prepared.writers.get(found[0]) or prepared.add_writer(found[0])
        if found is None or writer is None:
            response = read_response(self.queue, ticket, prepared.wanted)
            keep_response(held, response)
            return prepared.write_response(exchange, response, request_id, None)
        held.keep(prepared.kept_form(found[0]), found[1])
        return prepared.write(exchange, writer, found[1], request_id, None)


class SampledFastPath(FastPath):
    """The fast path of a version with a request log: a request that is drawn takes the general path."""

    draw: Callable[[], bool]

    def start(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        source: Any,
        request_id: Any = None,
        deadline_ns: int = 0,
    ) -> bool:
        """Take the request, or return False: nothing has happened then."""
        return not self.draw() and super().start(exchange, prepared, source, request_id, deadline_ns)


class SampledCachedPath(SampledFastPath, CachedPath):
    """The fast path before a cache stage, of a version with a request log."""


Prepared = TypeVar("Prepared", bound=PreparedRequest)


class PreparedCache(Generic[Prepared]):
    """At most `most` of them."""

    __slots__ = ("__weakref__", "_known", "find")

    def __init__(self, keepers: VersionListeners, most: int) -> None:
        self._known: BoundedDict[bytes, tuple[FastPath, Prepared]] = BoundedDict(most)
        self.find = self._known.get
        keepers.add(self)

    def cache_template(self, key: bytes, path: FastPath, prepared: Prepared) -> None:
        """Remember what requests of this key are."""
        self._known[key] = path, prepared

    def drop(self, key: bytes) -> None:
        """Requests of this key mean something else now."""
        self._known.pop(key, None)

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        for key in [key for key, (path, _) in self._known.items() if path.version is version]:
            del self._known[key]


class HasVersion(Protocol):
    """A dialect's fast path of one version."""

    version: Version


Path = TypeVar("Path", bound=HasVersion)

Made = TypeVar("Made")


class PathCache(Generic[Path]):
    """One endpoint's. A version without a fast path is remembered too: it is not asked again."""

    __slots__ = ("__weakref__", "_keepers", "_open", "_without", "path")

    def __init__(self, keepers: VersionListeners, open: Callable[[Version], Path | None]) -> None:
        self._keepers, self._open = keepers, open
        self.path: Path | None = None
        self._without: Version | None = None

    def find(self, version: Version | None) -> Path | None:
        """The path of this version; None when it has none. For callers whom `path` does not suit already."""
        if version is None or version is self._without:
            return None
        if self.path is None or self.path.version is not version:
            self.path = self._open(version)
            self._without = version if self.path is None else None
            self._keepers.add(self)
        return self.path

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        if self.path is not None and self.path.version is version:
            self.path = None
        if self._without is version:
            self._without = None


class PerVersion(Generic[Made]):
    """Values by version, made at the first use and dropped with the version: a path, a view of a dialect."""

    __slots__ = ("__weakref__", "_made", "_make")

    def __init__(self, keepers: VersionListeners, make: Callable[[Version], Made]) -> None:
        self._make = make
        self._made: dict[Version, Made] = {}
        keepers.add(self)

    def of(self, version: Version) -> Made:
        """Return the value of an available version."""
        if version not in self._made:
            self._made[version] = self._make(version)
        return self._made[version]

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        self._made.pop(version, None)


def open_path(version: Version, traffic: Traffic, outcome: Outcome) -> FastPath | None:
    """The fast path of a version; None for one that does more with a request than run or keep it."""
    stage, queue, sampler = cache_stage_of(version), fast_queue_of(version), sampler_of(version)
    if stage is not None:
        if sampler is None:
            return CachedPath(version, stage, traffic, outcome)
        cached = SampledCachedPath(version, stage, traffic, outcome)
        cached.draw = sampler.draw
        return cached
    if queue is None:
        return None
    if sampler is not None:
        path = SampledFastPath(version, queue, traffic, outcome)
        path.draw = sampler.draw
        return path
    return FastPath(version, queue, traffic, outcome)
