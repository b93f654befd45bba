"""gRPC over grpcio's asyncio server, behind a face of bytes: path -> read, run, write.

Import this module only when a gRPC listener is configured: grpcio costs about 20 MB. Dialects hand in
`Method`s and never see grpcio, so that the transport beneath can be another one later. Health
(grpc.health.v1) and reflection are served from the start.

    Method("/pkg.Service/Call", read=parse, run=answer, write=serialize)
    async def answer(request, rpc): ...        # ServeError becomes the status of its kind
"""

from __future__ import annotations

import logging
import sys
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NoReturn

import grpc
import grpc.aio

from fastserve.config import GrpcOptions
from fastserve.errors import Kind, ServeError
from fastserve.tracing import choose_request_id
from fastserve.wire.apart import APART_BYTES, Apart
from fastserve.wire.grpc_health import Health
from fastserve.wire.grpc_pause import Pause
from fastserve.wire.grpc_reflection import reflection_handlers
from fastserve.wire.opening import Opening
from fastserve.wire.scope import FROM_A_PAGE, Scope

log = logging.getLogger(__name__)
# path, name of the status, bytes of the answer, when the call came (time.monotonic_ns), request id
AccessLog = Callable[[str, str, int, int, str], None]
_CODES = {kind: code for code in grpc.StatusCode for kind in Kind if code.value[0] == kind.value}
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
DETAIL_BYTES = 6000  # of an error's text
HANDSHAKE_MS = 10_000  # until a new connection has said that it speaks HTTP/2
# Calls that grpcio has received and not handed over yet. Beyond 1000 of all connections together it would
# cancel new ones at random, whosever they are: a client that opened streams and sent nothing ended the calls
# of others. What bounds them is connections times concurrent_streams.
PENDING_CALLS = 1 << 30


class Rpc:
    """What a method may know of its call besides the message."""

    __slots__ = ("_context", "_request_id", "received_ns", "sent_bytes")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.received_ns = monotonic_ns()
        self.sent_bytes = 0  # of the answer's messages

    @property
    def request_id(self) -> str:
        """The client's x-request-id when it is short and plain, else its trace id, else one made here."""
        try:
            return self._request_id
        except AttributeError:
            sent = dict(self.metadata)
            given, trace = (_as_bytes(sent.get(name, b"")) for name in ("x-request-id", "traceparent"))
            self._request_id: str = choose_request_id(given, trace)
            return self._request_id

    @property
    def status(self) -> str:
        """The name of the status the call has ended with."""
        code = self._context.code()
        name: str = _NAMES[code.value[0] if isinstance(code, grpc.StatusCode) else code or 0]
        return name

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What the client sent beside the message; names in lower case."""
        return tuple((key, value) for key, value in self._context.invocation_metadata() or ())

    def seconds_left(self) -> float | None:
        """Until the client's deadline; None without one."""
        left: float | None = self._context.time_remaining()
        return left

    def set_trailing(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Metadata sent after the reply."""
        self._context.set_trailing_metadata(tuple(metadata))


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC over bytes. `run` is a coroutine function of (request, rpc), or with `gives_stream` an
    async generator function; with `takes_stream` its request is an async iterator of what `read` gives.
    A client that leaves cancels `run`. One in the scope ADMIN is refused to what says that it comes from
    a web page, as a proxy of gRPC-Web does."""

    path: str
    read: Callable[[bytes], Any]
    run: Callable[[Any, Rpc], Any]
    write: Callable[[Any], bytes]
    takes_stream: bool = False
    gives_stream: bool = False
    scope: Scope | None = None

    @property
    def service(self) -> str:
        return self.path.rpartition("/")[0].lstrip("/")


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


@dataclass(frozen=True, slots=True)
class Terms:
    """What one listener holds all its methods to."""

    most_bytes: int  # of a reply
    access_log: AccessLog | None
    opening: Opening
    pause: Pause = field(default_factory=Pause)
    apart: Apart = field(default_factory=Apart)


class GrpcListener:
    """One port of gRPC. `descriptors` are serialized FileDescriptorSets that reflection shows."""

    def __init__(
        self,
        address: str,
        port: int,
        methods: Sequence[Method],
        options: GrpcOptions,
        *,
        descriptors: Sequence[bytes] = (),
        reuse_port: bool = False,
        nameless_health: bool = False,
        access_log: AccessLog | None = None,
        opening: Opening | None = None,
    ) -> None:
        self._place = (address, port)
        self._options = options
        self._descriptors = descriptors
        self._reuse_port = reuse_port
        self._health = Health(nameless=nameless_health)
        self._methods = (*methods, *_health_methods(self._health))
        self._terms = Terms(options.message_bytes, access_log, opening or Opening())
        self._server: grpc.aio.Server | None = None

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        handlers = [_MethodTable(self._methods, self._terms)]
        if self._options.reflection:
            services = sorted({method.service for method in self._methods})
            handlers += reflection_handlers(services, self._descriptors)
        server = grpc.aio.server(
            handlers=[*handlers, _NoSuchMethod()],
            options=self._channel_options(),
            maximum_concurrent_rpcs=self._options.concurrent_calls or None,
        )
        host, port = self._place
        shown = f"[{host or '::'}]" if not host or ":" in host else host
        try:
            bound = server.add_insecure_port(f"{shown}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen for gRPC on {shown}:{port}") from error
        await server.start()
        self._place = (host, bound)
        self._server = server

    def _channel_options(self) -> list[tuple[str, int]]:
        options = self._options
        return [
            ("grpc.so_reuseport", int(self._reuse_port)),
            ("grpc.max_receive_message_length", options.message_bytes),
            ("grpc.max_send_message_length", options.message_bytes),
            ("grpc.max_concurrent_streams", options.concurrent_streams),
            ("grpc.max_allowed_incoming_connections", options.connections),
            # The first is where grpcio begins to refuse at random; twice as much is refused in any case.
            ("grpc.max_metadata_size", options.metadata_bytes),
            ("grpc.absolute_max_metadata_size", options.metadata_bytes),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.server.max_pending_requests", PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
            ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
        ]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        return self._place

    def set_health(self, service: str, serving: bool) -> None:
        """What grpc.health.v1 says of a service; "" is the whole server, not serving until told."""
        self._health.set(service, serving)

    async def drain(self, grace_s: float) -> None:
        """Say "not serving" and GOAWAY, stop accepting, let calls in flight finish for `grace_s` seconds."""
        self._health.close()
        await self._terms.pause.stop(self._stop(grace_s), settle=grace_s > 0)

    async def close(self) -> None:
        """Stop at once; calls in flight are cancelled."""
        self._health.close()
        await self._stop(None)

    async def _stop(self, grace_s: float | None) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)


