"""Traces of single requests in Triton's JSON form, in the file of `--trace-config triton,file=F`.

    [{"id": 1, "model_name": "simple", "model_version": 1},
     {"id": 1, "timestamps": [{"name": "REQUEST_START", "ns": 2356425054785863}]}, ...]

Every `trace_rate`th request is traced, `trace_count` of them at most. With a `log_frequency` they go to F.0,
F.1, ..., that many in each, and so do the last ones of a `trace_count`; others go to F, whose list is closed
when the server stops. Times are nanoseconds of the monotonic clock. Files are written while nobody else is
served: tracing is for a look at some requests.

Which requests, by settings for all models and for single ones, and what is noted of their way through the
engine, is here; how settings are read, and what a transport stamps on its way in and out, is a dialect's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from math import prod
from typing import IO, Any

import msgspec

from fastserve._ext.infer_reply import UnwritableOutput, write_items
from fastserve.codec.json_text import to_bytes
from fastserve.engine import Engine
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import KSERVE_NAME, Tensor

log = logging.getLogger(__name__)

KEPT = 256  # traces that wait for the file to be written to
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
            log.error("traces are lost: %s", error.strerror)

    def write_numbered(self, entries: list[bytes]) -> None:
        """To a file of their own."""
        try:
            with open(f"{self.path}.{self._next}", "wb") as file:
                file.write(b"[%b]" % b",".join(entries))
        except OSError as error:
            log.error("traces are lost: %s", error.strerror)
        self._next += 1

    def close(self) -> None:
        """End the list in the file."""
        file, self._open = self._open, None
        if file is not None:
            file.write(b"]")
            file.close()


class TraceScope:
    """Settings that hold for some models, from one change to the next: which requests, and where they go.
    `on` while there may be more of them."""

    def __init__(self, settings: Mapping[str, Setting], file: TraceFile) -> None:
        self._levels = settings["trace_level"]
        self.on = self._levels != OFF and settings["trace_count"] != "0"
        self.stamps, self.tensors = "TIMESTAMPS" in self._levels, "TENSORS" in self._levels
        self._rate = int(str(settings["trace_rate"]))
        self._left = int(str(settings["trace_count"]))
        self._frequency = int(str(settings["log_frequency"]))
        self._file = file
        self._seen = self._running = 0
        self._kept: list[bytes] = []
        self._count = 0  # traces in _kept

    def wants(self) -> bool:
        """Whether the request that comes now is one of those traced."""
        self._seen += 1
        if not self.on or self._seen % self._rate:
            return False
        self._left -= self._left > 0
        self._running += 1
        self.on = self._left != 0
        return True

    def keep(self, entries: list[bytes]) -> None:
        """Take over a finished trace."""
        self._running -= 1
        self._kept += entries
        self._count += 1
        if (self._frequency and self._count >= self._frequency) or (self._left == 0 and not self._running):
            self._write_numbered()
        elif not self._frequency and self._count >= KEPT:
            self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        if self._kept and self._frequency:
            self._write_numbered()
        elif self._kept:
            self._file.append(self._kept)
            self._kept, self._count = [], 0

    def _write_numbered(self) -> None:
        self._file.write_numbered(self._kept)
        self._kept, self._count = [], 0


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


class Traces:
    """The traces of one front process. `on` while any request may have to be traced."""

    def __init__(self, engine: Engine, start: Mapping[str, Setting]) -> None:
        """`start`: the settings that the server began with, where they are not the defaults."""
        self.on = False
        self._engine = engine
        self._start: dict[str, Setting] = {**DEFAULTS, **start}
        self._changes: dict[str, dict[str, Setting]] = {"": {}}  # by model, "" for all
        self._files: dict[str, TraceFile] = {}
        self._scopes: dict[str, TraceScope] = {}
        self._last_id = 0
        self._begin([""])

    def show(self, model: str = "") -> dict[str, Setting]:
        """Return the settings of a model, "" for all others."""
        return {**self._start, **self._changes[""], **self._changes.get(model, {})}

    def change(
        self,
        changes: Mapping[str, Setting | None],
        model: str,
        check: Callable[[Mapping[str, Setting]], None],
    ) -> None:
        """Set these for a model, or for all by ""; None goes back to what holds for all. What would hold then
        is shown to `check`, and nothing changes if that raises."""
        given = {**self._changes.get(model, {}), **changes}
        own = {name: value for name, value in given.items() if value is not None}
        check({**self._start, **(self._changes[""] if model else {}), **own})
        if own or not model:
            self._changes[model] = own
        else:
            self._changes.pop(model, None)
        self._begin([model] if model else list(self._changes))  # all are under part of a change for all

    def _begin(self, models: Iterable[str]) -> None:
        """Begin the traces of these models anew."""
        for model in models:
            gone = self._scopes.pop(model, None)
            if gone is not None:
                gone.flush()
            if model in self._changes:
                settings = self.show(model)
                self._scopes[model] = TraceScope(settings, self._file(str(settings["trace_file"])))
        self._look()

    def _look(self) -> None:
        self.on = any(scope.on for scope in self._scopes.values())

    def sample(self, model: str) -> RequestTrace | None:
        """A trace for the request that comes now, None for most."""
        scope = self._scopes.get(model) or self._scopes.get("")
        if scope is None or not scope.wants():
            return None
        if not scope.on:  # that was its last
            self._look()
        self._last_id += 1
        return RequestTrace(self._last_id, scope, self._engine)

    @contextmanager
    def one(self, model: str) -> Iterator[RequestTrace | None]:
        """The trace of one request, ended with it."""
        traced = self.sample(model) if self.on else None
        try:
            yield traced
        finally:
            if traced is not None:
                traced.end()

    def close(self) -> None:
        """Write what is kept, and end the files."""
        for scope in self._scopes.values():
            scope.flush()
        for file in self._files.values():
            file.close()

    def _file(self, path: str) -> TraceFile:
        return self._files.setdefault(path, TraceFile(path))
