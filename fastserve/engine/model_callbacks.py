"""Callbacks of model code: calls to other models (BLS), and requests to the server itself, carried out by the
process that owns the workers.

    ModelCalls        infer another model; messages are those of workers/bls.py
    ModelCallbacks    load, unload, ready; metrics of the model's own; reports of the worker

A call is a task here: its request is read where the worker wrote it, run like any other, and every response
is copied into a slab that then is the worker's. It ends with its worker and at its deadline, so that a model
that waits for itself gets an error. Model code is checked like a client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any

import msgspec

from fastserve.backends.model_errors import explain
from fastserve.codec.slab_contents import (
    AnswerNote,
    RequestNote,
    measure_tensors,
    read_note,
    read_request_note,
    read_tensors,
    write_note,
    write_tensors,
)
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.counters import DeviceCounts, RemoteCounts, counters_of
from fastserve.engine.device_memory import RegionClosings, WorkerKey
from fastserve.engine.engine import Engine
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError, internal, invalid, unsupported
from fastserve.metrics.custom import CustomMetrics
from fastserve.repository.catalog import Catalog
from fastserve.repository.layout import Override
from fastserve.repository.repository import Repository
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor
from fastserve.util.model_demand import Want
from fastserve.util.offload import cancel_all
from fastserve.util.spans import CallFacts, RequestSpan, enter_span
from fastserve.util.tracing import TraceContext, make_span_id, read_trace_context

log = logging.getLogger(__name__)

# Responses a worker is sent ahead of what it has taken.
WINDOW = 8

LATE = "the model that was called took longer than the call's {:g} s"

NO_ROOM = "no room for the response of another model (max_queue_bytes)"

# Triton's words for a request that its model never saw, and for a model that is not there.
FAILED = "Model {} - Error when running inference: {}"

NOT_READY = "Failed for execute the inference request. Model '{}' is not ready."

UNREADABLE = "the request to another model cannot be read"


SendToWorker = Callable[[int, Mapping[str, Any]], bool]

"""Sends a message to a worker; False when it cannot be reached."""


class ModelCalls:
    """Calls of the workers of one queue. `send` sends a message to one of them, `want` loads a model that is
    loaded on demand."""

    def __init__(self, engine: Engine, queue: BatchQueue, send: SendToWorker, want: Want) -> None:
        self._engine, self._queue, self._send, self._want = engine, queue, send, want
        self._running: dict[tuple[int, int], tuple[asyncio.Task[None], asyncio.Semaphore]] = {}

    def hear(self, worker: int, message: Mapping[str, Any]) -> None:
        """Handle a worker's message: begin a call, allow one more response, or cancel a call."""
        key = (worker, int(message["id"]))
        known = self._running.get(key)
        if message["op"] == "infer" and known is None:
            room = asyncio.Semaphore(WINDOW)
            task = asyncio.get_running_loop().create_task(self._run(worker, message, room))
            self._running[key] = task, room
        elif message["op"] == "taken" and known is not None:
            known[1].release()
        elif message["op"] == "leave" and known is not None:
            known[0].cancel()

    def forget(self, worker: int) -> None:
        """Cancel the calls of a dead worker."""
        for key in [key for key in self._running if key[0] == worker]:
            self._running.pop(key)[0].cancel()

    async def close(self) -> None:
        """End every call."""
        tasks = [task for task, _ in self._running.values()]
        self._running.clear()
        await cancel_all(*tasks)

    async def _run(self, worker: int, message: Mapping[str, Any], room: asyncio.Semaphore) -> None:
        number, error = int(message["id"]), None
        try:
            await self._answer(worker, message, room)
        except asyncio.CancelledError:  # the caller has left, or is dead
            log.debug("a call of worker %d was given up", worker)
        except ServeError as fault:
            error = fault
        except Exception as fault:  # a call that is not answered would be waited for
            log.exception("a call of worker %d failed", worker)
            error = internal(explain(fault))
        if self._running.pop((worker, number), None) is None:
            return  # the number may be another call's by now
        said = {} if error is None else {"kind": error.kind.value, "message": error.message}
        self._send(worker, {"op": "answer", "id": number, "final": True, **said})

    async def _answer(self, worker: int, message: Mapping[str, Any], room: asyncio.Semaphore) -> None:
        timeout_s = int(message["timeout_us"]) / 1e6
        work = asyncio.ensure_future(self._respond(worker, message, room, timeout_s))
        done, _ = await _settle(work, timeout_s)
        if not done:
            raise ServeError(Kind.DEADLINE_EXCEEDED, LATE.format(timeout_s))
        try:
            work.result()
        except DeadlineError:
            raise ServeError(Kind.DEADLINE_EXCEEDED, LATE.format(timeout_s)) from None

    async def _respond(
        self, worker: int, message: Mapping[str, Any], room: asyncio.Semaphore, timeout_s: float
    ) -> None:
        note, tensors = self._read(message)
        span = self._begin_span(note)
        if span is None:
            await self._run_call(worker, message, room, timeout_s, note, tensors)
            return
        enter_span(span)  # this task is the call's own
        code = 0
        try:
            await self._run_call(worker, message, room, timeout_s, note, tensors)
        except ServeError as fault:
            code = fault.kind.value
            span.fail(fault.message)
            raise
        except asyncio.CancelledError:
            code = Kind.CANCELLED.value
            raise
        except Exception:
            code = Kind.INTERNAL.value
            raise
        finally:
            span.end(code)
            assert self._engine.send_span is not None
            self._engine.send_span(span)

    def _begin_span(self, note: RequestNote) -> RequestSpan | None:
        """Begin the span of a call that is part of a traced request."""
        if note.trace is None or self._engine.send_span is None:
            return None
        traceparent, state = note.trace
        parent = read_trace_context(traceparent.encode(), state.encode())
        if parent is None or not parent.sampled:
            return None
        context = TraceContext(parent.trace_id, make_span_id(), True, parent.state)
        return RequestSpan(
            context, parent.span_id, CallFacts(note.model, note.request_id), time.monotonic_ns()
        )

    async def _run_call(
        self,
        worker: int,
        message: Mapping[str, Any],
        room: asyncio.Semaphore,
        timeout_s: float,
        note: RequestNote,
        tensors: dict[str, Tensor],
    ) -> None:
        try:
            await self._want_model(note.model)
            version = find_version(self._engine.catalog, note)
            request = _make_request(version, note, tensors, timeout_s)
            responses = self._responses(version, request, many=message["many"])
            async with contextlib.aclosing(responses):
                async for response in responses:
                    try:
                        await room.acquire()
                        self._hand_over(worker, int(message["id"]), response)
                    finally:
                        response.release()
        except (ModelError, DeadlineError):  # the other model's own words, and ours
            raise
        except ServeError as fault:
            text = FAILED.format(note.model, fault.message)
            raise ServeError(fault.kind, text, retry_after_s=fault.retry_after_s) from fault

    async def _want_model(self, name: str) -> None:
        """Have a model loaded that is loaded on demand, and is not there. Raises ServeError."""
        model = self._engine.catalog.models.get(name)
        if model is not None and model.on_demand and model.latest is None:
            await self._want(name)

    async def _responses(
        self, version: Version, request: InferRequest, *, many: bool
    ) -> AsyncGenerator[InferResponse, None]:
        if not many:
            yield await self._engine.infer(version, request)
            return
        async with contextlib.aclosing(self._engine.stream(version, request)) as responses:
            async for response in responses:
                yield response

    def _read(self, message: Mapping[str, Any]) -> tuple[RequestNote, dict[str, Tensor]]:
        try:
            slab = self._queue.ring.slab(int(message["offset"]), int(message["nbytes"]))
            note = read_request_note(read_note(slab))
            return note, {note.extra[number]: tensor for number, tensor in read_tensors(slab)}
        except (ValueError, IndexError):
            raise invalid(UNREADABLE) from None

    def _hand_over(self, worker: int, number: int, response: InferResponse) -> None:
        if response.error is not None:
            said = {"kind": response.error.kind.value, "message": response.error.message}
            self._send(worker, {"op": "answer", "id": number, **said})
            return
        parameters: Any = response.parameters
        told = list(response.in_order())
        note = write_note(AnswerNote(parameters=parameters, extra=[name for name, _ in told]))
        tensors = [(number, tensor) for number, (_, tensor) in enumerate(told)]
        size = measure_tensors(tensors, note)
        ring = self._queue.ring
        offset = ring.allocate_slab(size)
        if offset == 0:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM)
        write_tensors(ring.slab(offset, size, True), tensors, note)
        ring.give_worker(offset, worker)
        if not self._send(worker, {"op": "answer", "id": number, "offset": offset, "nbytes": size}):
            ring.free_slab(offset)


