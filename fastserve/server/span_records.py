"""Spans, names and attributes of traced requests, made in the exporter's process of what fronts send.

    server span      of the request, named after its route or RPC
      decode         from its arrival to its tensors
      batch          until its rows lie in a batch: a wait for room or a scheduler; none on the fast path
      queue          until a worker takes the batch
      compute        until the batch is done; linked to the batch's span
        call MODEL   of the model to another: with batch, queue and compute of its own
      encode         until the answer is written
      generate       of text: one sequence, with the moment of its first token
      run            of an ensemble, with a run below it for each step: with batch, queue and compute

    batch MODEL      in a trace of its own: linked to the compute spans of all its traced requests

Names of attributes are those of OpenTelemetry's semantic conventions, where these have one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from fastserve.errors import Kind
from fastserve.util.spans import (
    TEXT_MAX,
    Attributes,
    AttributeValue,
    BatchTimes,
    CallFacts,
    HttpFacts,
    RequestSpan,
    RpcFacts,
    RunTrace,
)
from fastserve.util.tracing import make_span_id

FAILED_FROM = 500  # status of HTTP from which a server's span has an error: below, the client is at fault
FAILED_KINDS = frozenset(
    kind.value
    for kind in (
        Kind.UNKNOWN,
        Kind.DEADLINE_EXCEEDED,
        Kind.UNIMPLEMENTED,
        Kind.INTERNAL,
        Kind.UNAVAILABLE,
        Kind.DATA_LOSS,
    )
)
"""Statuses of gRPC that are a server's error."""
MODEL, VERSION, ROWS = "fastserve.model", "fastserve.model.version", "fastserve.rows"
Event = tuple[str, int, Mapping[str, AttributeValue]]
LinkTo = tuple[str, str]
"""Trace id and span id."""


class SpanRecord(NamedTuple):
    """One finished span. Ids are lower-case hex; times are Unix nanoseconds. `error` is None for a span
    without one."""

    trace_id: str
    span_id: str
    parent_id: str
    state: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: Sequence[Event] = ()
    links: Sequence[LinkTo] = ()
    error: str | None = None


class BatchRecord(NamedTuple):
    """One batch as one of its requests has seen it. All records of a batch have the same ids: one span is
    made of them, with a link to each request's compute span."""

    trace_id: str
    span_id: str
    model: str
    version: int
    times_ns: tuple[int, ...]
    """Unix nanoseconds of: first row, taken, run started, run ended, done. 0: not reached."""
    rows: int
    link: LinkTo
    error: str | None


def read_request(request: RequestSpan) -> tuple[list[SpanRecord], list[BatchRecord]]:
    """Return the spans of an ended request, its own first, and its batches as it has seen them."""
    spans: list[SpanRecord] = []
    batches: list[BatchRecord] = []
    for run in request.runs:
        _read_run(request, run, spans, batches)
    shift = request.shift_ns
    for name, start_ns, end_ns, attributes, moments in request.children:
        events: list[Event] = [(moment, ns + shift, {}) for moment, ns in moments]
        spans.append(_child(request, make_span_id(), name, start_ns, end_ns, attributes, events))
    own = [] if request.facts is None else [_read_own(request)]
    return own + spans, batches


def _read_own(request: RequestSpan) -> SpanRecord:
    context, attributes = request.context, {**request.attributes}
    if request.runs:
        first = request.runs[0]
        attributes |= {MODEL: first.model, VERSION: first.version}
        rows = sum(batch.rows for run in request.runs for batch in run.batches)
        attributes |= {ROWS: rows} if rows else {}
    kind = "server"
    if isinstance(request.facts, HttpFacts):
        name, failed = _describe_call(request, request.facts, attributes)
    elif isinstance(request.facts, CallFacts):
        name, failed, kind = *_describe_model_call(request, request.facts, attributes), "internal"
    else:
        name, failed = _describe_rpc(request, attributes)
    shift = request.shift_ns
    return SpanRecord(
        *(context.trace_id, context.span_id, request.parent_id, context.state, name, kind),
        *(request.started_ns + shift, request.ended_ns + shift, attributes),
        error=(request.error or str(attributes["error.type"])) if failed else None,
    )


def _describe_call(request: RequestSpan, facts: HttpFacts, attributes: Attributes) -> tuple[str, bool]:
    """Add what a call over HTTP is described with; return the span's name and whether it failed."""
    path = facts.target.partition("?")[0][:TEXT_MAX]  # a query may hold what is secret
    attributes |= {
        "http.request.method": facts.method,
        "url.path": path,
        "client.address": _host(facts.address),
        "http.response.status_code": request.status,
        "fastserve.request_id": facts.request_id,
    }
    if facts.agent:
        attributes["user_agent.original"] = facts.agent[:TEXT_MAX].decode("latin-1")
    failed = request.status >= FAILED_FROM
    if failed:
        attributes["error.type"] = str(request.status)
    if MODEL not in attributes:
        return facts.method, failed
    route = _route(path, str(attributes[MODEL]), str(attributes.get(VERSION, "")))
    attributes["http.route"] = route
    return f"{facts.method} {route}", failed


