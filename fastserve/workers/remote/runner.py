"""The remote runner: an ordinary worker of the server whose batches are run by remote workers.

    RemoteVersion    the face of a backend: `load` listens, and waits for the workers the version needs
    RemoteRunner     takes batches while a worker has room, sends each to who has least to do, lands answers

There is one queue, the version's ring: a batch is taken when a worker can have it, and not before. Batches
of a worker that is lost run once more elsewhere; a batch that has lost a worker already, or may not run
twice (`isolate_failures: false`), fails. With its last worker the runner ends, so that the owner's policy
for versions without a worker holds as it stands.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.backends import model_callbacks
from fastserve.backends.base import read_specs
from fastserve.errors import Kind, Reason, ServeError, pack_status
from fastserve.settings.model_options import RayPlacement, is_loopback, may_isolate, read_address, read_links
from fastserve.util.memory import gc_freeze, keep_freed_memory, share_heap
from fastserve.workers.arena import Arena
from fastserve.workers.control import ControlChannel, PeerGone
from fastserve.workers.group import Backoff
from fastserve.workers.loop import CONTROL_SPOKE
from fastserve.workers.remote.connections import (
    AT_WORK,
    GO_AFTER_S,
    RemoteBatch,
    RemotePeer,
    WorkerConnections,
)
from fastserve.workers.remote.files import ShippedFolder
from fastserve.workers.remote.keys import SideKey, make_keys, read_key
from fastserve.workers.remote.main import WorkerOrder
from fastserve.workers.remote.places import (
    LOOK_S,
    MOST_FAILED_STARTS,
    PlacerGone,
    PlacerLink,
    WorkerLaunch,
    WorkerPlaces,
)
from fastserve.workers.remote.protocol import (
    MessageKind,
    ProtocolFault,
    Welcome,
    WireMessage,
    batch_number,
    sendable_config,
)

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.tensor import TensorSpec

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 2
LOST = pack_status(Kind.UNAVAILABLE, Reason.WORKER_LOST)
DIED = "the worker process that ran this request died"
LATE = "the worker process that ran this request was ended: a batch ran longer than run_timeout_ms {}"
# Batches that wait at a worker's side hide the way there, and wait behind one queue more: worth it only as
# far as they take no longer than the way.
AHEAD_S, MOST_AHEAD = 0.002, 16
# From so many batches at a worker on, another is taken once it is full: those it has hide the way, and rows
# that wait meanwhile make one batch, as they do while a local worker is busy. A worker with more than half of
# what it may have gets no more: then several leave together, which costs little more than one.
FEW = 2
LATE_S = 0.01  # between two looks for batches that have run too long
SLICE_S = 0.5
REPORT_S = 1.0
RATE_S = 1.0  # of a measurement of the rows a second
EVERYWHERE = ("0.0.0.0", "[::]", "*")
Span = tuple[int, int]  # where a column begins in the arena, and the bytes of a row


class LastWorkerLost(Exception):
    """No remote worker of the version is left."""


class RemoteVersion:
    """The version as its remote workers have loaded it."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, name: str) -> None:
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self.signatures: dict[str, dict[str, Any]] = {}
        self.connections: WorkerConnections
        self._config, self._folder, self._name = config, version_dir, name
        self.placement = read_links(config)
        self.places: WorkerPlaces | None = None  # where Ray starts the workers

    def load(self) -> None:
        """Listen, and wait until the workers that the version needs have loaded it. Raises ServeError,
        ConfigError."""
        limit_s = float(self._config.get("load_timeout_s") or 300.0)
        until_s, first_s = time.monotonic() + 0.9 * limit_s, 0.0
        share_heap()  # with libzmq's threads, which receive what is freed here
        self.connections = self._open()
        wanted = self.placement.workers.min
        log.info("%s waits for %d remote workers at %s", self._name, wanted, self.connections.address)
        while len(self.connections.loaded) < wanted:
            self.turn()
            now = time.monotonic()
            first_s = first_s or (now if self.connections.loaded else 0.0)
            if first_s and now > first_s + GO_AFTER_S:
                log.warning(
                    "%s begins with %d of %d remote workers", self._name, len(self.connections.loaded), wanted
                )
                break
            if self.connections.failure is not None and not self.connections.peers:
                raise self.connections.failure
            starts = self.places.failed_starts if self.places is not None else 0
            if now > until_s or (starts >= MOST_FAILED_STARTS and not self.connections.peers):
                raise ServeError(Kind.UNAVAILABLE, self._missing_text())
            self.wait(SLICE_S)
        model = self.connections.loaded[0].model
        assert model is not None
        self.inputs, self.outputs = read_specs(model.inputs), read_specs(model.outputs)
        self.signatures = model.signatures

    def turn(self, queue_s: Callable[[], float] = lambda: 0.0, *, rare: bool = True) -> None:
        """Take what the workers say, and what Ray says of them; `queue_s` returns how long the rows that wait
        will take. Raises LastWorkerLost where Ray's driver is gone, and all workers with it. `rare`: see
        WorkerConnections."""
        self.connections.turn(rare=rare)
        if self.places is not None and (rare or self.places.due):
            try:
                self.places.turn(queue_s)
            except PlacerGone as gone:
                raise LastWorkerLost(
                    f"the placer has ended, and its remote workers with it: {gone}"
                ) from None

    @property
    def replacing(self) -> bool:
        """Whether workers are on their way although none may be left."""
        return self.places is not None and self.places.replacing

    def wait(self, timeout_s: float) -> None:
        """Wait until `turn` may have something to do."""
        if self.places is None:
            self.connections.wait(timeout_s)
        else:
            self.connections.wait(min(timeout_s, LOOK_S), *self.places.descriptors())

    def run(self, inputs: Any) -> Any:
        """Refuse: batches of a remote model go through its runner alone."""
        raise NotImplementedError

    def close(self) -> None:
        """Let the workers go."""
        if hasattr(self, "connections"):
            self.connections.close()
        if self.places is not None:
            self.places.close()

    def _open(self) -> WorkerConnections:
        placed = self.placement
        if isinstance(placed, RayPlacement):
            return self._open_places(placed)
        key = read_key(Path(placed.key), "server") if placed.key else None
        return self._listen(placed.listen, key)

    def _open_places(self, placed: RayPlacement) -> WorkerConnections:
        """Listen where workers on other nodes find this machine, and have the first workers placed. Raises
        ConfigError."""
        link = PlacerLink(self._config["placement"]["placer"])
        try:
            listen = placed.listen or f"{link.address}:0"
            host, _ = read_address(listen)
            server, worker = (None, None) if is_loopback(host) else make_keys()
            connections = self._listen(listen, server)
        except BaseException:
            link.close()
            raise
        port = connections.address.rpartition(":")[2]
        order = WorkerOrder(
            f"{link.address if host in EVERYWHERE else host}:{port}",
            key="",
            cache="",
            device="cuda:0" if placed.num_gpus else "",
            log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower(),
            once=True,
        )
        restarts = Backoff(
            float(self._config.get("restart_backoff_s") or Backoff.first_s),
            float(self._config.get("restart_backoff_max_s") or Backoff.cap_s),
        )
        key = msgspec.json.encode(worker) if worker is not None else b""
        self.places = WorkerPlaces(link, WorkerLaunch(order, key, placed, restarts), connections)
        return connections

    def _listen(self, listen: str, key: SideKey | None) -> WorkerConnections:
        placed = self.placement
        files = None if placed.path else ShippedFolder(self._folder)
        config = sendable_config(self._config)
        path = str(Path(placed.path) / self._folder.name) if placed.path else ""
        stamp = files.hash if files is not None else path
        welcome = Welcome(
            key=_key_of(stamp, config),
            name=self._name,
            version=self._folder.name,
            config=config,
            files="" if files is None else files.hash,
            path=path,
            heartbeat_s=placed.heartbeat_s,
            most_bytes=placed.max_answer_mb << 20,
            instance=0,
        )
        return WorkerConnections(listen, key, welcome, files, answer_bytes=welcome.most_bytes)

    def _missing_text(self) -> str:
        connections = self.connections
        reason = f": {self.places.trouble}" if self.places is not None and self.places.trouble else ""
        if connections.peers:
            text = "remote workers have connected, and none has loaded the model in time (load_timeout_s)"
            return f"{len(connections.peers)} {text}"
        return f"no remote worker has connected to {connections.address} in time (load_timeout_s){reason}"


