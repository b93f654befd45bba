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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve._ext.remote_batches import MessageKind, OutgoingBatches, RemotePeer, WireMessage
from fastserve.backends import model_callbacks
from fastserve.backends.base import read_specs
from fastserve.errors import Kind, Reason, ServeError, pack_status
from fastserve.settings.model_options import RayPlacement, is_loopback, may_isolate, read_address, read_links
from fastserve.util.memory import gc_freeze, keep_freed_memory, share_heap
from fastserve.workers.arena import Arena
from fastserve.workers.control import ControlChannel, PeerGone
from fastserve.workers.group import Backoff
from fastserve.workers.loop import CONTROL_SPOKE
from fastserve.workers.pinning import PRIORITY
from fastserve.workers.remote.connections import (
    AT_WORK,
    GO_AFTER_S,
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
    Welcome,
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
LATE_S = 0.01  # between two looks for batches that have run too long
LOOK_AFTER_S = 0.02  # a batch that runs longer is looked at as often: have clients of it left?
SLICE_S = 0.5
REPORT_S = 1.0
RATE_S = 1.0  # of a measurement of the rows a second
EVERYWHERE = ("0.0.0.0", "[::]", "*")


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


class RemoteRunner:
    """Runs batches of one arena on the remote workers of a model."""

    def __init__(
        self, arena: Arena, ring: BatchRing, model: RemoteVersion, config: Mapping[str, Any]
    ) -> None:
        self._arena, self._ring, self._connections = arena, ring, model.connections
        self._model = model
        self._retries = may_isolate(config)
        self._limit_ms = int(config["run_timeout_ms"])
        self._again: deque[tuple[int, int]] = deque()  # (slot, attempt) of batches whose worker was lost
        self._batches = OutgoingBatches(
            ring,
            memoryview(arena.memory),
            len(model.inputs),
            len(model.outputs),
            dense=arena.geometry.dense,
            connections=model.connections,
            notes=(arena.traces, *arena.traces.layout),
            in_flight=model.placement.in_flight,
            limit_ms=int(config["run_timeout_ms"]),
            lost_status=Kind.RESOURCE_EXHAUSTED.value,
        )
        self._report_s = self._late_s = self._look_s = 0.0
        self._rows_per_s, self._rated_s = 0.0, time.monotonic()
        connections = self._connections
        connections.on_answer, connections.on_lost = self._batches.land, self._lost

    @property
    def room(self) -> bool:
        """Whether a worker can have another batch."""
        return self._batches.choose(self._connections.ready) is not None

    @property
    def flying(self) -> int:
        """The number of batches at workers."""
        return self._batches.flying

    def take(self) -> bool:
        """Send batches that workers can have now. Returns whether one can have the next, of any size."""
        if self._again:
            return False
        wanting = self._batches.take(self._connections.ready)
        self._connections.flush()
        return wanting

    def run(self, slot: int) -> None:
        """Send a batch that was taken; it is published when its answer has landed."""
        peer = self._batches.choose(self._connections.ready)
        if peer is None:
            self._again.append((slot, 0))
            return
        self._batches.send(slot, 0, peer)
        self._connections.flush()

    def turn(self, *, rare: bool = True) -> None:
        """Receive answers, notice losses, and send on what lost its worker. Raises LastWorkerLost. `rare`:
        see WorkerConnections."""
        self._model.turn(self._queue_s, rare=rare)
        now = time.monotonic()
        if self._limit_ms and self.flying and now >= self._late_s:
            self._late_s = now + LATE_S
            self._end_late(now)
        if self.flying and now >= self._look_s:
            self._look_s = now + LOOK_AFTER_S
            self._tell_who_waits(now)
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
            peer = self._batches.choose(self._connections.ready)
            if peer is None or peer.flights:
                return
            self._batches.send(*self._again.popleft(), peer)
            self._connections.flush()

    def drain(self) -> None:
        """Land every batch in flight. Raises LastWorkerLost."""
        while self.flying or self._again:
            self._model.wait(SLICE_S)
            self.turn()

    def _queue_s(self) -> float:
        """Return how long the rows that wait will take at the measured rate; 0 before there is one."""
        now = time.monotonic()
        rows = self._batches.rows
        if rows and now - self._rated_s >= RATE_S:
            self._rows_per_s = rows / (now - self._rated_s)
            self._batches.rows, self._rated_s = 0, now
        return self._ring.queued() / self._rows_per_s if self._rows_per_s else 0.0

    def _lost(self, peer: RemotePeer, reason: str) -> None:
        flights, peer.flights = list(peer.flights.values()), {}
        self._batches.flying -= len(flights)
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
                self._batches.flying -= 1
                self._fail(hung.slot, Kind.DEADLINE_EXCEEDED.value, LATE.format(self._limit_ms))
                self._connections.drop(peer, f"a batch ran longer than run_timeout_ms {self._limit_ms}")

    def _tell_who_waits(self, now: float) -> None:
        """Tell workers which requests of their batches still wait, where others have left. Short batches are
        over before that would help."""
        for peer in list(self._connections.peers.values()):
            for flight in list(peer.flights.values()):
                if now - flight.sent_s < LOOK_AFTER_S or peer.identity not in self._connections.peers:
                    continue
                table = [lease[:2] for lease in self._ring.leases(flight.slot)]
                if len(table) < flight.requests:
                    flight.requests = len(table)
                    message = WireMessage(MessageKind.WAITING, flight.number, table=table)
                    self._connections.send(peer, message.pack())

    def close(self) -> None:
        """Let go of the arena's memory."""
        self._batches.close()

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
        PRIORITY.step_forward()
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
        longest_s = LOOK_AFTER_S if runner.flying else SLICE_S
        left_s = min(max(connections.next_beat_s - time.monotonic(), 0.0), longest_s)
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
