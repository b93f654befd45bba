"""Trace contexts of the batch that a model runs, for models that make spans of their own.

    from fastserve import batch_traces

    def run(self, inputs):
        for traced in batch_traces():         empty unless requests of this batch are traced
            ...traced.rows, traced.traceparent, traced.tracestate

The worker sets `of_thread` for each batch: one attribute. What lies beside the batch is read when the model
asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from fastserve.util.tracing import TraceContext


class BatchTrace(NamedTuple):
    """One traced request of the batch at hand: `rows` are its rows there; the two headers name the span that
    the model's own spans are to have as their parent."""

    rows: range
    traceparent: str
    tracestate: str


class NotedTrace(Protocol):
    """A traced request as the worker finds it beside a batch."""

    @property
    def first_row(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def context(self) -> TraceContext: ...


def nothing_noted(slot: int) -> Sequence[NotedTrace]:
    """Return the notes of a thread that runs no batches."""
    return ()


class RunningBatch(threading.local):
    """The batch that this thread runs: `slot` is its slot, -1 between batches; `read` finds its notes."""

    slot = -1
    read: Callable[[int], Sequence[NotedTrace]] = staticmethod(nothing_noted)


of_thread = RunningBatch()


def batch_traces() -> list[BatchTrace]:
    """Return the traced requests of the batch that `run` was called for, by their rows. Call it in the thread
    that called `run`; elsewhere, and where requests are not traced, the list is empty. At most 32 requests of
    each front process are among them."""
    slot = of_thread.slot
    return [
        BatchTrace(range(one.first_row, one.first_row + one.rows), one.context.traceparent, one.context.state)
        for one in (of_thread.read(slot) if slot >= 0 else ())
    ]
