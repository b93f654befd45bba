"""gRPC over grpcio's asyncio server. Imported only where `grpc_options.transport` asks for it: it costs about
20 MB, and 200 us a call before any work.
"""

from __future__ import annotations

import sys
from asyncio import CancelledError, Future, get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import monotonic_ns
from typing import Any

import grpc
import grpc.aio

from fastserve.apart import APART_BYTES, Apart
from fastserve.config import GrpcOptions
from fastserve.errors import ConfigError, Kind
from fastserve.tracing import choose_request_id
from fastserve.wire.grpc.advice import advise
from fastserve.wire.grpc.awaited import Awaiting
from fastserve.wire.grpc.method import (
    STATUS_NAMES,
    AccessLog,
    Metadata,
    Method,
    Terms,
    check_call,
    shorten,
    tell_error,
    too_large,
)
from fastserve.wire.grpc.pause import Pause
from fastserve.wire.scope import Scope
from fastserve.wire.tls.credentials import Credentials, Pems

_CODES = {kind: code for code in grpc.StatusCode for kind in Kind if code.value[0] == kind.value}
HANDSHAKE_MS = 10_000  # until a new connection has said that it speaks HTTP/2
# Calls that grpcio has received and not handed over yet. Beyond 1000 of all connections together it would
# cancel new ones at random, whosever they are: a client that opened streams and sent nothing ended the calls
# of others. What bounds them is connections times concurrent_streams.
PENDING_CALLS = 1 << 30
# grpcio hands over one call a turn of the loop, so that batches under load would have one row each: a worker
# is woken for those of a few busy turns together.
PATIENCE_NS = 500_000


class GrpcioRpc:
    """Rpc of grpcio's calls."""

    patience_ns = PATIENCE_NS
    __slots__ = ("_context", "_request_id", "received_ns", "sent_bytes")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.received_ns = monotonic_ns()
        self.sent_bytes = 0  # of the answer's messages

    @property
    def request_id(self) -> str:
        try:
            return self._request_id
        except AttributeError:
            sent = dict(self.metadata)
            given, trace = (_as_bytes(sent.get(name, b"")) for name in ("x-request-id", "traceparent"))
            self._request_id: str = choose_request_id(given, trace)
            return self._request_id

    @property
    def client(self) -> str:
        """Who its certificate says the client is."""
        said = self._context.auth_context().get("x509_common_name") or [b""]
        return f"CN={said[0].decode('utf-8', 'replace')}" if said[0] else ""

    @property
    def status(self) -> str:
        """The name of the status the call has ended with."""
        code = self._context.code()
        return STATUS_NAMES[code.value[0] if isinstance(code, grpc.StatusCode) else code or 0]

    @property
    def metadata(self) -> Metadata:
        return tuple((key, value) for key, value in self._context.invocation_metadata() or ())

    def seconds_left(self) -> float | None:
        left: float | None = self._context.time_remaining()
        return left

    def set_trailing(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._context.set_trailing_metadata(tuple(metadata))

    def compress(self) -> None:
        self._context.set_compression(grpc.Compression.Gzip)


class GrpcioExchange(Awaiting, GrpcioRpc):
    """Exchange of grpcio's calls, whose handlers are coroutines."""

    __slots__ = ("_answer", "deadline_ns", "on_gone")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        super().__init__(context)
        left_s = self.seconds_left()
        self.deadline_ns = 0 if left_s is None else self.received_ns + int(left_s * 1e9)
        self.on_gone: Callable[[], object] | None = None
        self._answer: Future[bytes] = get_running_loop().create_future()


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class GrpcioTransport:
    """One port, by a server of grpcio's."""

    def __init__(
        self,
        place: tuple[str, int],
        methods: Sequence[Method],
        options: GrpcOptions,
        terms: Terms,
        reuse_port: bool,
        tls: Credentials | None = None,
    ) -> None:
        self._tls = tls
        self._place = place
        self._options = options
        self._reuse_port = reuse_port
        self._pause = Pause()
        self._methods = _MethodTable(methods, terms, self._pause)
        self._server: grpc.aio.Server | None = None

    async def open(self) -> tuple[str, int]:
        server = grpc.aio.server(
            handlers=[self._methods, _NoSuchMethod()],
            options=self._channel_options(),
            maximum_concurrent_rpcs=self._options.concurrent_calls or None,
        )
        host, port = self._place
        shown = f"[{host or '::'}]" if not host or ":" in host else host
        try:
            if self._tls is None:
                bound = server.add_insecure_port(f"{shown}:{port}")
            else:
                bound = server.add_secure_port(f"{shown}:{port}", server_credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"cannot listen for gRPC on {shown}:{port}") from error
        await server.start()
        self._server = server
        return host, bound

    def _channel_options(self) -> list[tuple[str, int]]:
        options = self._options
        lives = (
            ("max_connection_age", options.max_connection_age_s),
            ("max_connection_age_grace", options.max_connection_age_grace_s),
            ("max_connection_idle", options.max_connection_idle_s),
        )
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
            ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_s * 1000)),
            *((f"grpc.{name}_ms", int(seconds * 1000)) for name, seconds in lives if seconds),
        ]

    async def drain(self, grace_s: float) -> None:
        await self._pause.stop(self._stop(grace_s), settle=grace_s > 0)

    async def close(self) -> None:
        await self._stop(None)

    async def _stop(self, grace_s: float | None) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)


