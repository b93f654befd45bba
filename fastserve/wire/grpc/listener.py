"""One port of gRPC, whatever carries it: the dialects' methods, and health and reflection of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from fastserve.config import GrpcOptions, Limits
from fastserve.wire.grpc.health import Health
from fastserve.wire.grpc.method import AccessLog, Method, Rpc, Terms
from fastserve.wire.grpc.reflection import reflection_methods
from fastserve.wire.opening import Opening
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire.listener import HttpListener
    from fastserve.wire.tls import Credentials


class Transport(Protocol):
    """A socket, and who answers on it."""

    async def open(self) -> tuple[str, int]:
        """Listen; where. Raises OSError when the address cannot be had."""

    async def drain(self, grace_s: float) -> None:
        """GOAWAY, stop accepting, let calls in flight finish for so long."""

    async def close(self) -> None:
        """Stop at once; calls in flight are cancelled."""


class GrpcListener:
    """One port. `descriptors` are serialized FileDescriptorSets that reflection shows. With `host` it is that
    listener's port: what is gRPC there is answered here, from before it is open until it is closed."""

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
        health_names: Sequence[str] = (),
        access_log: AccessLog | None = None,
        opening: Opening | None = None,
        limits: Limits | None = None,
        host: HttpListener | None = None,
        tls: Credentials | None = None,
    ) -> None:
        self._place = (address, port)
        self._options = options
        self._descriptors = descriptors
        self._reuse_port = reuse_port
        self._tls = tls
        self._health = Health(nameless=nameless_health)
        self._methods = (*methods, *_health_methods(self._health))
        # As grpc.health.v1 knows them.
        self.services = tuple(dict.fromkeys((*(method.service for method in methods), *health_names)))
        most = options.message_bytes
        limits = msgspec.structs.replace(limits or Limits(), inflated_bytes=most)
        self._terms = Terms(most, limits, access_log, opening or Opening())
        self._transport: Transport | None = None if host is None else self._make_guest(host)

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        transport = self._transport or self._make_transport()
        self._place = await transport.open()
        self._transport = transport

    def _all_methods(self) -> Sequence[Method]:
        if not self._options.reflection:
            return self._methods
        services = [method.service for method in self._methods]
        return (*self._methods, *reflection_methods(services, self._descriptors))

    def _make_guest(self, host: HttpListener) -> Transport:
        from fastserve.wire.grpc.native import GuestTransport

        return GuestTransport(host, self._all_methods(), self._options, self._terms)

    def _make_transport(self) -> Transport:
        given = self._place, self._all_methods(), self._options, self._terms, self._reuse_port, self._tls
        if self._options.transport == "native":
            from fastserve.wire.grpc.native import NativeTransport

            return NativeTransport(*given)
        from fastserve.wire.grpc.grpcio import GrpcioTransport

        return GrpcioTransport(*given)

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
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.drain(grace_s)

    async def close(self) -> None:
        """Stop at once; calls in flight are cancelled."""
        self._health.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()


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
