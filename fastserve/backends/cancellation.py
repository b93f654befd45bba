"""The run that a model is in the middle of, and whether anybody still waits for it: `fastserve.cancelled()`,
`cancelled_rows()`. Which of its requests are traced, batch_traces.py tells.

    def run(self, inputs):
        for step in range(1000):
            if fastserve.cancelled():
                break                                  nobody waits: any outputs of the right shape do
            ...

A client that has left and one whose time is up are the same here. What is asked is the state of the batch in
shared memory, at that moment: it costs microseconds when it is asked, and nothing while it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from fastserve.util.tracing import TraceContext

if TYPE_CHECKING:
    import numpy as np

    from fastserve._ext.batch_ring import BatchRing

Rows = Sequence[int]
RowsTraced = tuple[range, TraceContext]
"""Rows of the inputs that are a traced request's, and the span that the model's own are to be below."""


class Watched(Protocol):
    """A run of a model, and those who wait for it."""

    def gone(self) -> list[bool]:
        """Return for each row, in the order of the inputs, whether nobody waits for it."""

    def traced(self) -> list[RowsTraced]:
        """Return the traced requests, in the order of the inputs."""


class NotedTrace(Protocol):
    """A traced request as the worker finds it beside a batch."""

    @property
    def first_row(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def context(self) -> TraceContext: ...


class TraceSheets(Protocol):
    """Notes of traced requests beside the batches of an arena (workers/trace_notes.py)."""

    def read(self, slot: int, seq: int) -> Sequence[NotedTrace]:
        """Return the traced requests of a batch, by row."""


def _nobody() -> None:
    """Return what a process watches that is no worker."""


# Weak where a worker holds it: the context lives as long as its thread, the arena of a worker does not.
_watched: ContextVar[Callable[[], Watched | None]] = ContextVar("fastserve_watched", default=_nobody)


_refresh: Callable[[], object] = _nobody


def refresh_with(look: Callable[[], object]) -> None:
    """Have `look` called before each answer in this process, whose worker learns by messages who waits."""
    global _refresh
    _refresh = look


def running() -> Watched | None:
    """Return what the model is running; None outside of a worker."""
    return _watched.get()()


def cancelled() -> bool:
    """Return whether nobody waits any more for what the model is running: all clients of the batch, or of the
    request, have left, or their time is up. False outside of a worker."""
    watched = running()
    if watched is None:
        return False
    _refresh()
    gone = watched.gone()
    return bool(gone) and all(gone)


def cancelled_rows() -> np.ndarray[Any, Any]:
    """Return for each row of the inputs whether nobody waits for it: bools of shape `[rows]`, with the rows
    that pad a batch. Without a batch axis, and for functions of JSON, a request is a row. No rows outside of
    a worker."""
    import numpy as np  # a front process imports this module, by way of the remote workers' orders

    watched = running()
    _refresh()
    return np.array([] if watched is None else watched.gone(), bool)


class WatchedBatch:
    """The batch of arrays that a worker runs. One for a worker: `begin` is two assignments."""

    __slots__ = ("__weakref__", "_ring", "_rows", "_sheets", "_slot")

    def __init__(self, ring: BatchRing, sheets: TraceSheets) -> None:
        self._ring, self._sheets, self._slot = ring, sheets, -1
        self._rows: int | Rows | Sequence[tuple[int, int, Any]] = 0
        _watched.set(ref(self))

    def begin(self, slot: int, rows: int | Rows | Sequence[tuple[int, int, Any]]) -> None:
        """A run begins: of the first `rows` of the slot, of these rows, or of these leases, (first row, rows,
        any)."""
        self._slot, self._rows = slot, rows

    def end(self) -> None:
        """The run has ended."""
        self._slot = -1

    def gone(self) -> list[bool]:
        if self._slot < 0:
            return []
        alive = {
            row for first, rows, _, _ in self._ring.leases(self._slot) for row in range(first, first + rows)
        }
        return [row not in alive for row in self._index()]

    def traced(self) -> list[RowsTraced]:
        slot = self._slot
        notes = () if slot < 0 else self._sheets.read(slot, self._ring.seq(slot))
        if not notes:
            return []
        place: dict[int, int] = {}
        for at, row in enumerate(self._index()):
            place.setdefault(row, at)  # rows that pad a batch are a copy of one before
        found = []
        for note in notes:
            rows = [place[row] for row in range(note.first_row, note.first_row + note.rows) if row in place]
            if rows:
                found.append((range(rows[0], rows[-1] + 1), note.context))
        return found

    def _index(self) -> Rows:
        given = self._rows
        if isinstance(given, int):
            return range(given)
        return [
            row
            for one in given
            for row in (range(one[0], one[0] + one[1]) if isinstance(one, tuple) else (one,))
        ]


class Awaited(Protocol):
    """An answer that a request waits for."""

    def cancelled(self) -> bool:
        """Return whether its client has left."""

    def trace_context(self) -> TraceContext | None:
        """Return what spans of the model are to have as their parent; None for a request that is not
        traced."""


def _traced(replies: Sequence[Awaited | None]) -> list[RowsTraced]:
    found = []
    for at, reply in enumerate(replies):
        context = None if reply is None else reply.trace_context()
        if context is not None:
            found.append((range(at, at + 1), context))
    return found


class WatchedReplies:
    """The answers that a worker owes to the requests that it runs. One for a worker: `begin` is an
    assignment."""

    __slots__ = ("__weakref__", "_replies")

    def __init__(self) -> None:
        self._replies: Sequence[Awaited] = ()
        _watched.set(ref(self))

    def begin(self, replies: Sequence[Awaited]) -> None:
        """A run begins, that may call other models meanwhile."""
        self._replies = replies

    def end(self) -> None:
        """The run has ended, whatever it has left running."""
        self._replies = ()

    def gone(self) -> list[bool]:
        return [reply.cancelled() for reply in self._replies]

    def traced(self) -> list[RowsTraced]:
        return _traced(self._replies)


class WatchedCall:
    """Requests that are answered by one call: `with WatchedCall(replies): ...`, also for what starts there
    and runs on. Weak: a context that lives on keeps no request."""

    __slots__ = ("_replies", "_token")

    def __init__(self, replies: Sequence[Awaited]) -> None:
        self._replies = [ref(reply) for reply in replies]

    def __enter__(self) -> None:
        self._token = _watched.set(lambda: self)

    def __exit__(self, *raised: object) -> None:
        _watched.reset(self._token)

    def gone(self) -> list[bool]:
        return [reply is None or reply.cancelled() for reply in self._left()]

    def traced(self) -> list[RowsTraced]:
        return _traced(self._left())

    def _left(self) -> list[Awaited | None]:
        return [look() for look in self._replies]
