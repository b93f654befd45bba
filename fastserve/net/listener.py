"""One listening socket that speaks HTTP: its connections, their time limits, and its end.

    listener = HttpListener("127.0.0.1", 0, dialects, limits)
    await listener.open(); host, port = listener.address
    await listener.drain(10.0)        # stop accepting, finish what is in flight, close what is quiet
    await listener.close()

One timer per listener looks at its connections; a request never starts or stops a timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil
from operator import methodcaller
from typing import cast

import msgspec

from fastserve.net.accept_balance import AcceptBalancer
from fastserve.net.access_control import NO_RESTRICTIONS, Opening, Restrictions
from fastserve.net.api_keys import ApiKeyGate
from fastserve.net.callback_guard import report
from fastserve.net.http1.connection import Http1Connection
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.http2.exchange import Http2Shared
from fastserve.net.http2.settings import Lifetimes
from fastserve.net.http2.stream import ServiceFinder
from fastserve.net.limits import Verdict, slowness
from fastserve.net.listener_state import ListenerState, ManagedConnection
from fastserve.net.request import AccessLog
from fastserve.net.router import DialectsOf, HttpDialect, Router
from fastserve.net.sockets import AcceptGate, InheritedSockets, open_socket, shown
from fastserve.net.tls.credentials import Credentials
from fastserve.net.tls.handshake import Handshake
from fastserve.net.tls.transport import H2, HTTP_1_1, TlsPort
from fastserve.net.traced_endpoints import Tracer
from fastserve.net.traffic_split import TrafficSplit
from fastserve.settings import Limits
from fastserve.util.memory_budget import ALLOWANCE_BYTES, MemoryBudget
from fastserve.util.model_demand import Want
from fastserve.util.rate_limited_log import run_all

log = logging.getLogger(__name__)
BACKLOG, SHARED_BACKLOG = 1024, 8192  # of one front process, and of several
# A connection that carries nothing for so long is closed when the listener drains: not at once, because a
# client may be sending on it just then.
QUIET_S = 1.0
LOOKS_AT_ONCE, SLICES = 1000, 10  # connections looked at in one turn of the loop; parts of an interval
ACCEPT_S = 1.0  # for what waits to be accepted when the listener drains; longer only without descriptors


class CutOff(asyncio.Protocol):
    """Abort a connection that there is no memory for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class HttpListener(ListenerState):
    """A listening socket and its connections. `port` 0 lets the system choose; `address` tells afterwards.

    `address` "" is every interface; "::" takes IPv4 as well; "unix:PATH" is a file, without a port.
    `clock` is in seconds. `services` come before plain HTTP on HTTP/2's streams (http2.stream); with
    `only_http2` a connection has to begin with HTTP/2's preface. `origins` are those of web pages that
    may administer, `restrictions` hold for all routes, and with `gate` API keys are on; `dialects_of` has the
    dialects for keys of some models. With `tls` no plain
    text is spoken. A `balancer` accepts the connections, and shares them with other front processes.
    `passed_on` has sockets that a service manager keeps."""

    def __init__(
        self,
        address: str,
        port: int,
        dialects: Sequence[HttpDialect],
        limits: Limits,
        *,
        balancer: AcceptBalancer | None = None,
        access_log: AccessLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        services: Sequence[ServiceFinder] = (),
        only_http2: bool = False,
        opening: Opening | None = None,
        origins: Sequence[str] = (),
        restrictions: Restrictions = NO_RESTRICTIONS,
        lifetimes: Lifetimes | None = None,
        tls: Credentials | None = None,
        budget: MemoryBudget | None = None,
        passed_on: InheritedSockets | None = None,
        gate: ApiKeyGate | None = None,
        dialects_of: DialectsOf | None = None,
        tracer: Tracer | None = None,
        want: Want | None = None,
        split: TrafficSplit | None = None,
    ) -> None:
        served = dialects, opening, origins, restrictions, gate, dialects_of, limits, tracer, want, split
        router = Router(*served)
        super().__init__(router, limits, access_log, clock, lifetimes, budget, gate)
        self.http2 = Http2Shared(self, services)
        self.tls = None if tls is None else TlsPort(tls, (H2,) if only_http2 else (H2, HTTP_1_1), self.guard)
        self.on_closed: list[Callable[[], object]] = []  # when no connection is left
        self._place, self._balancer = (address, port), balancer
        self._passed_on, self._kept = passed_on, False  # sockets of a service manager; whether this is one
        self._waits = False  # for `accept`
        self._adopting: set[asyncio.Task[object]] = set()  # connections that are being set up
        self._closed = False
        self._only_http2 = only_http2
        self._server: asyncio.Server | None = None
        self._gate: AcceptGate | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unseen: list[ManagedConnection] = []  # not yet looked at in this round
        self._at_a_time = 0

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had. On a socket of `passed_on` connections wait
        for `accept`."""
        loop = asyncio.get_running_loop()
        passed_on = self._passed_on.find(*self._place) if self._passed_on is not None else None
        self._waits = self._kept = passed_on is not None
        inherited = passed_on
        if self._balancer is not None and inherited is None:
            inherited = self._balancer.inherited(shown(*self._place))
        listening = inherited or open_socket(*self._place)
        gate = AcceptGate(listening, inherited=inherited is not None)
        create = loop.create_unix_server if listening.family == socket.AF_UNIX else loop.create_server
        try:
            self._place = gate.place
            if self._balancer is None:
                self._server = await create(
                    self._make, sock=listening, backlog=BACKLOG, start_serving=not self._waits
                )
            elif not self._waits:
                self._share(self._balancer, listening)
        except BaseException:
            gate.shut()
            listening.close()
            raise
        self.hangups.open()
        self.fair_queue.loop = loop
        if self.tls is not None:
            self.tls.open()
        self._gate = gate
        self._tick()

    async def accept(self) -> None:
        """Begin to accept from a socket of `passed_on`; any other is accepted from since it is open."""
        waits, self._waits = self._waits, False
        if waits and self._server is not None:
            await self._server.start_serving()
        elif waits and self._balancer is not None and self._gate is not None:
            self._share(self._balancer, self._gate.listening)

    def _share(self, balancer: AcceptBalancer, listening: socket.socket) -> None:
        """Accept together with other front processes."""
        listening.listen(SHARED_BACKLOG)
        self.port_count = balancer.attach(shown(*self._place), listening, self._adopt)

    def _adopt(self, accepted: socket.socket) -> None:
        """Set up a connection that the balancer has accepted."""
        assert self.port_count is not None
        if self._closed:
            accepted.close()
            return
        self.port_count.expect()
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(self._make, accepted))
        self._adopting.add(task)
        task.add_done_callback(partial(self._adopted, accepted))

    def _adopted(self, accepted: socket.socket, task: asyncio.Task[object]) -> None:
        self._adopting.discard(task)
        if not self._adopting and self.port_count is not None:
            self.port_count.settle()
        if not task.cancelled() and (error := task.exception()) is not None:
            accepted.close()
            if not isinstance(error, OSError):  # else the client has left already
                self.guard.note(cast(Exception, error))

    def _make(self) -> asyncio.BaseProtocol:
        """Return the protocol of a connection just accepted. Where there is no memory for one the
        connection is cut off: after an exception here the loop would accept no more."""
        try:
            return Handshake(self, self.tls) if self.tls is not None else self._speak(None)
        except Exception as error:
            self.guard.note(error)
            return CutOff()

    def _speak(self, protocol: str | None) -> Http1Connection | Http2Connection:
        """Return the protocol that ALPN has chosen; without ALPN the first bytes tell."""
        if protocol == H2 or self._only_http2:
            self.http2.open()
            return Http2Connection(self, self.http2)
        return Http1Connection(self, may_switch=protocol is None)

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        return self._place

    async def drain(self, grace_s: float) -> int:
        """Accept connections that are on their way, and no others; then let calls finish for `grace_s`
        seconds.

        The last reply that a connection is owed says that it closes; other connections close when they
        have been quiet for QUIET_S. Returns how many connections were cut off in the end."""
        end = asyncio.get_running_loop().time() + grace_s
        await self._let_in(grace_s)
        await self._stop_accepting()
        self.draining, self.plain = True, False
        quiet_s = min(QUIET_S, self.limits.idle_timeout_s)
        self.set_limits(msgspec.structs.replace(self.limits, idle_timeout_s=quiet_s))
        self._unseen = []
        self._tick()
        self._empty = asyncio.Event()
        if self.connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), end - asyncio.get_running_loop().time())
        left = len(self.connections)
        await self.close()
        return left

    async def _let_in(self, grace_s: float) -> None:
        """Accept all connections on their way; the loop accepts whenever it turns."""
        if self._gate is None or self._kept:
            return
        await asyncio.sleep(min(self._gate.shut(), grace_s))
        loop, waits = asyncio.get_running_loop(), select.poll()
        waits.register(self._gate.listening, select.POLLIN)
        end = loop.time() + min(grace_s, ACCEPT_S)
        while waits.poll(0) and loop.time() < end:
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop at once; connections that are left are cut off."""
        self._closed = True
        await self._stop_accepting()
        if self._adopting:
            await asyncio.wait(self._adopting)
        run_all(list(self.connections), methodcaller("abort"))
        while self.connections:
            await asyncio.sleep(0)  # connection_lost comes with the loop's next turn
        self.hangups.close()
        self.deadlines.close()
        self.http2.waits.close()
        run_all(self.on_closed, methodcaller("__call__"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _stop_accepting(self) -> None:
        """Close the listening socket. Accepted connections are admitted in the loop's next turn."""
        if self._gate is None:
            return
        gate, self._gate = self._gate, None
        gate.shut()
        if self._balancer is not None:
            self._balancer.detach(gate.listening)
        if self._server is not None:
            self._server.close()
            self._server = None
        await asyncio.sleep(0)

    # ---- for connections

    def switch(
        self, connection: ManagedConnection, transport: asyncio.Transport, data: bytes | bytearray
    ) -> None:
        """Hand the socket of a connection over to HTTP/2, with the bytes that have come."""
        self.http2.open()
        successor = Http2Connection(self, self.http2)
        successor.take_over(transport)
        self.connections.discard(connection)
        self.connections.add(successor)
        transport.set_protocol(successor)
        successor.start(data)

    def secured(
        self, handshake: ManagedConnection, transport: asyncio.Transport, protocol: str | None
    ) -> None:
        """Hand a connection over to its protocol after the handshake."""
        self.connections.discard(handshake)
        self.budget.charge(-ALLOWANCE_BYTES)
        if self.port_count is not None:
            self.port_count.expect()
        successor = self._speak(protocol)
        transport.set_protocol(successor)
        successor.connection_made(transport)

    # ---- the timer

    def _tick(self) -> None:
        """Look at every connection once in an interval; at many in slices, between which requests are
        served."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._unseen:
            self._unseen = list(self.connections)
            self._at_a_time = max(LOOKS_AT_ONCE, ceil(len(self._unseen) / SLICES))
        some, self._unseen = self._unseen[: self._at_a_time], self._unseen[self._at_a_time :]
        pause_s = self._interval_s() / (SLICES if self._unseen else 1)
        # First: whatever fails here must not end the limits of all connections.
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick)
        try:
            self._look_at(self.connections.intersection(some), self._renew())
        except Exception as error:
            self.guard.note(error)

    def _interval_s(self) -> float:
        limits = self.limits
        shortest = min(limits.header_timeout_s, limits.idle_timeout_s, limits.write_stall_s)
        if self.tls is not None:
            shortest = min(shortest, self.tls.options.handshake_timeout_s)
        return min(1.0, max(0.01, shortest / 4))

    def scan(self) -> None:
        """Renew the date and apply the time limits to every connection, once."""
        self._look_at(list(self.connections), self._renew())

    def _renew(self) -> float:
        """Set the date of replies, expire claims that wait for memory, and return the time."""
        self.budget.expire()
        unix_s = time.time()
        self.heads.tick(unix_s)
        self.blocks.tick(unix_s)
        return self.clock()

    def _look_at(self, connections: Iterable[ManagedConnection], now: float) -> None:
        run_all(connections, partial(self._look, now), report)

    def _look(self, now: float, connection: ManagedConnection) -> None:
        verdict = connection.look(now)
        if verdict is Verdict.FINE:
            return
        if verdict in (Verdict.STALLED, Verdict.SLOW_REPLY):
            stalled = verdict is Verdict.STALLED
            self.count_refusal("write_stall_s" if stalled else "reply_bytes_per_s")
            connection.abort()
        elif verdict in (Verdict.SLOW_HEAD, Verdict.SLOW_BODY):
            connection.refuse(slowness(verdict, self.limits))
        else:
            connection.close()
