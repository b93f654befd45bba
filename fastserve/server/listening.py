"""Dialects and listeners of one front process, built from the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserve.config import Listener, Settings
from fastserve.dialects.ops import Ops
from fastserve.dialects.tfserving.dialect import TFServing
from fastserve.engine.engine import Engine
from fastserve.errors import ConfigError
from fastserve.metrics import Heartbeat, Readiness, Registry
from fastserve.wire import Call, Dialect, HttpListener

if TYPE_CHECKING:
    from fastserve.wire.grpc import GrpcListener

log = logging.getLogger(__name__)
access = logging.getLogger("fastserve.access")

DIALECTS = ("tfserving",)
HEALTH_SERVICE = ""


@dataclass
class Front:
    """What one front process serves with."""

    settings: Settings
    engine: Engine
    registry: Registry
    readiness: Readiness = field(default_factory=Readiness)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    http: list[HttpListener] = field(default_factory=list)
    grpc: list[GrpcListener] = field(default_factory=list)

    async def open(self, http: Sequence[Listener], grpc: Sequence[Listener], *, shared: bool) -> None:
        """Open listeners at these addresses; `shared` ports are shared with other front processes.

        Raises ConfigError for an unknown dialect, OSError for an address that cannot be had.
        """
        dialects = self._dialects()
        for listener in (*http, *grpc):
            _check_dialects(listener)
        for listener in http:
            await self._open_http(listener, dialects, shared)
        for listener in grpc:
            await self._open_grpc(listener, shared)

    def set_ready(self, readiness: Readiness) -> None:
        """Take over what the owner knows about readiness."""
        self.readiness.ready = readiness.ready
        self.readiness.reason = readiness.reason
        self.readiness.models = readiness.models
        for listener in self.grpc:
            listener.set_health(HEALTH_SERVICE, readiness.ready)

    def addresses(self) -> tuple[tuple[Listener, ...], tuple[Listener, ...]]:
        """The HTTP and gRPC listeners with the ports they really have."""
        http = [_listed(o.address, s) for o, s in zip(self.http, self.settings.http, strict=True)]
        grpc = [_listed(o.address, s) for o, s in zip(self.grpc, self.settings.grpc, strict=True)]
        return tuple(http), tuple(grpc)

    async def drain(self, grace_s: float) -> int:
        """Finish what is in flight; returns how many connections had to be cut off."""
        cut = 0
        for listener in self.http:
            cut += await listener.drain(grace_s)
        for grpc_listener in self.grpc:
            await grpc_listener.drain(grace_s)
        self.http, self.grpc = [], []
        return cut

    def _dialects(self) -> dict[str, Callable[[], Dialect]]:
        settings = self.settings
        tfserving = TFServing(self.engine, self.registry, settings.tfserving, settings.limits)
        return {"tfserving": lambda: tfserving}

    async def _open_http(
        self, listener: Listener, known: dict[str, Callable[[], Dialect]], shared: bool
    ) -> None:
        names = listener.dialects or DIALECTS
        ops: Dialect = Ops(self.readiness, self.heartbeat, self.registry)
        opened = HttpListener(
            listener.host,
            listener.port,
            [ops, *(known[name]() for name in names)],
            self.settings.limits,
            reuse_port=shared,
            access_log=log_access if self.settings.log.access else None,
        )
        await opened.open()
        self.http.append(opened)

    async def _open_grpc(self, listener: Listener, shared: bool) -> None:
        from fastserve.wire.grpc import GrpcListener

        opened = GrpcListener(listener.host, listener.port, [], self.settings.grpc_options, reuse_port=shared)
        await opened.open()
        self.grpc.append(opened)


def log_access(call: Call, status: int, nbytes: int) -> None:
    """One line for each reply."""
    more = {"bytes": nbytes, "request_id": call.request_id}
    access.info("%s %s %d", call.method, call.target, status, extra=more)


def _check_dialects(listener: Listener) -> None:
    for name in listener.dialects:
        if name not in DIALECTS:
            raise ConfigError(f"{listener.address}: dialects: given {name!r}, allowed: {', '.join(DIALECTS)}")


def _listed(address: tuple[str, int], listener: Listener) -> Listener:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return Listener(f"{host}:{address[1]}", listener.dialects)