def server_credentials(tls: Credentials) -> grpc.ServerCredentials:
    """Those of the settings, in grpcio's form. It asks for news at every handshake, in a thread of its own.
    Raises ConfigError for a key that only OpenSSL could open."""
    if tls.pems.password:
        raise ConfigError("tls.key: given with a password, allowed: one without, for grpcio")
    known: list[Pems] = []

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pems = tls.pems
        if pems.password or known[:1] == [pems]:
            return None
        known[:] = [pems]
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.client_ca or None)

    return grpc.dynamic_ssl_server_credentials(fetch(), fetch, bool(tls.options.client_ca))


class _NoSuchMethod(grpc.GenericRpcHandler):  # type: ignore[misc]
    """UNIMPLEMENTED without words, as servers on gRPC's C++ library say it; grpcio would add some."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    @staticmethod
    async def _refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")


class _MethodTable(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks a path up."""

    def __init__(self, methods: Sequence[Method], terms: Terms, pause: Pause) -> None:
        self._handlers = {method.path: _make_handler(method, terms, pause) for method in methods}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handlers.get(handler_call_details.method)


def _make_handler(method: Method, terms: Terms, pause: Pause) -> grpc.RpcMethodHandler[Any, Any]:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    behaviour = (_answer_stream if method.gives_stream else _answer_one)(method, terms, pause)
    return kinds[method.takes_stream, method.gives_stream](behaviour)


def _answer_one(method: Method, terms: Terms, pause: Pause) -> Callable[..., Awaitable[bytes]]:
    """What seldom has to be done stands behind a test: as calls and coroutines it cost a tiny call 3 %."""
    most_bytes, access_log = terms.most_bytes, terms.access_log
    apart, opening = terms.apart, terms.opening
    admin, streamed, start = method.scope is Scope.ADMIN, method.takes_stream, method.start

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        exchange = None if start is None else GrpcioExchange(context)
        rpc = exchange or GrpcioRpc(context)
        pause.begun += 1
        try:
            if admin or not opening.done:
                check_call(method, opening, rpc)
            if start is not None and exchange is not None and start(request, exchange):
                reply = await exchange.answer()
            else:
                large = streamed or len(request) >= APART_BYTES
                read = await _read(method, apart, request) if large else method.read(request)
                reply = method.write(await method.run(read, rpc))
            rpc.sent_bytes = len(reply)
            if pause.holds:
                await pause.wait()
            if len(reply) > most_bytes:
                raise too_large(len(reply), most_bytes)
            return reply
        except Exception as error:
            await pause.wait()
            return await _abort(context, method, rpc, error)
        finally:
            if access_log is not None:
                _log_access(access_log, method, rpc)

    return answer


def _answer_stream(method: Method, terms: Terms, pause: Pause) -> Callable[..., AsyncIterator[bytes]]:
    most_bytes, access_log = terms.most_bytes, terms.access_log
    apart = terms.apart

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        rpc = GrpcioRpc(context)
        pause.begun += 1
        try:
            check_call(method, terms.opening, rpc)
            read = await _read(method, apart, request)
            async for piece in method.run(read, rpc):
                reply = method.write(piece)
                rpc.sent_bytes += len(reply)
                if len(reply) > most_bytes:
                    raise too_large(len(reply), most_bytes)
                yield reply
            await pause.wait()
        except Exception as error:
            await pause.wait()
            await _abort(context, method, rpc, error)
        finally:
            if access_log is not None:
                _log_access(access_log, method, rpc)

    return answer


def _log_access(access_log: AccessLog, method: Method, rpc: GrpcioRpc) -> None:
    """In the `finally` of a call: what is on its way out says whether the client has left."""
    left = isinstance(sys.exc_info()[1], CancelledError | GeneratorExit)
    status = Kind.CANCELLED.name if left else rpc.status
    access_log(method.path, status, rpc.sent_bytes, rpc.received_ns, rpc.request_id, rpc.client)


async def _read(method: Method, apart: Apart, request: Any) -> Any:
    if method.takes_stream:
        return _read_all(method, apart, request)
    return await apart(len(request), method.read, request)


async def _read_all(method: Method, apart: Apart, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for request in requests:
        yield await apart(len(request), method.read, request)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], method: Method, rpc: GrpcioRpc, error: Exception
) -> bytes:
    """End the call with the status of `error`; what is not a ServeError tells the client nothing."""
    told = tell_error(method, rpc, error)
    # grpcio keeps what abort() raises, and with it this error, in a circle; its frames hold tensors.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    text = shorten(told.message)
    if told.retry_after_s is not None:
        context.set_trailing_metadata(advise(told, text))
    await context.abort(_CODES[told.kind], text)
    raise AssertionError("abort always raises")