def find_version(catalog: Catalog, note: RequestNote) -> Version:
    """Return the version that a call names. Raises ServeError NOT_FOUND."""
    version = catalog.available(note.model, note.version if note.version >= 0 else None)
    if version is None:
        raise ServeError(Kind.NOT_FOUND, NOT_READY.format(note.model))
    return version


def _make_request(
    version: Version, note: RequestNote, tensors: dict[str, Tensor], timeout_s: float
) -> InferRequest:
    for name in note.outputs:
        if name not in version.outputs:
            text = f"unexpected inference output '{name}' for model '{note.model}'"
            raise invalid(text)
    return InferRequest(
        tensors,
        tuple(note.outputs),
        note.request_id,
        note.priority,
        time.monotonic_ns() + int(timeout_s * 1e9),
        dict(note.parameters),
        note.sequence_id,
        bool(note.flags & 1),
        bool(note.flags & 2),
    )


async def _settle(work: asyncio.Future[None], timeout_s: float) -> tuple[set[Any], set[Any]]:
    """Wait for `work` as asyncio.wait does; cancel it if it is not done by then."""
    try:
        return await asyncio.wait({work}, timeout=timeout_s)
    finally:
        if not work.done():
            await cancel_all(work)


TEXT_MAX = 64 << 20

NO_CONTROL = "models cannot be loaded from here"

