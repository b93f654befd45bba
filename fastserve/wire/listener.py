"""One listening socket that speaks HTTP: who is connected, how long they may take, and how it ends.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import ceil
from operator import methodcaller

import msgspec

from fastserve.config import Limits
from fastserve.each import each
from fastserve.wire.call import Call
from fastserve.wire.connection import Connection
from fastserve.wire.dialect import HttpDialect
from fastserve.wire.faults import STRAY_TLS, over_limit
from fastserve.wire.gate import Gate
from fastserve.wire.halves import Hangups
from fastserve.wire.head import Head
from fastserve.wire.http2.connection import Http2Connection
from fastserve.wire.http2.lifetime import Lifetimes
from fastserve.wire.http2.shared import Shared
from fastserve.wire.http2.stream import Finder
from fastserve.wire.http2.upgrade import Upgrade, offered_settings
from fastserve.wire.opening import Opening
from fastserve.wire.pace import Verdict, slowness
from fastserve.wire.replies import ReplyHeads
from fastserve.wire.router import Router
from fastserve.wire.row import Row
from fastserve.wire.seldom import Seldom
from fastserve.wire.socket_file import UNIX, bind_file, clear
from fastserve.wire.tls.credentials import Credentials
from fastserve.wire.tls.handshake import Handshake
from fastserve.wire.tls.hello import is_tls
from fastserve.wire.tls.port import H2, HTTP_1_1, TlsPort
from fastserve.wire.tls.transport import TlsTransport

log = logging.getLogger(__name__)

BACKLOG = 1024
# A connection that carries nothing for so long is closed when the listener drains: not at once, because a
# client may be sending on it just then.
QUIET_S = 1.0
LOOKS_AT_ONCE, SLICES = 1000, 10  # connections looked at in one turn of the loop; parts of an interval
REFUSED_AT_ONCE = 64  # connections over the limit that are still given an answer
ACCEPT_S = 1.0  # for what waits to be accepted when the listener drains; longer only without descriptors
AnyConnection = Connection | Http2Connection | Handshake
AccessLog = Callable[[Call, int, int], None]  # (call, status, body bytes; -1 for a stream)


class HttpListener:
    """A socket and its connections. `port` 0 lets the system choose; `address` tells afterwards.

    `address` "" is every interface; "::" takes IPv4 as well; "unix:PATH" is a file, without a port.
    `clock` is in seconds and only ever compared with itself. `services` have the first choice of HTTP/2's
    streams (fastserve.wire.http2.stream); with `only_http2` a connection has to begin with HTTP/2's preface.
    `origins` are of web pages that may use the routes that administer. With `tls` it speaks nothing in plain
    text.
    """

    def __init__(
        self,
        address: str,
        port: int,
        dialects: Sequence[HttpDialect],
        limits: Limits,
        *,
        reuse_port: bool = False,
        access_log: AccessLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        services: Sequence[Finder] = (),
        only_http2: bool = False,
        opening: Opening | None = None,
        origins: Sequence[str] = (),
        lifetimes: Lifetimes | None = None,
        tls: Credentials | None = None,
    ) -> None:
        self.limits = limits
        self.lifetimes = lifetimes  # of HTTP/2 connections
        self.router = Router(dialects, opening, origins)
        self.heads = ReplyHeads()
        self.access_log = access_log
        self.clock = clock
        self.draining = False
        self.plain = access_log is None  # False when every reply needs a second look
        self.refusals: Counter[str] = Counter()  # by cause: a limit's name, "framing", "method", ...
        self.row, self.hangups = Row(), Hangups()
        self.http2 = Shared(self, services)
        self.connections: set[AnyConnection] = set()
        self.tls = None if tls is None else TlsPort(tls, (H2,) if only_http2 else (H2, HTTP_1_1))
        self._seldom = Seldom(log, clock)
        self.on_closed: list[Callable[[], object]] = []  # when no connection is left
        self._place, self._reuse_port = (address, port), reuse_port
        self._only_http2 = only_http2
        self._server: asyncio.Server | None = None
        self._gate: Gate | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unseen: list[AnyConnection] = []  # not yet looked at in this round
        self._at_a_time = 0
        self._empty: asyncio.Event | None = None

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        listening = open_socket(*self._place, reuse_port=self._reuse_port)
        gate = Gate(listening)
        create = loop.create_unix_server if listening.family == socket.AF_UNIX else loop.create_server
        try:
            self._place = gate.place
            self._server = await create(self._make, sock=listening, backlog=BACKLOG)
        except BaseException:
            gate.shut()
            listening.close()
            raise
        self.hangups.open()
        self.row.loop = loop
        if self.tls is not None:
            self.tls.open()
        self._gate = gate
        self._tick()

    def _make(self) -> AnyConnection:
        return Handshake(self, self.tls) if self.tls is not None else self._speak(None)

    def _speak(self, protocol: str | None) -> Connection | Http2Connection:
        """`protocol` is what ALPN has chosen; without it the first bytes tell."""
        if protocol == H2 or self._only_http2:
            self.http2.open()
            return Http2Connection(self)
        return Connection(self)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        return self._place

    async def drain(self, grace_s: float) -> int:
        """Accept who is on the way in and nobody else. From then on a reply says that its connection closes
        when it is the last one owed there, and a connection is closed after it, or when it has been quiet for
        QUIET_S. What is not done after `grace_s` seconds is cut off; returns how many connections were.
        """
        end = asyncio.get_running_loop().time() + grace_s
        await self._let_in(grace_s)
        await self._stop_accepting()
        self.draining, self.plain = True, False
        quiet_s = min(QUIET_S, self.limits.idle_timeout_s)
        self.limits = msgspec.structs.replace(self.limits, idle_timeout_s=quiet_s)
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
        """Accept all that is on the way; the loop does that whenever it turns."""
        if self._gate is None:
            return
        await asyncio.sleep(min(self._gate.shut(), grace_s))
        loop, waits = asyncio.get_running_loop(), select.poll()
        waits.register(self._gate.listening, select.POLLIN)
        end = loop.time() + min(grace_s, ACCEPT_S)
        while waits.poll(0) and loop.time() < end:
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop at once; connections that are left are cut off."""
        await self._stop_accepting()
        each(list(self.connections), methodcaller("abort"))
        while self.connections:
            await asyncio.sleep(0)  # connection_lost comes with the loop's next turn
        self.hangups.close()
        each(self.on_closed, methodcaller("__call__"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _stop_accepting(self) -> None:
        """Afterwards who was accepted is among the connections: the loop tells them in the turn after."""
        if self._server is not None and self._gate is not None:
            self._gate.shut()
            self._server.close()
            self._server = self._gate = None
            await asyncio.sleep(0)

    # ---- for connections

    def route(self, head: Head) -> None:
        """Find the endpoint of a new head of HTTP/1.1."""
        head.endpoint, head.routed_anew = self.router.find(head.method, head.target)
        settings = None if self.tls is not None else offered_settings(head)  # h2c is plain text by its name
        if settings is not None:
            head.endpoint = Upgrade(self.http2, settings, head.endpoint)

    def switch(self, connection: Connection, transport: asyncio.Transport) -> Http2Connection:
        """The client of a connection speaks HTTP/2: who has the socket from now on."""
        self.http2.open()
        successor = Http2Connection(self)
        successor.take_over(transport)
        self.connections.discard(connection)
        self.connections.add(successor)
        transport.set_protocol(successor)
        return successor

    def admit(self, connection: Connection | Http2Connection) -> bool:
        """Take a new connection in. One too many is told so; with many of those around, it is cut off."""
        self.connections.add(connection)
        limit = self.limits.connections
        if len(self.connections) <= limit:
            return True
        if len(self.connections) > limit + REFUSED_AT_ONCE:
            self.count_refusal("connections")
            connection.abort()
        else:
            connection.refuse(over_limit(503, "Connections", "connections", limit))
        return False

    def make_room(self, handshake: Handshake) -> bool:
        """Take in a connection that has no protocol yet. One too many is cut off."""
        self.connections.add(handshake)
        if len(self.connections) <= self.limits.connections:
            return True
        self.count_refusal("connections")
        handshake.abort()
        return False

    def secured(self, handshake: Handshake, transport: TlsTransport, protocol: str | None) -> None:
        """A handshake is done: who has the connection from now on."""
        self.connections.discard(handshake)
        successor = self._speak(protocol)
        transport.set_protocol(successor)
        successor.connection_made(transport)

    def forget(self, connection: AnyConnection) -> None:
        self.connections.discard(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()

    def count_refusal(self, cause: str) -> None:
        self.refusals[cause] += 1
        if cause == STRAY_TLS:
            self.warn_of("%s speaks plain text, and a client began with TLS (tls.cert)")

    def doubt(self, data: bytes | bytearray, began: bool) -> None:
        """These bytes are not HTTP/2; `began` is whether others were before them."""
        if not began and is_tls(data):
            self.count_refusal(STRAY_TLS)

    def warn_of(self, text: str) -> None:
        """A line about what clients do wrong, once a minute each; `%s` in it is this listener."""
        self._seldom.warn(text, shown(*self._place))

    # ---- the timer

    def _tick(self) -> None:
        """Look at everybody once in an interval: at many a part at a time, or requests would wait for it."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._renew()
        if not self._unseen:
            self._unseen = list(self.connections)
            self._at_a_time = max(LOOKS_AT_ONCE, ceil(len(self._unseen) / SLICES))
        some, self._unseen = self._unseen[: self._at_a_time], self._unseen[self._at_a_time :]
        pause_s = self._interval_s() / (SLICES if self._unseen else 1)
        # First: whatever fails here must not end the limits of all connections.
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick)
        self._look_at(self.connections.intersection(some), now)

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
        """Set the date of replies; the time."""
        unix_s = time.time()
        self.heads.tick(unix_s)
        self.http2.blocks.tick(unix_s)
        return self.clock()

    def _look_at(self, connections: Iterable[AnyConnection], now: float) -> None:
        each(connections, partial(self._look, now), methodcaller("abort"))

    def _look(self, now: float, connection: AnyConnection) -> None:
        verdict = connection.look(now)
        if verdict is Verdict.FINE:
            return
        if verdict is Verdict.STALLED:
            self.count_refusal("write_stall_s")
            connection.abort()
        elif verdict in (Verdict.SLOW_HEAD, Verdict.SLOW_BODY):
            connection.refuse(slowness(verdict, self.limits))
        else:
            connection.close()


def shown(host: str, port: int) -> str:
    """A place as settings and messages have it."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_socket(address: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket, one of a file listening. "" and "::" take IPv4 and IPv6 where the machine has both.
    Raises OSError, whose text names the place."""
    with _named(address, port):
        if address.startswith(UNIX):
            return bind_file(address.removeprefix(UNIX))
        return _bind(address, port, reuse_port)


def check_free(address: str, port: int) -> None:
    """Raises OSError if somebody listens there already, even one that would share the port."""
    if address.startswith(UNIX):
        with _named(address, port):
            clear(address.removeprefix(UNIX))
    elif port:
        open_socket(address, port).close()


@contextlib.contextmanager
def _named(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"cannot listen on {shown(address, port)}: {error.strerror or error}"
        raise OSError(error.errno, text) from error


def _bind(address: str, port: int, reuse_port: bool) -> socket.socket:
    host = address or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listening.bind(place)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