class _NoSuchMethod(grpc.GenericRpcHandler):  # type: ignore[misc]
    """UNIMPLEMENTED without words, as servers on gRPC's C++ library say it; grpcio would add some."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    @staticmethod
    async def _refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")


class _MethodTable(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks a path up."""

    def __init__(self, methods: Sequence[Method], terms: Terms) -> None:
        self._handlers = {method.path: _make_handler(method, terms) for method in methods}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handlers.get(handler_call_details.method)


def _make_handler(method: Method, terms: Terms) -> grpc.RpcMethodHandler[Any, Any]:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    behaviour = (_answer_stream if method.gives_stream else _answer_one)(method, terms)
    return kinds[method.takes_stream, method.gives_stream](behaviour)


def _answer_one(method: Method, terms: Terms) -> Callable[..., Awaitable[bytes]]:
    """What seldom has to be done stands behind a test: as calls and coroutines it cost a tiny call 3 %."""
    most_bytes, access_log = terms.most_bytes, terms.access_log
    pause, apart, opening = terms.pause, terms.apart, terms.opening
    admin, streamed = method.scope is Scope.ADMIN, method.takes_stream

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        rpc = Rpc(context)
        pause.begun += 1
        try:
            if admin or not opening.done:
                _check_call(method, opening, rpc)
            if streamed or len(request) >= APART_BYTES:
                read = await _read(method, apart, request)
            else:
                read = method.read(request)
            reply = method.write(await method.run(read, rpc))
            rpc.sent_bytes = len(reply)
            if pause.holds:
                await pause.wait()
            return reply if len(reply) <= most_bytes else _refuse_reply(len(reply), most_bytes)
        except Exception as error:
            await pause.wait()
            return await _abort(context, method, rpc, error)
        finally:
            if access_log is not None:
                _log_access(access_log, method, rpc)

    return answer


