"""The API of an app: POST /NAME with JSON, for every model that a script declares.

    POST /greet   {"name": "Ann"}                 200  what the function returned, as JSON
    POST /scale   {"x": [1, 2, 3, 4]}             200  [3.0, 6.0, 9.0, 12.0]: a row without the axis of rows
    POST /scale   {"x": [[1, 2, 3, 4], ...]}      200  [[3.0, ...], ...]
    POST /write   {"prompt": "Once"}              200  server-sent events, or a line of JSON for each part

Free bodies go to the worker as they came and are read there. Arrays are read by `array_calls`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve.app.array_calls import ArrayFastPath, ArrayReader, write_arrays
from fastserve.app.script_operations import KINDS, describe_model, paths_of
from fastserve.errors import Kind, ServeError, internal, invalid
from fastserve.net.access_control import Scope
from fastserve.net.compression import inflate, inflate_offloaded
from fastserve.net.limits import error_body
from fastserve.net.request import Call
from fastserve.net.router import CANONICAL_STATUS, Route, Yields, fault_headers
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import Dialect, DialectService, DialectSpec, HttpRoute, ServingContext
from fastserve.serving.fast_path import PathCache, PerVersion
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.serving.streams import Event, generate
from fastserve.tensor import DTYPES, Tensor

BODY = "body"
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
LINES = b"application/jsonl"
ROUTE = HttpRoute("call", "/NAME", {"POST": Scope.INFER})


class AppOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths that are known before the models are loaded: path -> NAME, or NAME/VERSION."""

    paths: dict[str, str] = {}


class AppJson(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: AppOptions) -> None:
        self.service = DialectService(context, SPEC.name)
        self.readers = PerVersion(self.service.keepers, ArrayReader)
        self._paths = dict(options.paths)

    def route(self, method: str, target: str) -> Route | None:
        """Return the route of a path that a model has; None for any other."""
        found = self._find(target.partition("?")[0])
        if found is None:
            return None
        if method != "POST":
            return Route(self._refuse_verb, Scope.METADATA, Yields.FIRST)
        return Route(AppEndpoint(self, found), ROUTE.scopes[method])

    def refuse(self, call: Call, fault: ServeError) -> None:
        fault = call.cause_of(fault)
        call.reply(CANONICAL_STATUS[fault.kind], error_body(fault.message), JSON, fault_headers(fault))

    def _refuse_verb(self, call: Call) -> None:
        call.reply(405, error_body(f"{call.method} is not allowed here: POST"), JSON, ((b"Allow", b"POST"),))

    def _find(self, path: str) -> str | None:
        """Return NAME, or NAME/VERSION, of a path."""
        for model in self.service.engine.catalog.models.values():  # its path tells the model, allowed or not
            if model.latest is None or model.latest.config.backend not in KINDS:
                continue
            script = model.latest.config.parameters.get("script", {})
            numbered = {int(number): own for number, own in script.get("paths", {}).items()}
            for own, found in paths_of(numbered, model.name):
                if own == path:
                    return found
        return self._paths.get(path)


