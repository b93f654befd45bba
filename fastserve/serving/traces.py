"""Traces of single requests in Triton's JSON form, in the file of `--trace-config triton,file=F`.

    [{"id": 1, "model_name": "simple", "model_version": 1},
     {"id": 1, "timestamps": [{"name": "REQUEST_START", "ns": 2356425054785863}]}, ...]

Every `trace_rate`th request is traced, `trace_count` of them at most. With a `log_frequency` they go to F.0,
F.1, ..., that many in each, and so do the last ones of a `trace_count`; others go to F, whose list is closed
when the server stops. Times are nanoseconds of the monotonic clock.

Front processes count requests and traces together, in memory that they share (ScopeCounters), so rates and
counts are those of the server. Finished traces go to the owner of the models, which alone writes files
(TraceSink), while it serves nobody else: tracing is for a look at some requests. What a front process had not
handed over when it died is lost, and counts as traced.

Which requests, by settings for all models and for single ones, and what is noted of their way through the
engine, is here; how settings are read, and what a transport stamps on its way in and out, is a dialect's.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from math import prod
from typing import IO, Any

import msgspec

from fastserve._ext.infer_reply import UnwritableOutput, write_items
from fastserve._ext.shared_metrics import Counter, Section, file_bytes, lay_out
from fastserve.codec.json_text import to_bytes
from fastserve.engine import Engine
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState, StateRecord
from fastserve.tensor import KSERVE_NAME, Tensor
from fastserve.util.memory import make_shared_file, map_shared_file
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
_limited_log = RateLimitedLog(log)

KEPT = 256  # traces that wait for the file to be written to
MOST_BYTES = 64 << 20  # of traces that wait in a front process for the owner to take them
_OWN = 2  # numbers of a scope that are no front process's
OFF = ["OFF"]
Setting = str | list[str]
DEFAULTS: Mapping[str, Setting] = {
    "trace_level": OFF,
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
# The names of a batch's times, in the order the arena has them.
_BATCH = ("QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


class TraceFile:
    """File that traces are appended to, and the numbered files beside it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._next = 0
        self._open: IO[bytes] | None = None

    def append(self, entries: list[bytes]) -> None:
        """To the file itself."""
        try:
            begun = self._open is not None
            if self._open is None:
                self._open = open(self.path, "wb")  # noqa: SIM115 -- closed with the settings
            self._open.write((b"," if begun else b"[") + b",".join(entries))
            self._open.flush()
        except OSError as error:
            _limited_log.warn("traces are lost: %s", error.strerror)

    def write_numbered(self, entries: list[bytes]) -> None:
        """To a file of their own."""
        try:
            with open(f"{self.path}.{self._next}", "wb") as file:
                file.write(b"[%b]" % b",".join(entries))
        except OSError as error:
            _limited_log.warn("traces are lost: %s", error.strerror)
        self._next += 1

    def close(self) -> None:
        """End the list in the file."""
        file, self._open = self._open, None
        try:
            if file is not None:
                with file:  # closed also where there is no room for what is left
                    file.write(b"]")
        except OSError as error:
            _limited_log.warn("traces are lost: %s", error.strerror)


class ScopeCounters:
    """Numbers of one scope in memory that all front processes share: requests seen, traces begun, and those
    by front process."""

    def __init__(self, fronts: int, front: int = 0, fd: int = -1) -> None:
        """`fd`: the memory that the owner has made, which is this object's now. Raises ValueError."""
        count = _OWN + fronts
        nbytes = file_bytes(1, 1, 64, count)
        self.fd = make_shared_file("fastserve-trace", nbytes) if fd < 0 and fronts > 1 else fd
        memory = map_shared_file(self.fd) if fronts > 1 else mmap.mmap(-1, nbytes)
        if fd < 0:
            lay_out(memory, 1, 1, 64, count)
        section = Section(memory, 0)
        self.seen, self.taken, *self.begun = (Counter(section, slot) for slot in range(count))
        self.own = self.begun[front]

    def close_fd(self) -> None:
        """Close the descriptor. The numbers stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class TraceScope:
    """Settings that hold for some models, from one change to the next: which requests are traced. `on` while
    there may be more of them, in any front process."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        counters: ScopeCounters,
        keep: Callable[[list[bytes]], None],
    ) -> None:
        """`keep` takes a finished trace."""
        self._levels = settings["trace_level"]
        in_files = (
            settings["trace_mode"] == DEFAULTS["trace_mode"]
        )  # others go with all spans (net/traced_endpoints.py)
        self.on = in_files and self._levels != OFF and settings["trace_count"] != "0"
        self.stamps, self.tensors = "TIMESTAMPS" in self._levels, "TENSORS" in self._levels
        self._rate = int(str(settings["trace_rate"]))
        self._most = int(str(settings["trace_count"]))
        self.counters, self.keep = counters, keep

    def wants(self) -> bool:
        """Whether the request that comes now is one of those traced."""
        if not self.on or (self.counters.seen.take() + 1) % self._rate:
            return False
        if self._most > 0:
            taken = self.counters.taken.take()
            self.on = taken + 1 < self._most
            if taken >= self._most:  # another front process has had the last
                return False
        self.counters.own.add()
        return True