TOO_LONG = f"a callback has at most {TEXT_MAX} characters"

ITSELF = "a model cannot load itself while it loads"


class _Callback(msgspec.Struct, tag_field="do"):
    pass


class _Load(_Callback, tag="load"):
    name: str
    config: str = ""
    files: dict[str, str] = {}


class _Unload(_Callback, tag="unload"):
    name: str
    dependents: bool = False


class _Ready(_Callback, tag="ready"):
    name: str
    version: str = ""


class _Family(_Callback, tag="family"):
    name: str
    help: str
    kind: str


class _Metric(_Callback, tag="metric"):
    family: str
    labels: dict[str, str]
    buckets: list[float]


class _Value(_Callback, tag="value"):
    number: int


class _Change(_Callback, tag="change"):
    changes: list[tuple[int, str, float]]


class _Device(_Callback, tag="device"):
    """A report, not a request: device statistics of a worker (workers/device/device_runner.py)."""

    device: str
    pinned: bool
    batches: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int


class _NoMemory(_Callback, tag="no_memory"):
    """A report: batches a worker had no memory for (backends/model_errors.py)."""

    batches: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class _Drafts(_Callback, tag="drafts"):
    """A report: tokens drafted and accepted since the last one (backends/llm/drafts.py)."""

    drafted: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
    accepted: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _LentClosed(_Callback, tag="lent_closed"):
    """A report: a worker has closed a client's device memory (`RegionClosings`)."""

    number: int


class _Overdue(_Callback, tag="overdue"):
    """A report: a model that answers beside the batch loop has not given a part within run_timeout_ms."""


class _Remote(_Callback, tag="remote"):
    """A report: the remote workers of each machine, and their batches since the last one
    (workers/remote/runner.py)."""

    nodes: dict[
        Annotated[str, msgspec.Meta(max_length=256)],
        tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 16)], Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]],
    ]
    wanted: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    """Workers that are to be there; 0: the server starts none."""


MOST_NODES = 1024  # machines whose workers are counted


_Report = _Remote | _Device | _NoMemory | _Drafts | _LentClosed | _Overdue
_AnyCallback = _Load | _Unload | _Ready | _Family | _Metric | _Value | _Change | _Report

_read = msgspec.json.Decoder(_AnyCallback).decode