class AppEndpoint:
    """The endpoint of one path."""

    __slots__ = ("_dialect", "_fast", "_model", "_number", "service")

    def __init__(self, dialect: AppJson, found: str) -> None:
        self._dialect, self.service = dialect, dialect.service
        self._model, _, number = found.partition("/")
        self._number = int(number) if number else None
        self._fast: PathCache[ArrayFastPath] = PathCache(self.service.keepers, self._open)

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        version = self.service.catalog.available(self._model, self._number)
        fast = self._fast.path
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
        if fast is not None and fast.start(call):
            return None
        return self._answer(call, version)

    def _open(self, version: Version) -> ArrayFastPath | None:
        """Return the fast path of a version; None for one without."""
        return ArrayFastPath.open(self.service, version, self.refused)

    def _answer(self, call: Call, version: Version | None) -> Coroutine[Any, Any, None]:
        if version is None or version.config.backend == "script_json":
            return answer_slowly(call, BodyCall(self, call))
        if version.config.backend == "script_stream":
            return self._stream(call, version)
        return answer_slowly(call, ArrayCall(self, call, self._dialect.readers.of(version)))

    def find(self) -> Version:
        """Return the version that answers. Raises ServeError."""
        version = self.service.catalog.available(self._model, self._number)
        if version is not None:
            return version
        self.service.catalog.explain_absence(self._model)
        if self._model in self.service.catalog.models:
            raise ServeError(Kind.UNAVAILABLE, f"model {self._model!r} is not available now")
        raise ServeError(Kind.NOT_FOUND, f"there is no model {self._model!r}")

    def refused(self, call: Call, fault: ServeError) -> None:
        """Answer with an error, and count it."""
        self.service.traffic.refused(self._model, fault.kind.name, message=fault.message, exchange=call)
        self._dialect.refuse(call, fault)

    async def read_body(self, call: Call) -> bytes | bytearray:
        """Return the body, inflated. Raises ServeError."""
        coding = call.header(b"content-encoding").strip().lower()
        if coding in (b"", b"identity"):
            return call.body
        if coding not in (b"gzip", b"deflate"):
            raise invalid("content-encoding: allowed: gzip, deflate")
        limits = self.service.limits
        return await inflate_offloaded(
            call.claim, self.service.offload, len(call.body), limits, inflate, call.body, limits
        )

    async def make_request(self, call: Call, *, stream: bool = False) -> InferRequest:
        """Return the request of a free body. Raises ServeError."""
        body = await self.read_body(call)
        packed = await self.service.offload(len(body), pack_bytes, [bytes(body)])
        parameters: dict[str, Any] = {"stream": True} if stream else {}
        kind = call.header(b"content-type")
        if kind and not kind.startswith(JSON):
            parameters["content_type"] = kind.decode("latin-1")
        body_tensor = {BODY: Tensor(DTYPES["bytes"], (1,), packed)}
        return InferRequest(
            body_tensor, deadline_ns=call.deadline_ns, request_id=call.request_id, parameters=parameters
        )

    async def _stream(self, call: Call, version: Version) -> None:
        """Answer part by part: as events where the client takes events, else as lines of JSON."""
        events = b"text/event-stream" in call.header(b"accept")
        service, stream, fault = self.service, None, None
        try:
            request = await self.make_request(call, stream=True)

            def start() -> AsyncGenerator[InferResponse, None]:
                return service.engine.stream(version, request)

            alone = b""
            kind = EVENTS if events else LINES
            async with aclosing(generate(start, write_part, service.offload)) as parts:
                async for part in parts:
                    if part.fault is not None:
                        fault = part.fault
                        break
                    if stream is None and part.final:
                        alone = part.text
                        continue
                    stream = stream or call.stream(200, kind)
                    await stream.write(_framed(part, events))
            if fault is None:
                if stream is None and alone:
                    call.reply(200, *split_part(alone))
                else:
                    await (stream or call.stream(200, kind)).close()
                service.traffic.answered(version.model, version.number, call.received_ns)
                return
        except ServeError as found:
            fault = found
        if stream is None:
            self.refused(call, fault)
            return
        service.traffic.refused(version.model, fault.kind.name, message=fault.message, exchange=call)
        said = error_body(fault.message)
        await stream.write(b"event: error\ndata: %b\n\n" % said if events else said + b"\n")
        await stream.close()


def write_part(response: InferResponse) -> bytes:
    """Return a part as its media type, a line feed, and its bytes. Raises ServeError."""
    content, kind = read_body_of(response)
    return kind + b"\n" + content


def split_part(text: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of a part, and their media type."""
    kind, _, content = text.partition(b"\n")
    return content, kind


def _framed(part: Event, events: bool) -> bytes:
    content, _ = split_part(part.text)
    if not events:
        return content + b"\n"
    return b"data: " + content.replace(b"\n", b"\ndata: ") + b"\n\n"


def read_body_of(response: InferResponse) -> tuple[bytes, bytes]:
    """Return the bytes that a function answered with, and their media type. Raises ServeError."""
    tensor = response.outputs.get(BODY)
    if tensor is None:
        raise internal("the model gave no answer")
    try:
        content: bytes = unpack_bytes(tensor.data, 1)[0]
    except ValueError:
        raise internal("the model's answer cannot be read") from None
    kind = str(response.parameters.get("content_type", "application/json"))
    if not kind.isascii() or not kind.isprintable():
        raise internal("the model's answer has a media type that HTTP has not")
    return content, kind.encode()


class BodyCall(SlowRequest):
    """One call of a function of JSON."""

    def __init__(self, endpoint: AppEndpoint, call: Call) -> None:
        self._endpoint, self._call, self.service = endpoint, call, endpoint.service

    async def read(self) -> InferRequest:
        self.version = self._endpoint.find()
        return await self._endpoint.make_request(self._call)

    async def write(self, response: InferResponse) -> None:
        content, kind = await self.service.offload(response.nbytes, read_body_of, response)
        self._call.reply(200, content, kind)

    def refused(self, fault: ServeError) -> None:
        self._endpoint.refused(self._call, fault)


class ArrayCall(SlowRequest):
    """One call of a function of arrays."""

    _single = False

    def __init__(self, endpoint: AppEndpoint, call: Call, reader: ArrayReader) -> None:
        self._endpoint, self._call, self.service = endpoint, call, endpoint.service
        self._reader = reader

    async def read(self) -> InferRequest:
        self.version = self._endpoint.find()
        body = await self._endpoint.read_body(self._call)
        tensors, self._single = await self.service.offload(len(body), self._reader.read, body)
        call = self._call
        return InferRequest(tensors, deadline_ns=call.deadline_ns, request_id=call.request_id)

    async def write(self, response: InferResponse) -> None:
        write = partial(write_arrays, response, list(self.version.outputs), single=self._single)
        self._call.reply(200, await self.service.offload(response.nbytes, write), JSON)

    def refused(self, fault: ServeError) -> None:
        self._endpoint.refused(self._call, fault)


SPEC = DialectSpec(
    name="app", options=AppOptions, build=AppJson, routes=(ROUTE,), describe_model=describe_model
)