class TraceSink:
    """The finished traces of one scope, in the owner: they are kept until they are written."""

    def __init__(self, settings: Mapping[str, Setting], counters: ScopeCounters, file: TraceFile) -> None:
        self._most = int(str(settings["trace_count"]))
        self._frequency = int(str(settings["log_frequency"]))
        self._file, self.counters = file, counters
        self._ended = [0] * len(counters.begun)  # traces by front process, those that died with it too
        self._kept: list[bytes] = []
        self._count = 0  # traces in _kept
        self._over = False  # other settings hold now

    @property
    def done(self) -> bool:
        """Whether no trace is to come any more."""
        begun = (counter.value for counter in self.counters.begun)
        return self._over and all(map(int.__ge__, self._ended, begun))

    def keep(self, front: int, entries: list[bytes]) -> None:
        """Take over a finished trace; without entries one that was lost."""
        self._ended[front] = min(self._ended[front] + 1, self.counters.begun[front].value)
        if entries:
            self._kept += entries
            self._count += 1
        self._look()

    def front_ended(self, front: int) -> None:
        """The traces that a front process had begun and not handed over will not come."""
        self._ended[front] = max(self.counters.begun[front].value, self._ended[front])
        self._look()

    def end(self) -> None:
        """Other settings hold now: write what is kept, and what is still to come as it comes."""
        self._over = True
        self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        if self._kept and self._frequency:
            self._write_numbered()
        elif self._kept:
            self._file.append(self._kept)
            self._kept, self._count = [], 0

    def _look(self) -> None:
        last = 0 < self._most <= sum(self._ended)
        if self._kept and (last or (self._frequency and self._count >= self._frequency)):
            self._write_numbered()
        elif self._over or (not self._frequency and self._count >= KEPT):
            self.flush()

    def _write_numbered(self) -> None:
        self._file.write_numbered(self._kept)
        self._kept, self._count = [], 0


class TraceOutbox:
    """Finished traces on their way to the owner, one message at a time; more than MOST_BYTES are lost."""

    def __init__(self, state: ReplicatedState) -> None:
        self._state = state
        self._waiting: list[tuple[int, list[bytes]]] = []  # scope and entries
        self._nbytes = 0
        self._sending: asyncio.Task[None] | None = None

    def put(self, scope: int, entries: list[bytes]) -> None:
        """Send a trace soon."""
        nbytes = sum(map(len, entries))
        if self._nbytes + nbytes > MOST_BYTES:
            text = "a trace is lost: %d bytes of them wait for the server's first process"
            _limited_log.warn(text, self._nbytes)
            entries, nbytes = [], 0
        self._nbytes += nbytes
        self._waiting.append((scope, entries))
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    def send_now(self) -> None:
        """Send all, ahead of whatever this process tells the owner next."""
        if self._waiting and self._state.note is not None:
            self._state.note(Traces.PART, self._take())

    async def _send(self) -> None:
        try:
            while self._waiting:
                assert self._state.ask is not None
                await self._state.ask(Traces.PART, self._take())
        finally:
            self._sending = None

    def _take(self) -> Content:
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        kept = [(scope, [entry.decode() for entry in entries]) for scope, entries in waiting]
        return {"front": self._state.front, "kept": kept}