def _key_of(stamp: str, config: Mapping[str, Any]) -> str:
    import hashlib

    return hashlib.sha256(stamp.encode() + msgspec.json.encode(config)).hexdigest()


def _suitable(run_s: float) -> int:
    """Return how many batches a worker gets at a time whose batches take `run_s`; 0: not known yet."""
    return min(max(int(AHEAD_S / run_s), 1), MOST_AHEAD) if run_s else 1


class RemoteRunner:
    """Runs batches of one arena on the remote workers of a model."""

    def __init__(
        self, arena: Arena, ring: BatchRing, model: RemoteVersion, config: Mapping[str, Any]
    ) -> None:
        self._arena, self._ring, self._connections = arena, ring, model.connections
        self._dense = arena.geometry.dense
        self._model = model
        self._in_flight = model.placement.in_flight
        self._retries = may_isolate(config)
        self._limit_ms = int(config["run_timeout_ms"])
        self._again: deque[tuple[int, int]] = deque()  # (slot, attempt) of batches whose worker was lost
        self._memory = memoryview(arena.memory)
        self._columns: dict[int, tuple[list[Span], list[Span]]] = {}
        self._report_s = self._late_s = 0.0
        self._rows, self._rows_per_s, self._rated_s = 0, 0.0, time.monotonic()
        self.flying = 0
        connections = self._connections
        connections.on_answer, connections.on_lost = self._land, self._lost

    @property
    def room(self) -> bool:
        """Whether a worker can have another batch."""
        return self._choose() is not None

    def take(self) -> bool:
        """Send batches that workers can have now. Returns whether one can have the next, of any size."""
        ring, peer = self._ring, self._choose()
        if self._again or peer is None or 2 * len(peer.flights) > self._most(peer):
            return False
        while peer is not None:
            if len(peer.flights) >= FEW and ring.queued() < ring.max_rows:
                break
            slot = ring.take()
            if slot < 0:
                break
            self._send(slot, 0, peer)
            peer = self._choose()
        self._connections.flush()
        return peer is not None and len(peer.flights) < FEW

    def run(self, slot: int) -> None:
        """Send a batch that was taken; it is published when its answer has landed."""
        self._send(slot, 0, self._choose())
        self._connections.flush()

    def turn(self, *, rare: bool = True) -> None:
        """Receive answers, notice losses, and send on what lost its worker. Raises LastWorkerLost. `rare`:
        see WorkerConnections."""
        self._model.turn(self._queue_s, rare=rare)
        now = time.monotonic()
        if self._limit_ms and self.flying and now >= self._late_s:
            self._late_s = now + LATE_S
            self._end_late(now)
        self._send_again()
        if not self._connections.ready and not self._model.replacing:
            raise LastWorkerLost("its last remote worker is lost")
        if now >= self._report_s:
            self._report_s = now + REPORT_S
            self._report()

    def _send_again(self) -> None:
        """Send batches that have lost a worker, each to one that has no other: what kills its worker takes
        nobody with it a second time."""
        while self._again:
            peer = self._choose()
            if peer is None or peer.flights:
                return
            self._send(*self._again.popleft(), peer)
            self._connections.flush()

    def drain(self) -> None:
        """Land every batch in flight. Raises LastWorkerLost."""
        while self.flying or self._again:
            self._model.wait(SLICE_S)
            self.turn()

    def _queue_s(self) -> float:
        """Return how long the rows that wait will take at the measured rate; 0 before there is one."""
        now = time.monotonic()
        if self._rows and now - self._rated_s >= RATE_S:
            self._rows_per_s = self._rows / (now - self._rated_s)
            self._rows, self._rated_s = 0, now
        return self._ring.queued() / self._rows_per_s if self._rows_per_s else 0.0

    def _choose(self) -> RemotePeer | None:
        """Return the worker with the fewest batches, of those that have room."""
        best, least = None, MOST_AHEAD
        for peer in self._connections.ready:
            flights = len(peer.flights)
            if flights < least and flights < self._most(peer):
                if not flights:
                    return peer
                best, least = peer, flights
        return best

    def _most(self, peer: RemotePeer) -> int:
        return self._in_flight or _suitable(peer.run_s)

    def _send(self, slot: int, attempt: int, peer: RemotePeer | None) -> None:
        """Have a batch leave for a worker, with the next flush; where its connection ends at that, it is
        given back. Without a worker it waits for one."""
        if peer is None:
            self._again.append((slot, attempt))
            return
        ring = self._ring
        leases = ring.leases(slot)
        if not leases:
            ring.publish(slot)  # everybody left
            return
        now, rows = time.monotonic(), ring.batch_rows(slot)
        number = batch_number(ring.seq(slot), slot, attempt)
        ring.start_run(slot)
        if self._dense:
            inputs, _ = self._columns.get(slot) or self._open_slot(slot)
            parts: list[Any] = [self._memory[at : at + rows * row_bytes] for at, row_bytes in inputs]
        else:
            parts = [ring.slab(offset, nbytes) if offset else b"" for _, _, offset, nbytes in leases]
        if not peer.flights:
            peer.head_s = now
        peer.flights[number] = RemoteBatch(number, slot, attempt, now)
        self.flying += 1
        table = [lease[:2] for lease in leases]
        message = WireMessage(MessageKind.BATCH, number, rows, self._limit_ms, 0, table, parts)
        self._connections.join(peer, message)

    def _land(self, peer: RemotePeer, message: WireMessage) -> None:
        flight = peer.flights.get(message.batch)
        if flight is None:
            return  # of a batch that was given to somebody else meanwhile: late, and refused
        slot, ring = flight.slot, self._ring
        if message.batch >> 32 != ring.seq(slot) & 0xFFFF_FFFF:
            raise ProtocolFault("an answer to another generation of its slot")
        self._take_answer(slot, message)  # raises, and then it is still in flight and given back
        del peer.flights[message.batch]
        self.flying -= 1
        now_ns = time.monotonic_ns()
        ran_ns = min(message.ran_ns, now_ns - int(flight.sent_s * 1e9))
        ran_s = max(ran_ns, 1) / 1e9
        peer.run_s += (ran_s - peer.run_s) / 8 if peer.run_s else ran_s
        peer.batches += 1
        peer.head_s = now_ns / 1e9
        self._rows += ring.batch_rows(slot)
        ring.end_run(slot, now_ns - ran_ns, now_ns)
        ring.publish(slot)

    def _take_answer(self, slot: int, message: WireMessage) -> None:
        """Check all of an answer, then write it. Raises ProtocolFault, and then nothing was written."""
        table, parts = message.table, message.parts
        if message.word:
            if len(parts) != 1:
                raise ProtocolFault("a failure without its text")
            self._ring.fail(slot, message.word, bytes(parts[0]).decode("utf-8", "replace"))
            return
        if self._dense:
            self._take_columns(slot, table, parts)
            return
        if len(table) != len(parts):
            raise ProtocolFault("an answer with slabs of another number than its requests")
        leases = {row for row, _, _, _ in self._ring.leases(slot)}
        for (row, status), part in zip(table, parts, strict=True):
            if row in leases:
                self._answer_lease(slot, row, status, part)

    def _take_columns(self, slot: int, table: Sequence[tuple[int, int]], parts: Sequence[Any]) -> None:
        rows = self._ring.batch_rows(slot)
        _, outputs = self._columns.get(slot) or self._open_slot(slot)
        if len(parts) != len(outputs) + len(table):
            raise ProtocolFault("an answer with columns of another number than the model's outputs")
        columns = list(zip(outputs, parts[: len(outputs)], strict=True))
        for (_, row_bytes), part in columns:
            if len(part) != rows * row_bytes:
                raise ProtocolFault(f"a column of {len(part)} bytes instead of {rows * row_bytes}")
        for (at, _), part in columns:
            self._memory[at : at + len(part)] = part
        if not table:
            return
        leases = {row for row, _, _, _ in self._ring.leases(slot)}
        for (row, status), text in zip(table, parts[len(outputs) :], strict=True):
            if row in leases:
                self._answer_lease(slot, row, status or Kind.INTERNAL.value, text)

    def _answer_lease(self, slot: int, row: int, status: int, data: Any) -> None:
        ring, nbytes = self._ring, len(data)
        offset = ring.allocate_slab(nbytes) if nbytes else 0
        if offset:
            ring.slab(offset, nbytes, True)[:] = data
        else:
            nbytes, status = 0, status or Kind.RESOURCE_EXHAUSTED.value
        ring.answer_lease(slot, row, status, offset, nbytes)

    def _lost(self, peer: RemotePeer, reason: str) -> None:
        flights, peer.flights = list(peer.flights.values()), {}
        self.flying -= len(flights)
        others = bool(self._connections.ready) or self._model.replacing
        for flight in flights:
            attempt = flight.attempt + 1
            if attempt < MOST_ATTEMPTS and self._retries and others:
                self._again.append((flight.slot, attempt))
            elif others or flight.attempt:
                self._fail(flight.slot, LOST, DIED)
            # else: the runner ends, and the owner fails it

    def _fail(self, slot: int, status: int, text: str) -> None:
        self._ring.fail(slot, status, text)
        self._ring.publish(slot)

    def _end_late(self, now: float) -> None:
        """End workers whose batch has run too long. It fails: what hung would hang the next."""
        for peer in list(self._connections.peers.values()):
            if peer.flights and (now - peer.head_s) * 1000 > self._limit_ms:
                number = next(iter(peer.flights))
                hung = peer.flights.pop(number)
                self.flying -= 1
                self._fail(hung.slot, Kind.DEADLINE_EXCEEDED.value, LATE.format(self._limit_ms))
                self._connections.drop(peer, f"a batch ran longer than run_timeout_ms {self._limit_ms}")

    def _open_slot(self, slot: int) -> tuple[list[Span], list[Span]]:
        spans = [
            [self._ring.column_span(slot, number, output) for number in range(len(specs))]
            for specs, output in ((self._model.inputs, False), (self._model.outputs, True))
        ]
        self._columns[slot] = spans[0], spans[1]
        return self._columns[slot]

    def close(self) -> None:
        """Let go of the arena's memory."""
        self._memory.release()

    def _report(self) -> None:
        """Send the owner who the workers are, and what each has done since the last time."""
        nodes: dict[str, tuple[int, int]] = {}
        for peer in filter(lambda peer: peer.state in AT_WORK, self._connections.peers.values()):
            workers, batches = nodes.get(peer.node, (0, 0))
            nodes[peer.node] = workers + 1, batches + peer.batches
            peer.batches = 0
        places = self._model.places
        model_callbacks.notify("remote", nodes=nodes, wanted=places.wanted if places is not None else 0)