def _describe_rpc(request: RequestSpan, attributes: Attributes) -> tuple[str, bool]:
    """Add what an RPC is described with; return the span's name and whether it failed."""
    facts = request.facts
    assert isinstance(facts, RpcFacts)
    path = facts.path.lstrip("/")
    service, _, method = path.rpartition("/")
    attributes |= {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": request.status,
        "client.address": _host(facts.address),
        "fastserve.request_id": facts.request_id,
    }
    if request.status:
        attributes["error.type"] = Kind(request.status).name
    return path, request.status in FAILED_KINDS


def _describe_model_call(request: RequestSpan, facts: CallFacts, attributes: Attributes) -> tuple[str, bool]:
    """Add what a model's call to another one is described with; return the span's name and whether it
    failed."""
    attributes[MODEL] = facts.model[:TEXT_MAX]
    if facts.request_id:
        attributes["fastserve.request_id"] = facts.request_id[:TEXT_MAX]
    if request.status:
        attributes["error.type"] = Kind(request.status).name
    return f"call {attributes[MODEL]}", request.status in FAILED_KINDS


def _host(address: str) -> str:
    return address.rpartition(":")[0] or address


def _route(path: str, model: str, version: str) -> str:
    """Return a path with its model and version as placeholders: few names for many models."""
    route = re.sub(rf"(?<=/){re.escape(model)}(?=[/:]|$)", "{model}", path, count=1)
    return re.sub(rf"(?<=/versions/){re.escape(version)}(?=[/:]|$)", "{version}", route) if version else route


def _child(
    request: RequestSpan,
    span_id: str,
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue],
    events: Sequence[Event] = (),
    links: Sequence[LinkTo] = (),
    error: str | None = None,
    parent_id: str = "",
) -> SpanRecord:
    """Return a span below the request's own, or below `parent_id`; its times are those of the request."""
    context, shift = request.context, request.shift_ns
    return SpanRecord(
        *(context.trace_id, span_id, parent_id or context.span_id, context.state, name, "internal"),
        *(start_ns + shift, max(start_ns, end_ns) + shift, attributes, events, links, error),
    )


def _read_run(
    request: RequestSpan, run: RunTrace, spans: list[SpanRecord], batches: list[BatchRecord]
) -> None:
    about: Attributes = {MODEL: run.model, VERSION: run.version}
    ended_ns = run.ended_ns or request.ended_ns
    model_id, above_id = run.context.span_id, run.above_id
    if not run.batches:  # an ensemble, an answer from the cache, or a request that never got to a worker
        more = run.begun_ns, ended_ns, about
        spans.append(_child(request, model_id, "run", *more, error=run.error, parent_id=above_id))
        return
    if above_id:
        step_id = make_span_id()
        more = run.begun_ns, ended_ns, about
        spans.append(_child(request, step_id, "run", *more, error=run.error, parent_id=above_id))
        above_id = step_id
    for number, batch in enumerate(run.batches):
        if not number:
            more = run.begun_ns, batch.written_ns, about
            spans.append(_child(request, make_span_id(), "batch", *more, parent_id=above_id))
        own_id = make_span_id() if number else model_id
        _read_batch(request, run, batch, (own_id, above_id), spans, batches)


def _read_batch(
    request: RequestSpan,
    run: RunTrace,
    batch: BatchTimes,
    ids: tuple[str, str],
    spans: list[SpanRecord],
    batches: list[BatchRecord],
) -> None:
    """Add what a run's rows did in a batch. The first of `ids` is of the last span there, below which the
    model's own are, the second of their parent."""
    own_id, above_id = ids
    about: Attributes = {MODEL: run.model, VERSION: run.version}
    _, taken_ns, run_ns, ran_ns, done_ns = batch.times_ns
    end_ns = done_ns or run.ended_ns or request.ended_ns
    if not taken_ns:  # or nobody knows, as its client had left before
        spans.append(_child(request, own_id, "queue", batch.written_ns, end_ns, about, parent_id=above_id))
        return
    queued_ns, shift = max(batch.written_ns, taken_ns), request.shift_ns
    more = batch.written_ns, queued_ns, about
    spans.append(_child(request, make_span_id(), "queue", *more, parent_id=above_id))
    moments = (("run started", run_ns), ("run ended", ran_ns))
    events: list[Event] = [(name, ns + shift, {}) for name, ns in moments if ns]
    batch_span, rows = batch_ids(batch), {**about, ROWS: batch.rows}
    computed = queued_ns, end_ns, rows, events, [batch_span], run.error, above_id
    spans.append(_child(request, own_id, "compute", *computed))
    times_ns = tuple(ns + shift if ns else 0 for ns in batch.times_ns)
    link = request.context.trace_id, own_id
    batches.append(BatchRecord(*batch_span, run.model, run.version, times_ns, batch.rows, link, run.error))


def batch_ids(batch: BatchTimes) -> LinkTo:
    """Return trace id and span id of a batch: the same of all its requests, whichever front they came to."""
    digest = blake2b(f"{batch.arena} {batch.slot} {batch.seq}".encode(), digest_size=24).hexdigest()
    return digest[:32], digest[32:]