class RequestTrace:
    """One request that is traced, and the engine as it asks it. `end` it."""

    def __init__(self, id: int, scope: TraceScope, engine: Engine) -> None:
        self._id, self._scope, self._engine = id, scope, engine
        self._entries: list[bytes] = []

    def stamp(self, *names: str, ns: int = 0) -> None:
        """Note when something happened: now, or at `ns`. Several names share the moment."""
        for name in names if self._scope.stamps else ():
            self._add({"timestamps": [{"name": name, "ns": ns or time.monotonic_ns()}]})

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """The engine's answer. Raises ServeError."""
        self.begin(version, request)
        response: InferResponse | None = None
        try:
            response = await self._engine.infer(version, request)
        finally:
            self.answered(request, response)
        return response

    async def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The engine's responses to one request, noted as they come. Raises ServeError."""
        self.begin(version, request)
        async with aclosing(self._engine.stream(version, request)) as responses:
            async for response in responses:
                self.answered(request, response)
                yield response

    def begin(self, version: Version, request: InferRequest) -> None:
        """The request is about to run. Its `times` are asked for."""
        about: dict[str, Any] = {"model_name": version.model, "model_version": version.number}
        if request.request_id:
            about["request_id"] = to_bytes(request.request_id).decode("utf-8", "replace")
        self._add(about)
        self.stamp("REQUEST_START")
        self._show("TENSOR_QUEUE_INPUT", request.inputs, request.lent)
        request.times = []

    def answered(self, request: InferRequest, response: InferResponse | None) -> None:
        """The model's answer is there; None when it is an error."""
        for name, ns in zip(_BATCH, request.times or (), strict=False):
            if ns:
                self.stamp(name, ns=ns)
        self.stamp("INFER_RESPONSE_COMPLETE")
        if response is not None:
            self._show("TENSOR_BACKEND_OUTPUT", response.outputs, request.placed)
        self.stamp("REQUEST_END")

    def end(self) -> None:
        """Nothing more is to come."""
        self._scope.keep(self._entries)

    def _show(self, activity: str, tensors: Mapping[str, Tensor], elsewhere: Collection[str]) -> None:
        """Tensors but those `elsewhere`: on a GPU, whose bytes never were in this process."""
        shown_names = [name for name in tensors if name not in elsewhere] if self._scope.tensors else []
        for name in shown_names:
            tensor = tensors[name]
            shown = {
                "name": name,
                "data": _data(tensor),
                "shape": ",".join(map(str, tensor.shape)),
                "dtype": KSERVE_NAME[tensor.dtype.name],
            }
            self._add({"activity": activity, "tensor": shown})

    def _add(self, entry: dict[str, Any]) -> None:
        self._entries.append(msgspec.json.encode({"id": self._id, **entry}))


def _data(tensor: Tensor) -> str:
    try:
        return write_items(tensor.dtype.code, prod(tensor.shape), tensor.data).decode("utf-8", "replace")
    except UnwritableOutput:  # a type without a text form
        return ""