def serve_remote(
    model: RemoteVersion,
    control: ControlChannel,
    config: Mapping[str, Any],
    message: Mapping[str, Any],
    fds: list[int],
) -> None:
    """Join the arena, let the workers warm up, say ready, and send batches until told to stop. Raises
    LastWorkerLost."""
    arena, connections = Arena.join(message, fds), model.connections
    watch, runner = select.epoll(), None
    try:
        placer = [] if model.places is None else model.places.descriptors()
        for fd in (control.fileno(), *placer, *connections.descriptors()):
            watch.register(fd, select.EPOLLIN)
        ring = arena.ring(worker=int(message["worker"]), control=watch.fileno())
        runner = RemoteRunner(arena, ring, model, config)
        connections.go(dense=arena.geometry.dense)
        _await_ready(model, len(connections.loaded))
        gc_freeze()
        keep_freed_memory()  # for the next answer
        control.send({"op": "ready"})
        _send_batches(ring, runner, connections, watch, control)
    finally:
        watch.close()
        connections.close()  # first: it may still read the arena's memory
        if runner is not None:
            runner.close()
        arena.close()


def _await_ready(model: RemoteVersion, wanted: int) -> None:
    """Wait until every worker that had loaded is warm, or lost."""
    connections = model.connections
    while len(connections.ready) < min(wanted, len(connections.loaded)) or not connections.ready:
        model.wait(SLICE_S)
        model.turn()
        if not connections.loaded:
            raise connections.failure or ServeError(
                Kind.UNAVAILABLE, "its remote workers were lost while they warmed up"
            )


def _told_to_stop(control: ControlChannel) -> bool:
    try:
        return bool(control.receive().message["op"] == "stop")
    except PeerGone:
        return True


def _send_batches(
    ring: BatchRing,
    runner: RemoteRunner,
    connections: WorkerConnections,
    watch: select.epoll,
    control: ControlChannel,
) -> None:
    of_batches, of_control = connections.descriptors()[0], control.fileno()
    rare = True
    while True:
        runner.turn(rare=rare)
        wanting, rare = runner.take(), False
        if not connections.quiet:
            continue
        left_s = min(max(connections.next_beat_s - time.monotonic(), 0.0), SLICE_S)
        if wanting:
            slot = ring.take_or_wait(0, int(left_s * 1e9))
            if slot >= 0:
                runner.run(slot)
            if slot != CONTROL_SPOKE:
                continue
            left_s = 0.0
        spoke = {fd for fd, _ in watch.poll(left_s)}
        rare = not spoke <= {of_batches}
        if of_control in spoke and _told_to_stop(control):
            runner.drain()
            return
