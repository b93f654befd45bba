"""One port of gRPC: the dialects' RPCs, health and reflection, on a listener of its own or of plain HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from fastserve.net.accept_balance import AcceptBalancer
from fastserve.net.access_control import NO_RESTRICTIONS, Opening, Restrictions, Scope
from fastserve.net.api_keys import ApiKeyGate, Compartment
from fastserve.net.demand_endpoints import demand_method
from fastserve.net.grpc.calls import GrpcCalls, MethodsOf, SplitMethods
from fastserve.net.grpc.health import Health, reflection_methods
from fastserve.net.grpc.method import AccessLog, Method, Rpc, RpcTerms, guard_method
from fastserve.net.grpc.traced_methods import trace_method
from fastserve.net.http2.settings import Lifetimes
from fastserve.net.listener import HttpListener
from fastserve.net.sockets import InheritedSockets
from fastserve.net.tls import Credentials
from fastserve.net.traced_endpoints import Tracer
from fastserve.net.traffic_split import SplitRpc, TrafficSplit
from fastserve.settings import GrpcOptions, Limits
from fastserve.util.memory_budget import MemoryBudget
from fastserve.util.model_demand import Want

ANY = 1 << 62
NEVER_S = 1e12


class NativeTransport:
    """A port of its own, whose listener speaks HTTP/2 and gRPC alone."""

    def __init__(
        self,
        place: tuple[str, int],
        methods: Sequence[Method],
        options: GrpcOptions,
        terms: RpcTerms,
        balancer: AcceptBalancer | None,
        tls: Credentials | None = None,
        budget: MemoryBudget | None = None,
        passed_on: InheritedSockets | None = None,
        gate: ApiKeyGate | None = None,
        methods_of: MethodsOf | None = None,
        split: TrafficSplit | None = None,
        split_methods: SplitMethods | None = None,
    ) -> None:
        by_path = {method.path: method for method in methods}
        more = gate, methods_of, split, split_methods
        self._calls = GrpcCalls(by_path, terms, options.concurrent_calls, *more)
        limits = grpc_limits(terms.limits, options)
        self.listener = HttpListener(
            *place,
            [],
            limits,
            balancer=balancer,
            services=[self._calls],
            only_http2=True,
            lifetimes=lifetimes(options),
            tls=tls,
            budget=budget,
            passed_on=passed_on,
            gate=gate,
        )

    async def open(self) -> tuple[str, int]:
        await self.listener.open()
        return self.listener.address

    async def drain(self, grace_s: float) -> None:
        await self.listener.drain(grace_s)
        self._calls.close()

    async def close(self) -> None:
        await self.listener.close()
        self._calls.close()


class GuestTransport:
    """A port shared with plain HTTP: its listener opens and drains it, with limits of its own."""

    def __init__(
        self,
        host: HttpListener,
        methods: Sequence[Method],
        options: GrpcOptions,
        terms: RpcTerms,
        methods_of: MethodsOf | None = None,
        split: TrafficSplit | None = None,
        split_methods: SplitMethods | None = None,
    ) -> None:
        self._host = host
        by_path = {method.path: method for method in methods}
        more = host.gate, methods_of, split, split_methods
        calls = GrpcCalls(by_path, terms, options.concurrent_calls, *more)
        host.http2.add(calls)
        host.on_closed.append(calls.close)

    async def open(self) -> tuple[str, int]:
        return self._host.address

    async def drain(self, grace_s: float) -> None:
        """Do nothing: the host drains."""

    async def close(self) -> None:
        """Do nothing: the host closes."""


def grpc_limits(limits: Limits, options: GrpcOptions) -> Limits:
    """Return the limits of a gRPC port. Bodies have no limit of their own: their messages do."""
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
    """Return the keepalive and the greatest age of connections."""
    return Lifetimes(
        options.keepalive_s,
        options.keepalive_timeout_s,
        options.max_connection_age_s,
        options.max_connection_age_grace_s,
    )


class GrpcListener:
    """Serve the dialects' RPCs, health and reflection on one port.

    `descriptors` are serialized FileDescriptorSets for reflection; `restrictions` hold for all RPCs,
    health's too, and with `gate` API keys are on; `methods_of` has the RPCs for keys of some models; `split`
    draws those of calls that infer. With `host` the port is that listener's: gRPC requests there are
    answered here, from before it opens until it is closed."""

    def __init__(
        self,
        address: str,
        port: int,
        methods: Sequence[Method],
        options: GrpcOptions,
        *,
        descriptors: Sequence[bytes] = (),
        balancer: AcceptBalancer | None = None,
        nameless_health: bool = False,
        health_names: Sequence[str] = (),
        access_log: AccessLog | None = None,
        opening: Opening | None = None,
        restrictions: Restrictions = NO_RESTRICTIONS,
        limits: Limits | None = None,
        host: HttpListener | None = None,
        tls: Credentials | None = None,
        budget: MemoryBudget | None = None,
        passed_on: InheritedSockets | None = None,
        gate: ApiKeyGate | None = None,
        methods_of: MethodsOf | None = None,
        tracer: Tracer | None = None,
        want: Want | None = None,
        split: TrafficSplit | None = None,
    ) -> None:
        self._place = (address, port)
        self._options = options
        self._descriptors = descriptors
        self._balancer = balancer
        self._tls, self._budget, self._passed_on, self._gate = tls, budget, passed_on, gate
        self._restrictions, self._methods_of = restrictions, methods_of
        self._tracer, self._want, self._split = tracer, want, split
        self._bare = tuple(methods)
        self._health = Health(nameless=nameless_health)
        health_methods = _health_methods(self._health)
        self._methods = tuple(self._dress((*methods, *health_methods)))
        # As grpc.health.v1 knows them.
        self.services = tuple(dict.fromkeys((*(method.service for method in methods), *health_names)))
        most = options.message_bytes
        limits = msgspec.structs.replace(limits or Limits(), inflated_bytes=most)
        self._terms = RpcTerms(most, limits, access_log, opening or Opening())
        self._transport: NativeTransport | GuestTransport | None = None
        if host is not None:
            given = self._all_methods(), options, self._terms, self._narrow, split, self._split_methods
            self._transport = GuestTransport(host, *given)

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        given = self._options, self._terms, self._balancer, self._tls, self._budget, self._passed_on
        transport = self._transport or NativeTransport(
            self._place,
            self._all_methods(),
            *given,
            self._gate,
            self._narrow,
            self._split,
            self._split_methods,
        )
        self._place = await transport.open()
        self._transport = transport

    def _all_methods(self) -> Sequence[Method]:
        if not self._options.reflection:
            return self._methods
        services = [method.service for method in self._methods]
        return (*self._methods, *reflection_methods(services, self._descriptors))

    def _narrow(self, compartment: Compartment) -> Sequence[Method]:
        assert self._methods_of is not None
        return self._dress(self._methods_of(compartment))

    def _split_methods(self, split: TrafficSplit, compartment: Compartment | None) -> Sequence[Method]:
        """Return the RPCs that infer, of the server or of a compartment; their calls are drawn."""
        assert self._methods_of is not None
        bare = self._bare if compartment is None else self._methods_of(compartment)
        infers = [method for method in bare if method.scope is Scope.INFER]
        return self._dress([SplitRpc(split, method, self._find_bare).method for method in infers])

    def _find_bare(self, compartment: Compartment) -> dict[str, Method]:
        assert self._methods_of is not None
        return {method.path: method for method in self._methods_of(compartment)}

    def _dress(self, methods: Sequence[Method]) -> list[Method]:
        """Return RPCs of dialects as they are served here: with traces, on demand, behind restrictions."""
        waiting = [trace_method(self._tracer, demand_method(self._want, method)) for method in methods]
        return [guard_method(self._restrictions, method) for method in waiting]

    @property
    def listener(self) -> HttpListener | None:
        """Return the listener of a port that is gRPC's alone, while it is open."""
        return self._transport.listener if isinstance(self._transport, NativeTransport) else None

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        return self._place

    def set_health(self, service: str, serving: bool) -> None:
        """Set the grpc.health.v1 state of a service; "" is the whole server, not serving at first."""
        self._health.set(service, serving)

    async def drain(self, grace_s: float) -> None:
        """Report "not serving", send GOAWAY, stop accepting, and let calls finish for `grace_s` seconds."""
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