class Traces(ReplicatedPart):
    """The traces of one front process, and in the owner their files. `on` while any request may have to be
    traced."""

    PART = "kserve traces"

    def __init__(
        self,
        engine: Engine,
        start: Mapping[str, Setting],
        check: Callable[[Mapping[str, Setting]], None],
        state: ReplicatedState,
        fronts: int,
    ) -> None:
        """`start`: the settings that the server began with, where they are not the defaults; `check` raises
        ServeError for settings that cannot be."""
        self.on = False
        self._engine, self._check, self._state, self._fronts = engine, check, state, fronts
        self._start: dict[str, Setting] = {**DEFAULTS, **start}
        self._changes: dict[str, dict[str, Setting]] = {"": {}}  # by model, "" for all
        self._files: dict[str, TraceFile] = {}
        self._scopes: dict[str, TraceScope] = {}  # by model
        self._numbers: dict[str, int] = {}  # of the scopes
        self._sinks: dict[int, TraceSink] = {}  # by the number of their scope
        self._next = 0
        self._outbox = TraceOutbox(state)
        self._ids: ScopeCounters | None = None  # whose `taken` is the last id
        if state.owned:
            self._ids = ScopeCounters(fronts)
            self._begin([""])
        state.add(self.PART, self)

    def show(self, model: str = "") -> dict[str, Setting]:
        """Return the settings of a model, "" for all others."""
        return {**self._start, **self._changes[""], **self._changes.get(model, {})}

    async def change(self, changes: Mapping[str, Setting | None], model: str) -> None:
        """Set these for a model, or for all by "", in every front process; None goes back to what holds for
        all. Raises ServeError, and then nothing changes."""
        change = {"model": model, "changes": changes}
        if self._state.ask is not None:
            await self._state.ask(self.PART, change)
        else:
            await self.carry_out(change)

    # --- in the owner

    async def carry_out(self, change: Content) -> None:
        if "kept" in change:
            self._keep(change)
            return
        model, changes = change["model"], change["changes"]
        given = {**self._changes.get(model, {}), **changes}
        own = {name: value for name, value in given.items() if value is not None}
        self._check({**self._start, **(self._changes[""] if model else {}), **own})
        if own or not model:
            self._changes[model] = own
        else:
            self._changes.pop(model, None)
        models = [model] if model else list(self._changes)  # all are under part of a change for all
        gone = self._begin(models)
        if self._state.publish is not None:  # until here the others hand over what belongs to those that end
            await self._state.publish(self.PART, [self._record(models)])
        for number in gone:
            self._sinks[number].end()
        self._forget_done()

    def records(self) -> Iterator[StateRecord]:
        assert self._ids is not None
        yield StateRecord({"ids": True}, (self._ids.fd,))
        yield self._record(list(self._changes))

    def noted(self, front: int, content: Content) -> None:
        self._keep(content)

    def front_ended(self, front: int) -> None:
        for sink in self._sinks.values():
            sink.front_ended(front)
        self._forget_done()

    def fronts_ended(self) -> None:
        """Write what is kept, and end the files."""
        for sink in self._sinks.values():
            sink.flush()
            sink.counters.close_fd()
        self._sinks.clear()
        for file in self._files.values():
            file.close()
        if self._ids is not None:
            self._ids.close_fd()

    def _record(self, models: list[str]) -> StateRecord:
        scopes = [(name, self._numbers[name]) for name in models if name in self._changes]
        fds = [self._sinks[number].counters.fd for _, number in scopes]
        return StateRecord({"changes": self._changes, "scopes": scopes}, fds)

    def _begin(self, models: Iterable[str]) -> list[int]:
        """Begin the traces of these models anew, and return the numbers of the scopes that end."""
        gone = []
        for model in models:
            if self._scopes.pop(model, None) is not None:
                gone.append(self._numbers.pop(model))
            if model in self._changes:
                settings = self.show(model)
                number, self._next = self._next, self._next + 1
                counters = ScopeCounters(self._fronts)
                sink = TraceSink(settings, counters, self._file(str(settings["trace_file"])))
                self._sinks[number], self._numbers[model] = sink, number
                self._scopes[model] = TraceScope(settings, counters, partial(sink.keep, self._state.front))
        self._look()
        return gone

    def _keep(self, content: Content) -> None:
        for number, entries in content["kept"]:
            sink = self._sinks.get(number)
            if sink is not None:  # else that front process counts as ended
                sink.keep(content["front"], [entry.encode() for entry in entries])

    def _forget_done(self) -> None:
        for number in [number for number, sink in self._sinks.items() if sink.done]:
            self._sinks.pop(number).counters.close_fd()

    def _file(self, path: str) -> TraceFile:
        return self._files.setdefault(path, TraceFile(path))

    # --- in other front processes

    def apply(self, content: Content, fds: list[int]) -> None:
        """Take over settings and begin the scopes that are new; what belongs to others goes to the owner."""
        opened = [ScopeCounters(self._fronts, self._state.front, fd) for fd in fds]
        for counters in opened:
            counters.close_fd()
        if "ids" in content:
            (self._ids,) = opened
            return
        self._outbox.send_now()
        self._changes = content["changes"]
        for (model, number), counters in zip(content["scopes"], opened, strict=True):
            put = partial(self._outbox.put, number)
            self._scopes[model] = TraceScope(self.show(model), counters, put)
        for model in self._scopes.keys() - self._changes.keys():
            del self._scopes[model]
        self._look()

    def hand_over(self) -> None:
        """This front process ends: give the owner what it has not got yet."""
        self._outbox.send_now()

    # --- in all

    def _look(self) -> None:
        self.on = any(scope.on for scope in self._scopes.values())

    def sample(self, model: str) -> RequestTrace | None:
        """A trace for the request that comes now, None for most."""
        scope = self._scopes.get(model) or self._scopes.get("")
        if scope is None or self._ids is None:
            return None
        wanted = scope.wants()
        if not scope.on:  # there was a last one
            self._look()
        return RequestTrace(self._ids.taken.take() + 1, scope, self._engine) if wanted else None

    @contextmanager
    def one(self, model: str) -> Iterator[RequestTrace | None]:
        """The trace of one request, ended with it."""
        traced = self.sample(model) if self.on else None
        try:
            yield traced
        finally:
            if traced is not None:
                traced.end()
