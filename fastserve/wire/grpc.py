"""gRPC over grpcio's asyncio server, behind a face of bytes: path -> read, run, write.

Import this module only when a gRPC listener is configured: grpcio costs about 20 MB. Dialects hand in
`Method`s and never see grpcio, so that the transport beneath can be another one later. Health
(grpc.health.v1) and reflection are served from the start.

    Method("/pkg.Service/Call", read=parse, run=answer, write=serialize)
    async def answer(request, rpc): ...        # ServeError becomes the status of its kind
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from fastserve.config import GrpcOptions
from fastserve.errors import Kind, ServeError
from fastserve.wire.grpc_health import Health
from fastserve.wire.grpc_reflection import reflection_handlers

log = logging.getLogger(__name__)
_CODES = {kind: code for code in grpc.StatusCode for kind in Kind if code.value[0] == kind.value}


class Rpc:
    """What a method may know of its call besides the message."""

    __slots__ = ("_context",)

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

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
    A client that leaves cancels `run`."""

    path: str
    read: Callable[[bytes], Any]
    run: Callable[[Any, Rpc], Any]
    write: Callable[[Any], bytes]
    takes_stream: bool = False
    gives_stream: bool = False

    @property
    def service(self) -> str:
        return self.path.rpartition("/")[0].lstrip("/")


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
    ) -> None:
        self._place = (address, port)
        self._options = options
        self._descriptors = descriptors
        self._reuse_port = reuse_port
        self._health = Health(nameless=nameless_health)
        self._methods = (*methods, *_health_methods(self._health))
        self._server: grpc.aio.Server | None = None

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        handlers = [_MethodTable(self._methods, self._options.message_bytes)]
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
        """Say "not serving", stop accepting, let calls in flight finish for `grace_s` seconds."""
        self._health.close()
        await self._stop(grace_s)

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

    def __init__(self, methods: Sequence[Method], most_bytes: int) -> None:
        self._handlers = {method.path: _make_handler(method, most_bytes) for method in methods}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handlers.get(handler_call_details.method)


def _make_handler(method: Method, most_bytes: int) -> grpc.RpcMethodHandler[Any, Any]:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    behaviour = (_answer_stream if method.gives_stream else _answer_one)(method, most_bytes)
    return kinds[method.takes_stream, method.gives_stream](behaviour)


def _answer_one(method: Method, most_bytes: int) -> Callable[..., Awaitable[bytes]]:
    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            read = _read_all(method, request) if method.takes_stream else method.read(request)
            reply = method.write(await method.run(read, Rpc(context)))
            return reply if len(reply) <= most_bytes else _refuse_reply(len(reply), most_bytes)
        except Exception as error:
            return await _abort(context, method, error)

    return answer


def _answer_stream(method: Method, most_bytes: int) -> Callable[..., AsyncIterator[bytes]]:
    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        try:
            read = _read_all(method, request) if method.takes_stream else method.read(request)
            async for piece in method.run(read, Rpc(context)):
                reply = method.write(piece)
                yield reply if len(reply) <= most_bytes else _refuse_reply(len(reply), most_bytes)
        except Exception as error:
            await _abort(context, method, error)

    return answer


def _refuse_reply(size: int, most_bytes: int) -> NoReturn:
    """grpcio would end the call with less to go by."""
    text = f"the reply has {size} bytes, grpc_options.message_bytes allows {most_bytes}"
    raise ServeError(Kind.RESOURCE_EXHAUSTED, text)


async def _read_all(method: Method, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for request in requests:
        yield method.read(request)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], method: Method, error: Exception) -> bytes:
    """End the call with the status of `error`; what is not a ServeError tells the client nothing."""
    if not isinstance(error, ServeError):
        log.error("%s: the method failed", method.path, exc_info=error)
    # grpcio keeps what abort() raises, and with it this error, in a circle; its frames hold tensors.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if isinstance(error, ServeError):
        if error.retry_after_s is not None:
            pushback = ("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000)))
            context.set_trailing_metadata((pushback,))
        await context.abort(_CODES[error.kind], error.message)
    await context.abort(grpc.StatusCode.INTERNAL, "Internal error")
    raise AssertionError("abort always raises")


def _health_methods(health: Health) -> list[Method]:
    prefix = "/grpc.health.v1.Health/"

    async def check(service: str, rpc: Rpc) -> int:
        return health.check(service)

    def watch(service: str, rpc: Rpc) -> AsyncIterator[int]:
        return health.watch(service)

    return [
        Method(prefix + "Check", health.read, check, health.write),
        Method(prefix + "Watch", health.read, watch, health.write, gives_stream=True),
    ]
