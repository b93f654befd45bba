"""gRPC over the server's own HTTP/2."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fastserve.config import GrpcOptions, Limits
from fastserve.wire.grpc.calls import Calls
from fastserve.wire.grpc.method import Method, Terms
from fastserve.wire.http2.lifetime import Lifetimes
from fastserve.wire.listener import HttpListener
from fastserve.wire.tls import Credentials

ANY = 1 << 62
NEVER_S = 1e12


class NativeTransport:
    """One port, that of a listener which speaks nothing else."""

    def __init__(
        self,
        place: tuple[str, int],
        methods: Sequence[Method],
        options: GrpcOptions,
        terms: Terms,
        reuse_port: bool,
        tls: Credentials | None = None,
    ) -> None:
        self._calls = Calls({method.path: method for method in methods}, terms, options.concurrent_calls)
        limits = grpc_limits(terms.limits, options)
        self._listener = HttpListener(
            *place,
            [],
            limits,
            reuse_port=reuse_port,
            services=[self._calls],
            only_http2=True,
            lifetimes=lifetimes(options),
            tls=tls,
        )

    async def open(self) -> tuple[str, int]:
        await self._listener.open()
        return self._listener.address

    async def drain(self, grace_s: float) -> None:
        await self._listener.drain(grace_s)
        self._calls.deadlines.close()

    async def close(self) -> None:
        await self._listener.close()
        self._calls.deadlines.close()


class GuestTransport:
    """A port that plain HTTP is served on too: its listener opens and drains it, by limits of its own."""

    def __init__(
        self, host: HttpListener, methods: Sequence[Method], options: GrpcOptions, terms: Terms
    ) -> None:
        self._host = host
        calls = Calls({method.path: method for method in methods}, terms, options.concurrent_calls)
        host.http2.add(calls)
        host.on_closed.append(calls.deadlines.close)

    async def open(self) -> tuple[str, int]:
        return self._host.address

    async def drain(self, grace_s: float) -> None:
        """The host's part."""

    async def close(self) -> None:
        """The host's part."""


def grpc_limits(limits: Limits, options: GrpcOptions) -> Limits:
    """What the options say of connections. Bodies have no limit of their own: their messages do."""
    return msgspec.structs.replace(
        limits,
        header_bytes=options.metadata_bytes,
        header_count=ANY,
        body_bytes=ANY,
        streams=options.concurrent_streams,
        connections=options.connections,
        idle_timeout_s=options.max_connection_idle_s or NEVER_S,
    )


def lifetimes(options: GrpcOptions) -> Lifetimes:
    """What the options say of how long connections live."""
    return Lifetimes(
        options.keepalive_s,
        options.keepalive_timeout_s,
        options.max_connection_age_s,
        options.max_connection_age_grace_s,
    )
