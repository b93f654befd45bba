"""The runner's end of its remote workers: who they are, how far each has come, who is gone.

    HELLO -> LOADING -> LOADED -> WARMING -> READY         a peer; a lost connection ends it at any time

A peer is a connection: ZeroMQ numbers each anew, so what a worker says over a later one is never taken for
its
earlier self. Three things end a peer: its connection (heartbeats of ZMTP, which libzmq sends and expects in a
thread of its own, whatever the model does with Python's lock), silence while it has nothing to do (PING), and
what the runner says of it (a batch beyond its time, a message that breaks the protocol).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

import fastserve
from fastserve._ext.remote_batches import (
    PROTOCOL,
    MessageKind,
    ProtocolFault,
    RemotePeer,
    WireMessage,
    read_messages,
    read_protocol,
)
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import check_listen
from fastserve.util.rate_limited_log import RateLimitedLog
from fastserve.workers.remote.files import ShippedFolder
from fastserve.workers.remote.keys import KeyGate, SideKey, import_zmq, secure_server
from fastserve.workers.remote.protocol import (
    Failure,
    FileRequest,
    Go,
    Hello,
    LoadedModel,
    Welcome,
    Words,
    pack_message,
    read_body,
    receive_frames,
)

log = logging.getLogger(__name__)

MISSED = 3  # heartbeats that may be missed, less one
MOST_PEERS = 1024
MOST_STRANGERS = 64  # peers that have not said which version they have loaded
QUEUED_MESSAGES = 64  # of one peer, in either direction
SPARE_BYTES = 1 << 20  # of a message besides its tensors
MOST_RECEIVED = 256  # messages of a turn: who sends without end keeps nobody's heartbeat
RARELY_S = 0.02  # between two looks at the sockets of which little is heard, while batches come and go
GO_AFTER_S = 10.0  # after the first worker, a version does without those that are still missing


class PeerState(Enum):
    """How far a remote worker has come."""

    LOADING = "loading"
    LOADED = "loaded"
    WARMING = "warming up"
    READY = "ready"
    RETIRING = "no longer needed"


AT_WORK = (PeerState.READY, PeerState.RETIRING)


class WorkerConnections:
    """The listening socket of one version's remote workers, and the workers behind it.

    `welcome` is what a worker is to load. `on_answer(peer, message)` gets an answer of a READY peer,
    `on_ready(peer)` and `on_lost(peer, reason)` each at most once for a peer; none of them may call `turn`.
    """

    def __init__(
        self,
        listen: str,
        key: SideKey | None,
        welcome: Welcome,
        files: ShippedFolder | None,
        *,
        answer_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers: dict[bytes, RemotePeer] = {}
        self.ready: list[RemotePeer] = []  # those that take batches
        self.joining: list[RemotePeer] = []  # those with messages that wait for `flush`
        self.quiet = False  # nothing has arrived since the last turn; sending may have silenced `descriptors`
        self.failure: ServeError | None = None  # of the last worker whose load failed
        self.on_answer: Callable[[RemotePeer, WireMessage], None] = lambda *_: None
        self.on_ready: Callable[[RemotePeer], None] = lambda _: None
        self.on_lost: Callable[[RemotePeer, str], None] = lambda *_: None
        self._zmq = import_zmq()
        self._welcome, self._files, self._clock = welcome, files, clock
        self._dense: bool | None = None
        self._instances = itertools.count()
        self._log = RateLimitedLog(log)
        self._beat_s = welcome.heartbeat_s
        self._next_beat_s = self._next_look_s = 0.0
        self._no_wait, self._nothing = int(self._zmq.NOBLOCK), self._zmq.Again
        self._sending_more = int(self._zmq.NOBLOCK | self._zmq.SNDMORE)
        self._context = self._zmq.Context()
        self._gate: KeyGate | None = None
        self._monitor: Any = None
        self._socket = self._context.socket(self._zmq.ROUTER)
        try:
            self._prepare(answer_bytes, key)
            self.address = self._bind(listen, key)
            self._monitor = self._socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
        except BaseException:
            self.close()
            raise

    def _prepare(self, answer_bytes: int, key: SideKey | None) -> None:
        socket, beat_ms = self._socket, int(self._beat_s * 1000)
        socket.linger = 0
        socket.router_mandatory = 1
        socket.sndhwm = socket.rcvhwm = QUEUED_MESSAGES
        socket.maxmsgsize = answer_bytes + SPARE_BYTES
        socket.heartbeat_ivl = beat_ms
        socket.heartbeat_timeout = (MISSED - 1) * beat_ms
        socket.heartbeat_ttl = MISSED * beat_ms
        socket.handshake_ivl = max(5000, 2 * beat_ms)
        if key is not None:
            self._gate = KeyGate(self._context, key.other)
            secure_server(socket, key)

    def _bind(self, listen: str, key: SideKey | None) -> str:
        host, ports = check_listen(listen, "" if key is None else "given")
        for port in ports:
            try:
                self._socket.bind(f"tcp://{host}:{port or '*'}")
            except self._zmq.ZMQError as error:
                if error.errno != self._zmq.EADDRINUSE:
                    raise ConfigError(f"listen {listen}: {error.strerror}") from None
                continue
            return f"{host}:{self._socket.last_endpoint.decode().rpartition(':')[2]}"
        raise ConfigError(
            f"listen {listen}: taken; a version that loads while another serves needs a "
            "port of its own, so give two, such as 7300-7301"
        )

    def descriptors(self) -> list[int]:
        """Return descriptors that are readable when `turn` may have something to do; edge-triggered. Of all
        but the first little is heard: for those, `turn` is to be told."""
        sockets = [self._socket, self._monitor, *([self._gate.socket] if self._gate is not None else [])]
        return [socket.getsockopt(self._zmq.FD) for socket in sockets]

    @property
    def loaded(self) -> list[RemotePeer]:
        """The workers that have loaded the version."""
        return [peer for peer in self.peers.values() if peer.model is not None]

    def turn(self, *, rare: bool = True) -> None:
        """Receive what has arrived, and send heartbeats that are due. Without `rare` it may leave
        for RARELY_S what is neither of a worker nor of batches."""
        self._receive_all()
        now = self._clock()
        if rare or now >= self._next_look_s:
            self._next_look_s = now + RARELY_S
            if self._gate is not None:
                for address in self._gate.turn():
                    self._log.warn(
                        "a worker from %s was turned away: its key is not the one of this server", address
                    )
            if self._gone():
                self._next_beat_s = now
        if now >= self._next_beat_s:
            self._next_beat_s = now + self._beat_s
            self._beat(now)

    def _receive_all(self) -> None:
        for _ in range(MOST_RECEIVED):
            try:
                identity = self._socket.recv(self._no_wait)
            except self._nothing:
                self.quiet = True
                return
            self._receive(identity, receive_frames(self._socket, self._no_wait))
        self.quiet = False

    def wait(self, timeout_s: float, *others: int) -> None:
        """Wait until `turn` may have something to do, or one of the `others` can be read."""
        sockets = [self._socket, self._monitor, *([self._gate.socket] if self._gate is not None else [])]
        poller = self._zmq.Poller()
        for socket in (*sockets, *others):
            poller.register(socket, self._zmq.POLLIN)
        poller.poll(max(0, min(timeout_s, self._next_beat_s - self._clock())) * 1000)

    @property
    def next_beat_s(self) -> float:
        """When `turn` is to be called at the latest, by the clock."""
        return self._next_beat_s

    def send(self, peer: RemotePeer, frames: Sequence[Any]) -> bool:
        """Send a message, after those that were joined; memory of `frames` must stay until it was
        answered, or the connection is closed. Returns False, and the peer is lost, where its connection has
        ended."""
        if peer.joined and not self.send_joined(peer):
            return False
        return self._send_frames(peer, frames)

    def flush(self) -> None:
        """Send what was joined."""
        while self.joining:
            peer = self.joining.pop()
            if peer.joined:
                self.send_joined(peer)

    def send_joined(self, peer: RemotePeer) -> bool:
        """Send what was joined for a peer; as `send`."""
        joined, peer.joined, peer.joined_bytes = peer.joined, [], 0
        return self._send_frames(peer, [b"".join(joined)])

    def _send_frames(self, peer: RemotePeer, frames: Sequence[Any]) -> bool:
        socket, last, self.quiet = self._socket, len(frames) - 1, False
        try:
            socket.send(peer.identity, self._sending_more)
            for number, frame in enumerate(frames):
                flags = self._sending_more if number < last else self._no_wait
                socket.send(frame, flags, copy=not last)
            return True
        except self._zmq.ZMQError as error:
            full = error.errno == self._zmq.EAGAIN
            self.drop(peer, "it reads nothing any more" if full else "its connection has ended")
            return False

    def drop(self, peer: RemotePeer, reason: str) -> None:
        """End a peer: what comes of it later is refused."""
        if self.peers.pop(peer.identity, None) is None:
            return
        self._count_ready()
        peer.joined, peer.joined_bytes = [], 0
        expected = peer.state in (PeerState.LOADING, PeerState.RETIRING)
        log.log(
            logging.INFO if expected else logging.WARNING, "remote worker %s is lost: %s", peer.name, reason
        )
        self._reply(peer.identity, MessageKind.BYE, Words(reason))
        self.on_lost(peer, reason)

    def retire(self, peer: RemotePeer) -> None:
        """Give a peer no more batches, and end it once it has none."""
        peer.state = PeerState.RETIRING
        self._count_ready()
        if not peer.flights:
            self.drop(peer, PeerState.RETIRING.value)

    def go(self, *, dense: bool) -> None:
        """Let workers that have loaded warm up, and those that will."""
        self._dense = dense
        for peer in self.loaded:
            self._warm_up(peer)

    def close(self) -> None:
        """Say goodbye to all, and close every socket. Idempotent. Memory that was sent is not read after
        this."""
        if self._socket.closed:
            return
        for identity in list(self.peers):
            self._reply(identity, MessageKind.BYE, Words("the version has ended, or its runner has"))
        self.peers.clear()
        self.ready.clear()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(200)
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _count_ready(self) -> None:
        self.ready = [peer for peer in self.peers.values() if peer.state is PeerState.READY]

    def _gone(self) -> bool:
        """Return whether any connection has ended since the last look."""
        found = False
        while True:
            try:
                self._monitor.recv_multipart(self._no_wait)
            except self._nothing:
                return found
            found = True

    def _beat(self, now: float) -> None:
        """A PING finds out whose connection has ended; those with nothing to do owe an answer."""
        ping = pack_message(MessageKind.PING)
        for peer in list(self.peers.values()):
            idle = peer.state is PeerState.READY and not peer.flights
            if idle and now - peer.heard_s > MISSED * self._beat_s:
                self.drop(peer, f"it has not answered for {now - peer.heard_s:.1f} s")
            elif not idle and peer.state in AT_WORK:
                peer.heard_s = now
                self.send(peer, ping)
            else:
                self.send(peer, ping)

    def _receive(self, identity: bytes, frames: Sequence[Any]) -> None:
        peer = self.peers.get(identity)
        try:
            if peer is None:
                self._meet(identity, frames)
                return
            peer.heard_s = self._clock()
            for message in read_messages(frames):
                if message.kind is MessageKind.ANSWER and peer.state in AT_WORK:
                    self.on_answer(peer, message)
                elif peer.identity in self.peers:  # and was not given up for one of these messages
                    self._answer(peer, message)
        except ProtocolFault as fault:
            self._log.warn(
                "remote worker %s sent %s", "of no name" if peer is None else peer.name, str(fault)
            )
            if peer is not None:
                self.drop(peer, f"it sent {fault}")
            else:
                self._reply(identity, MessageKind.REFUSED, Words(f"you sent {fault}"))

    def _meet(self, identity: bytes, frames: Sequence[Any]) -> None:
        """Read the first message of a connection."""
        spoken = read_protocol(frames[0])
        if spoken and spoken != PROTOCOL:
            raise ProtocolFault(
                f"protocol {spoken}, and {PROTOCOL} is spoken here: install one fastserve on both"
            )
        greeting, *_ = read_messages(frames)
        if greeting.kind is not MessageKind.HELLO:  # of a worker whose connection was taken for lost, say
            self._reply(identity, MessageKind.BYE, Words("this connection is not known, or was given up"))
            return
        hello = read_body(greeting, Hello)
        if hello.fastserve != fastserve.__version__:
            text = f"it is fastserve {hello.fastserve}, and {fastserve.__version__} serves: install the same"
            raise ProtocolFault(f"a greeting: {text}")
        if (
            len(self.peers) >= MOST_PEERS
            or sum(p.model is None for p in self.peers.values()) >= MOST_STRANGERS
        ):
            raise ProtocolFault("a greeting while as many workers load as may at a time")
        instance = next(self._instances)
        name = f"{hello.node}:{hello.pid}"
        peer = RemotePeer(identity, instance, name, hello.node, hello.place, PeerState.LOADING, self._clock())
        self.peers[identity] = peer
        log.info("remote worker %s has connected", name)
        self.send(
            peer, pack_message(MessageKind.WELCOME, msgspec.structs.replace(self._welcome, instance=instance))
        )

    def _answer(self, peer: RemotePeer, message: WireMessage) -> None:
        kind = message.kind
        if kind is MessageKind.PONG:
            return
        if kind is MessageKind.FETCH and peer.state is PeerState.LOADING and self._files is not None:
            self._send_file(peer, read_body(message, FileRequest), self._files)
        elif kind is MessageKind.LOADED and peer.state is PeerState.LOADING:
            peer.model, peer.state = read_body(message, LoadedModel), PeerState.LOADED
            if self._dense is not None:
                self._warm_up(peer)
        elif kind is MessageKind.READY and peer.state is PeerState.WARMING:
            peer.state = PeerState.READY
            self._count_ready()
            log.info("remote worker %s is ready", peer.name)
            self.on_ready(peer)
        elif kind is MessageKind.FAILED:
            failed = read_body(message, Failure)
            found = Kind(failed.kind) if failed.kind in Kind._value2member_map_ else Kind.INTERNAL
            self.failure = ServeError(found, failed.message)
            log.error(
                "remote worker %s failed: %s%s",
                peer.name,
                failed.message,
                "\n" * bool(failed.trace) + failed.trace,
            )
            self.drop(peer, failed.message)
        else:
            raise ProtocolFault(f"{kind.name} while it was {peer.state.value}")

    def _warm_up(self, peer: RemotePeer) -> None:
        assert self._dense is not None
        first = next(iter(self.loaded)).model
        if peer.state is not PeerState.LOADED:
            return
        if peer.model != first:
            self.drop(peer, "it loaded other inputs or outputs than the others")
            return
        peer.state = PeerState.WARMING
        self.send(peer, pack_message(MessageKind.GO, Go(self._dense)))

    def _send_file(self, peer: RemotePeer, asked: FileRequest, files: ShippedFolder) -> None:
        try:
            data = files.read(asked)
        except OSError as error:
            log.error("a file of the version cannot be read: %s", error.strerror)
            data = b""
        self.send(peer, WireMessage(MessageKind.DATA, parts=(data,)).pack())

    def _reply(self, identity: bytes, kind: MessageKind, words: Words) -> None:
        """Send words to a peer that may be gone."""
        self.quiet = False
        try:
            self._socket.send_multipart([identity, *pack_message(kind, words)], self._zmq.NOBLOCK)
        except self._zmq.ZMQError:
            log.debug("a peer was gone before it could be told: %s", words.reason)
