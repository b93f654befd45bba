"""gRPC channels of a client: one kind that blocks, one that awaits. grpcio is imported when one is opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastserve.client.v2 import SentRpc
from fastserve.errors import Kind, ServeError

# A channel of its own for each client, and tensors of any size.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@dataclass(frozen=True)
class RpcTarget:
    """Where calls go, and what each of them brings. `files`: paths of authorities, key and certificate."""

    address: str
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    secured: bool = False
    files: tuple[str, str, str] = ("", "", "")

    def open(self, module: Any) -> Any:
        """Return a channel of `grpc` or `grpc.aio`. Raises OSError for a file that cannot be read."""
        if not self.secured:
            return module.insecure_channel(self.address, options=OPTIONS)
        import grpc

        read = [Path(file).read_bytes() if file else None for file in self.files]
        return module.secure_channel(self.address, grpc.ssl_channel_credentials(*read), options=OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((name.lower(), value) for name, value in self.headers.items())


class RpcChannel:
    """A channel of callers who block; threads may share it."""

    def __init__(self, target: RpcTarget) -> None:
        import grpc

        self._target, self._fault = target, grpc.RpcError
        self._channel = target.open(grpc)

    def ask(self, request: SentRpc) -> Any:
        """Send a call and return its answer. Raises ServeError."""
        call = self._channel.unary_unary(request.method, _encode, request.answer.FromString)
        try:
            return call(request.message, timeout=self._target.timeout_s, metadata=self._target.metadata)
        except self._fault as fault:
            raise _error_of(fault) from None

    def parts(self, request: SentRpc) -> Iterator[Any]:
        """Send a call and yield the messages of its answer. Raises ServeError."""
        call = self._channel.stream_stream(request.method, _encode, request.answer.FromString)
        answers = call(iter((request.message,)), metadata=self._target.metadata)
        try:
            yield from answers
        except self._fault as fault:
            raise _error_of(fault) from None
        finally:
            answers.cancel()

    def close(self) -> None:
        self._channel.close()


class AsyncRpcChannel:
    """A channel of callers who await, on one event loop."""

    def __init__(self, target: RpcTarget) -> None:
        import grpc
        import grpc.aio

        self._target, self._fault = target, grpc.RpcError
        self._channel = target.open(grpc.aio)

    async def ask(self, request: SentRpc) -> Any:
        """Send a call and return its answer. Raises ServeError."""
        call = self._channel.unary_unary(request.method, _encode, request.answer.FromString)
        try:
            return await call(request.message, timeout=self._target.timeout_s, metadata=self._target.metadata)
        except self._fault as fault:
            raise _error_of(fault) from None

    async def parts(self, request: SentRpc) -> AsyncIterator[Any]:
        """Send a call and yield the messages of its answer. Raises ServeError."""
        call = self._channel.stream_stream(request.method, _encode, request.answer.FromString)
        answers = call(iter((request.message,)), metadata=self._target.metadata)
        try:
            async for one in answers:
                yield one
        except self._fault as fault:
            raise _error_of(fault) from None
        finally:
            answers.cancel()

    async def close(self) -> None:
        await self._channel.close()


def _encode(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _error_of(fault: Any) -> ServeError:
    """Return a failed call as the error of its status."""
    code = fault.code()
    kind = Kind(code.value[0]) if code.value[0] else Kind.UNKNOWN
    pushback = dict(fault.trailing_metadata() or ()).get("grpc-retry-pushback-ms", "")
    later_s = int(pushback) / 1000 if str(pushback).isdigit() else None
    return ServeError(kind, fault.details() or code.name, retry_after_s=later_s)
