"""The part of a listener that its connections use: limits, routes, the memory budget, the set of connections.

`HttpListener` adds the sockets and the timer. Connections import this module only, so that nothing below a
listener imports the listener.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from fastserve.net.accept_balance import PortCount
from fastserve.net.api_keys import ApiKeyGate
from fastserve.net.callback_guard import Guard, Guarded
from fastserve.net.deadlines import CallDeadlines
from fastserve.net.fair_queue import FairQueue
from fastserve.net.half_closed import HangupWatch
from fastserve.net.http2.headers import ReplyBlocks
from fastserve.net.http2.settings import Lifetimes
from fastserve.net.limits import STRAY_TLS, Verdict, WireFault, is_tls, over_limit
from fastserve.net.request import AccessLog, Call, ReplyHeads
from fastserve.net.router import Router
from fastserve.net.sockets import shown
from fastserve.settings import LEAST_MEMORY_BYTES, Limits
from fastserve.util.memory_budget import ALLOWANCE_BYTES, REASON, Claim, MemoryBudget
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger("fastserve.net.listener")
REFUSED_AT_ONCE = 64  # connections over the limit that are still given an answer
STRAINED_BYTES_PER_S = 1 << 16  # slowest rate of a body where others wait for memory


class ManagedConnection(Guarded, Protocol):
    """A connection as its listener manages it."""

    def look(self, now: float) -> Verdict:
        """Return how the client keeps the time limits."""

    def refuse(self, fault: WireFault) -> None:
        """Answer with a fault, and close."""

    def close(self) -> None:
        """Close; what is written goes out."""

    def abort(self) -> None:
        """Cut the connection."""


class ListenerState:
    """Hold the limits, routes, memory budget and connections of a listener. `refusals` counts by cause."""

    _place: tuple[str, int]

    def __init__(
        self,
        router: Router,
        limits: Limits,
        access_log: AccessLog | None,
        clock: Callable[[], float],
        lifetimes: Lifetimes | None,
        budget: MemoryBudget | None,
        gate: ApiKeyGate | None,
    ) -> None:
        self.budget = budget or MemoryBudget(limits.memory_bytes or LEAST_MEMORY_BYTES, clock=clock)
        self.set_limits(limits)
        self.lifetimes = lifetimes  # of HTTP/2 connections
        self.router, self.gate = router, gate
        self.heads, self.blocks, self.deadlines = ReplyHeads(), ReplyBlocks(), CallDeadlines()
        self.access_log = access_log if gate is None else gate.log_ends(access_log)
        self.names = access_log is not None
        self.clock = clock
        self.draining = False
        self.plain = access_log is None  # False when every reply needs a second look
        self.refusals: Counter[str] = Counter()
        self._limited_log = RateLimitedLog(log, clock)
        self.guard = Guard(self.refusals, self._limited_log)
        self.fair_queue, self.hangups = FairQueue(), HangupWatch()
        self.connections: set[ManagedConnection] = set()
        self.port_count: PortCount | None = None  # where several fronts share the port
        self._empty: asyncio.Event | None = None

    def set_limits(self, limits: Limits) -> None:
        """Hold connections to these limits from now on."""
        self.limits = limits
        self._strained_limits = _shorten(limits, self.budget.patience_s)

    @abstractmethod
    def switch(
        self, connection: ManagedConnection, transport: asyncio.Transport, data: bytes | bytearray
    ) -> None:
        """Hand the socket of an HTTP/1.1 connection over to HTTP/2, with the bytes that have come."""

    @abstractmethod
    def secured(
        self, handshake: ManagedConnection, transport: asyncio.Transport, protocol: str | None
    ) -> None:
        """Hand a connection whose handshake is done over to the protocol that ALPN has chosen."""

    def admit(self, connection: ManagedConnection) -> bool:
        """Add a connection. One over the limit is refused; with many of those, it is cut off."""
        self._add(connection)
        limit = self.limits.connections
        if len(self.connections) <= limit:
            return True
        if len(self.connections) > limit + REFUSED_AT_ONCE:
            self.count_refusal("connections")
            connection.abort()
        else:
            connection.refuse(over_limit(503, "Connections", "connections", limit))
        return False

    def make_room(self, handshake: ManagedConnection) -> bool:
        """Add a connection whose handshake begins. One over the limit is cut off."""
        self._add(handshake)
        if len(self.connections) <= self.limits.connections:
            return True
        self.count_refusal("connections")
        handshake.abort()
        return False

    def forget(self, connection: ManagedConnection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self.budget.charge(-ALLOWANCE_BYTES)
            if self.port_count is not None:
                self.port_count.leave(len(self.connections))
        if self._empty is not None and not self.connections:
            self._empty.set()

    def _add(self, connection: ManagedConnection) -> None:
        self.connections.add(connection)
        self.budget.charge(ALLOWANCE_BYTES)
        if self.port_count is not None:
            self.port_count.arrive(len(self.connections))

    def limits_for(self, claim: Claim | None) -> Limits:
        """Return the limits of a connection: shorter times for one that holds memory while others wait."""
        return self.limits if claim is None or not self.budget.strained else self._strained_limits

    def hold_back(self, call: Call) -> None:
        """Refuse a call in its dialect's form: the memory budget is exhausted."""
        self.count_refusal(REASON)
        self.router.hold_back(call, self.budget.refuse())

    def count_refusal(self, cause: str) -> None:
        self.refusals[cause] += 1
        if cause == STRAY_TLS:
            self.warn_of("%s speaks plain text, and a client began with TLS (tls.cert)")

    def count_stray_tls(self, data: bytes | bytearray, began: bool) -> None:
        """Count a client that began with TLS where HTTP/2 was expected."""
        if not began and is_tls(data):
            self.count_refusal(STRAY_TLS)

    def warn_of(self, text: str) -> None:
        """Log a client's mistake, at most once a minute each; `%s` is this listener."""
        self._limited_log.warn(text, shown(*self._place))


def _shorten(limits: Limits, patience_s: float) -> Limits:
    """Return the time limits of a client that holds memory which others wait for."""
    return msgspec.structs.replace(
        limits,
        header_timeout_s=min(limits.header_timeout_s, patience_s),
        write_stall_s=min(limits.write_stall_s, patience_s),
        body_bytes_per_s=max(limits.body_bytes_per_s, STRAINED_BYTES_PER_S),
    )
