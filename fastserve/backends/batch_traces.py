"""Trace contexts of the batch that a model runs, for models that make spans of their own.

    from fastserve import batch_traces

    def run(self, inputs):
        for traced in batch_traces():         empty unless requests of this batch are traced
            ...traced.rows, traced.traceparent, traced.tracestate

What lies beside the batch is read when the model asks. Which batch that is, cancellation.py knows.
"""

from __future__ import annotations

from typing import NamedTuple

from fastserve.backends.cancellation import running


class BatchTrace(NamedTuple):
    """One traced request of the batch at hand: `rows` are its rows of the inputs; the two headers name the
    span that the model's own spans are to have as their parent."""

    rows: range
    traceparent: str
    tracestate: str


def batch_traces() -> list[BatchTrace]:
    """Return the traced requests of what the model is running, by their rows of the inputs; without a batch
    axis, and for functions of JSON, a request is a row. Empty outside of a worker, and where requests are not
    traced. At most 32 requests of each front process are among them."""
    watched = running()
    return [
        BatchTrace(rows, context.traceparent, context.state)
        for rows, context in (() if watched is None else watched.traced())
    ]