def _answer_stream(method: Method, terms: Terms) -> Callable[..., AsyncIterator[bytes]]:
    most_bytes, access_log = terms.most_bytes, terms.access_log
    pause, apart = terms.pause, terms.apart

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        rpc = Rpc(context)
        pause.begun += 1
        try:
            _check_call(method, terms.opening, rpc)
            read = await _read(method, apart, request)
            async for piece in method.run(read, rpc):
                reply = method.write(piece)
                rpc.sent_bytes += len(reply)
                yield reply if len(reply) <= most_bytes else _refuse_reply(len(reply), most_bytes)
            await pause.wait()
        except Exception as error:
            await pause.wait()
            await _abort(context, method, rpc, error)
        finally:
            if access_log is not None:
                _log_access(access_log, method, rpc)

    return answer


def _log_access(access_log: AccessLog, method: Method, rpc: Rpc) -> None:
    """In the `finally` of a call: what is on its way out says whether the client has left."""
    left = isinstance(sys.exc_info()[1], CancelledError | GeneratorExit)
    status = grpc.StatusCode.CANCELLED.name if left else rpc.status
    access_log(method.path, status, rpc.sent_bytes, rpc.received_ns, rpc.request_id)


def _check_call(method: Method, opening: Opening, rpc: Rpc) -> None:
    """Whether this call may be answered, and yet. Raises ServeError."""
    if method.scope is Scope.ADMIN and any(name == "origin" for name, _ in rpc.metadata):
        raise ServeError(Kind.PERMISSION_DENIED, FROM_A_PAGE)
    opening.check(method.scope)


def _refuse_reply(size: int, most_bytes: int) -> NoReturn:
    """grpcio would end the call with less to go by."""
    text = f"the reply has {size} bytes, grpc_options.message_bytes allows {most_bytes}"
    raise ServeError(Kind.RESOURCE_EXHAUSTED, text)


async def _read(method: Method, apart: Apart, request: Any) -> Any:
    if method.takes_stream:
        return _read_all(method, apart, request)
    return await apart(len(request), method.read, request)


async def _read_all(method: Method, apart: Apart, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for request in requests:
        yield await apart(len(request), method.read, request)


def _shorten(text: str) -> str:
    """What clients will take: a trailer has 8 KiB, and what is not ASCII takes three bytes for one there."""
    if len(text) <= DETAIL_BYTES and text.isascii():
        return text
    raw = text.encode("utf-8", "replace")
    most = DETAIL_BYTES if text.isascii() else DETAIL_BYTES // 3
    return text if len(raw) <= most else raw[:most].decode("utf-8", "ignore") + "..."


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], method: Method, rpc: Rpc, error: Exception
) -> bytes:
    """End the call with the status of `error`; what is not a ServeError tells the client nothing."""
    if not isinstance(error, ServeError):
        more = {"request_id": rpc.request_id}
        log.error("%s: the method failed", method.path, exc_info=error, extra=more)
    elif error.kind is Kind.INTERNAL:
        _log_failure(method, rpc, error)
    # grpcio keeps what abort() raises, and with it this error, in a circle; its frames hold tensors.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if isinstance(error, ServeError):
        if error.retry_after_s is not None:
            pushback = ("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000)))
            context.set_trailing_metadata((pushback,))
        await context.abort(_CODES[error.kind], _shorten(error.message))
    await context.abort(grpc.StatusCode.INTERNAL, "Internal error")
    raise AssertionError("abort always raises")


def _log_failure(method: Method, rpc: Rpc, error: ServeError) -> None:
    """What a call failed of, under its id: the worker that knows more has no ids."""
    more = {"request_id": rpc.request_id}
    log.warning("%s was answered INTERNAL: %s", method.path, error.message, extra=more)


def _health_methods(health: Health) -> list[Method]:
    prefix = "/grpc.health.v1.Health/"

    async def check(service: str, rpc: Rpc) -> int:
        return health.check(service)

    def watch(service: str, rpc: Rpc) -> AsyncIterator[int]:
        return health.watch(service)

    return [
        Method(prefix + "Check", health.read, check, health.write, scope=Scope.HEALTH),
        Method(prefix + "Watch", health.read, watch, health.write, gives_stream=True, scope=Scope.HEALTH),
    ]