class ModelCallbacks:
    """Runs the callbacks of all workers. The server sets `repository`, if it has one."""

    def __init__(self, catalog: Catalog, on_overdue: Callable[[Version, int, int], None]) -> None:
        self.repository: Repository | None = None
        self.on_overdue = on_overdue
        self.metrics = CustomMetrics()
        self.lent = RegionClosings()
        self._catalog = catalog
        self._texts: dict[tuple[WorkerKey, int], list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(
        self, version: Version, part: int, worker: int, message: Mapping[str, Any], tell: SendToWorker
    ) -> None:
        """Take one piece of a callback. The last piece runs it; its result is sent with `tell`."""
        number = int(message["id"])
        place = ((id(version), part, worker), number)
        pieces = self._texts.setdefault(place, [])
        pieces.append(message["text"])
        if sum(map(len, pieces)) > TEXT_MAX:
            pieces[:] = [" " * TEXT_MAX]  # what follows is not kept either
        if message["more"]:
            return
        text = "".join(self._texts.pop(place))
        try:
            callback = _read(text) if len(text) < TEXT_MAX else None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            callback = None
        if isinstance(callback, _Report):
            self._take_report(version, part, worker, callback)
            return
        work = self._carry_out(version, callback, lambda told: self._say(tell, worker, number, told))
        if work is not None:
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take_report(self, version: Version, part: int, worker: int, report: _Report) -> None:
        if isinstance(report, _Device):
            _count_device(version, part, worker, report)
        elif isinstance(report, _Remote):
            _count_remote(version, report)
        elif isinstance(report, _NoMemory):
            counters_of(version).out_of_memory += report.batches
        elif isinstance(report, _Drafts):
            counters_of(version).drafted += report.drafted
            counters_of(version).accepted += report.accepted
        elif isinstance(report, _LentClosed):
            self.lent.closed((id(version), part, worker), report.number)
        else:
            self.on_overdue(version, part, worker)

    def forget_worker(self, version: Version, part: int, worker: int) -> None:
        """Discard the unfinished messages of a dead worker."""
        gone = (id(version), part, worker)
        self.lent.gone(gone)
        for place in [place for place in self._texts if place[0] == gone]:
            del self._texts[place]

    def forget(self, version: Version) -> None:
        """Forget the metrics and region closings of a version that is gone."""
        self.metrics.forget(id(version))
        self.lent.version_gone(id(version))

    async def close(self) -> None:
        """Cancel the callbacks that are running."""
        await cancel_all(*self._tasks)

    def _say(self, tell: SendToWorker, worker: int, number: int, told: Mapping[str, Any]) -> None:
        if number:
            tell(worker, {"op": "reply", "id": number, "final": True, **told})

    def _carry_out(
        self, version: Version, callback: _Callback | None, say: Callable[[dict[str, Any]], None]
    ) -> Any:
        """Return a coroutine for a load or unload; answer everything else at once, in the order it came."""
        if isinstance(callback, _Load | _Unload):
            return self._manage(version, callback, say)
        try:
            say(self._answer(version, callback))
        except ServeError as error:
            say({"kind": error.kind.value, "message": error.message})
        except ValueError as error:
            say({"kind": Kind.INVALID_ARGUMENT.value, "message": str(error)})
        return None

    def _answer(self, version: Version, callback: _Callback | None) -> dict[str, Any]:
        metrics, owner = self.metrics, id(version)
        if isinstance(callback, _Ready):
            return {"ready": self._is_ready(callback)}
        if isinstance(callback, _Family):
            metrics.add_family(owner, callback.name, callback.help, callback.kind)
            return {}
        if isinstance(callback, _Metric):
            return {"number": metrics.add_series(owner, callback.family, callback.labels, callback.buckets)}
        if isinstance(callback, _Value):
            return {"value": metrics.value(callback.number)}
        if isinstance(callback, _Change):
            for number, how, value in callback.changes:
                metrics.change(number, how, value)
            return {}
        raise ValueError("the server does not know what this asks for" if callback is None else TOO_LONG)

    def _is_ready(self, callback: _Ready) -> bool:
        if callback.version and not callback.version.lstrip("-").isdecimal():
            text = f"failed to get model version from specified version string {callback.version[:40]!r}"
            raise invalid(f"{text}, version should be an integral value > 0")
        number = int(callback.version) if callback.version and int(callback.version) >= 0 else None
        return self._catalog.ready(callback.name, number)

    async def want(self, name: str) -> None:
        """Load a model that is loaded on demand. Raises ServeError."""
        if self.repository is None:
            raise unsupported(NO_CONTROL)
        await self.repository.want(name)

    async def _manage(
        self, version: Version, callback: _Load | _Unload, say: Callable[[dict[str, Any]], object]
    ) -> None:
        try:
            if self.repository is None:
                raise unsupported(NO_CONTROL)
            if isinstance(callback, _Unload):
                if callback.name == version.model:  # it waits for its requests, and this may be one of them
                    say({})
                    say = log.debug
                await self.repository.unload(callback.name, composing=callback.dependents)
            else:
                await self._load(version, callback)
            say({})
        except ServeError as error:
            say({"kind": error.kind.value, "message": error.message})
        except Exception as error:
            log.exception("a callback of %r failed", version)
            say({"kind": Kind.INTERNAL.value, "message": explain(error)})

    async def _load(self, version: Version, callback: _Load) -> None:
        loading = self._catalog.available(version.model, version.number) is not version
        if loading and callback.name == version.model:
            raise ServeError(Kind.FAILED_PRECONDITION, ITSELF)
        try:
            files = {path: base64.b64decode(data) for path, data in callback.files.items()}
        except ValueError as error:
            raise invalid(f"files: {error}") from None
        override = Override(callback.config or "{}", files) if callback.config or files else None
        assert self.repository is not None
        await self.repository.load(callback.name, override=override, nested=loading)


def _count_remote(version: Version, told: _Remote) -> None:
    counters_of(version).remotes_wanted = told.wanted
    remotes = counters_of(version).remotes
    for counts in remotes.values():
        counts.workers = 0
    for node, (workers, batches) in told.nodes.items():
        if node in remotes or len(remotes) < MOST_NODES:
            counts = remotes.setdefault(node, RemoteCounts())
            counts.workers = workers
            counts.batches += batches


def _count_device(version: Version, part: int, worker: int, told: _Device) -> None:
    counts = counters_of(version).devices.setdefault((part, worker), DeviceCounts())
    counts.device, counts.pinned = told.device, told.pinned
    for field in ("batches", "copy_in_ns", "compute_ns", "copy_out_ns"):
        setattr(counts, field, getattr(counts, field) + max(getattr(told, field), 0))
