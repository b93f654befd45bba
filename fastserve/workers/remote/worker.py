"""One remote worker: a process that connects, loads the version it gets, and runs its batches.

    connect -> HELLO -> WELCOME -> files -> load -> LOADED -> GO -> warm up -> READY -> BATCH, ANSWER ...
       ^                                                                                        |
       +------------------- connection lost: a new one; the loaded model stays -----------------+

The backend and its runner are those of a local worker, unchanged: a batch is written into an arena of this
process's own, as a front process would, and the ordinary runner pads it, runs it, and isolates what fails.

Heartbeats are libzmq's, in a thread without Python's lock, so that a model may hold it for as long as it
likes. A batch beyond run_timeout_ms ends the process by a signal of the kernel, for the same reason.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastserve
from fastserve._ext.remote_batches import (
    COPIED_BYTES,
    PROTOCOL,
    IncomingBatches,
    MessageKind,
    ProtocolFault,
    WireMessage,
    read_messages,
)
from fastserve.backends import Backend, create
from fastserve.backends.base import SupportsSignatures, check_capabilities, write_specs
from fastserve.backends.cancellation import refresh_with
from fastserve.backends.model_errors import explain, kind_of
from fastserve.errors import ConfigError, Kind
from fastserve.util.logs import raw_trace
from fastserve.util.memory import keep_freed_memory
from fastserve.workers.arena import Arena, WorkerContext, plan_geometry
from fastserve.workers.loop import Runner, answer, make_runner, warm_up
from fastserve.workers.process import worker_environment
from fastserve.workers.remote.connections import MISSED, QUEUED_MESSAGES
from fastserve.workers.remote.files import fetch_folder
from fastserve.workers.remote.keys import SideKey, import_zmq, secure_worker
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
Part = bytes | bytearray | memoryview
BatchLease = tuple[int, int]  # of a request in this process's arena, and its rows

RETRY_S = 0.2
TURN_S = 0.25  # between two looks whether it was told to stop
ANSWER_S = 5.0  # for a server that listens to say something
ENVIRONMENT_MARK = "_FASTSERVE_ENVIRONMENT"
WATCHDOG_S = 1.0  # beyond run_timeout_ms, after which the runner has given the batch up
MOST_FRAMES_BYTES = 1 << 32
HELD_S, MOST_HELD = 0.001, 8  # answers are held for those of batches that wait already: so long, so many
ALARM_S = 0.25  # between two settings of the watchdog, while batches follow each other


class SessionEnded(Exception):
    """The connection is of no use any more; `wait_s` before the next."""

    def __init__(self, reason: str, wait_s: float = RETRY_S) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class OtherEnvironment(Exception):
    """The process has to begin anew with these variables."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__("the model has an environment of its own")
        self.environment = environment


class LoadFailed(Exception):
    """The version cannot be run here: this process ends, and another may try."""


class RunningWatch:
    """The messages that come while a model runs, if the model asks who still waits: it may ask in any thread,
    and libzmq's sockets are one thread's at a time."""

    def __init__(self, receive: Callable[[], None]) -> None:
        self._receive, self._lock, self._begun = receive, threading.Lock(), False
        refresh_with(self._look)

    def __enter__(self) -> None:
        self._begun = True

    def __exit__(self, *raised: object) -> None:
        with self._lock:  # who looks just now has the socket
            self._begun = False

    def _look(self) -> None:
        with self._lock:
            if self._begun:
                self._receive()


class LocalArena:
    """An arena of this process alone, of which it is the front and the worker."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], *, dense: bool) -> None:
        geometry = plan_geometry(config, backend.inputs, backend.outputs, parted=not dense)
        arena = self._arena = Arena.create(geometry)
        front, self._ring = arena.ring(front=0), arena.ring(worker=0)
        self._front, self.dense = front, geometry.dense
        sizes = len(backend.inputs), len(backend.outputs)
        self._batches = IncomingBatches(front, memoryview(arena.memory), *sizes, dense=geometry.dense)
        self._runner: Runner = make_runner(WorkerContext(arena, self._ring, backend, config))
        self._finish: Callable[[], None] | None = getattr(self._runner, "drain", None)
        self._held: deque[tuple[Any, list[BatchLease]]] = deque()  # outputs on their way, and their leases
        self._running, self._number = list[BatchLease](), 0  # the leases of the batch that runs or ran last
        warm_up(self._runner, arena, backend, config)

    def run(self, batch: WireMessage, watch: RunningWatch) -> tuple[list[Part], list[BatchLease]]:
        """Run one batch, as long as `watch` hears who still waits; returns the frames of its answer, and the
        leases to be released once that was sent. Raises ProtocolFault."""
        leases = self._batches.put(batch)
        slot = leases[0][0] >> 16
        if self._batches.notes:
            self._note_traces(slot)
        if self._ring.take() != slot:
            raise ProtocolFault("a batch that did not come to be one of its own")
        self._running, self._number = leases, batch.batch
        with watch:
            answer(self._ring, self._runner, slot)
            if self._finish is not None:
                self._finish()
        return self._batches.collect(batch, slot, leases), leases

    def keep(self, number: int, waiting: Collection[int], arrived: Iterable[WireMessage]) -> None:
        """Of this batch, which runs or has arrived, only requests with these first rows still wait. One that
        was answered already is over."""
        if number == self._number:
            self._leave(waiting)
        for batch in arrived:
            if batch.batch == number and batch.kind is MessageKind.BATCH:
                kept = [at for at, (row, _) in enumerate(batch.table) if row in waiting]
                if not self.dense and len(batch.parts) >= len(batch.table):
                    batch.parts = [*(batch.parts[at] for at in kept), *batch.parts[len(batch.table) :]]
                batch.table = [batch.table[at] for at in kept]

    def _leave(self, waiting: Collection[int]) -> None:
        for lease in [lease for lease in self._running if lease[0] & 0xFFFF not in waiting]:
            if self._front.drop(*lease):
                self._running.remove(lease)

    def release(self, leases: Sequence[BatchLease]) -> None:
        """Release a batch whose answer was sent."""
        for lease, rows in leases:
            self._front.release(lease, rows)

    def forget(self) -> None:
        """Read what the ring says of batches that are done, which `run` knows: it keeps only so much."""
        self._front.drain()

    def release_sent(self, tracker: Any, leases: list[BatchLease]) -> None:
        """Release a batch whose answer is on its way, once it has been sent."""
        self._held.append((tracker, leases))
        while self._held and (self._held[0][0] is None or self._held[0][0].done):
            self.release(self._held.popleft()[1])

    def close(self) -> None:
        """Close the arena."""
        getattr(self._runner, "close", lambda: None)()
        self._held.clear()
        self._batches.close()
        self._arena.close()

    def _note_traces(self, slot: int) -> None:
        try:
            self._arena.traces.write_packed(0, slot, self._front.seq(slot), bytes(self._batches.notes))
        except ValueError as fault:
            raise ProtocolFault(str(fault)) from None


@dataclass(slots=True)
class LoadedVersion:
    """The version that this process has loaded, and keeps over connections."""

    key: str
    backend: Backend
    config: dict[str, Any]
    arena: LocalArena | None = None


class RemoteWorker:
    """The process's one worker. `run` returns when it was told to stop; `device` is where its models compute,
    `place` and `node` are what its runner knows it by."""

    def __init__(
        self,
        connect: str,
        key: SideKey | None,
        cache: Path,
        *,
        device: str = "",
        place: int = 0,
        node: str = "",
    ) -> None:
        self._zmq = import_zmq()
        self._connect, self._key, self._cache, self._device = connect, key, cache, device
        self._context = self._zmq.Context()
        self._socket: Any = None
        self._arrived: deque[WireMessage] = deque()
        self._fault: Exception | None = None  # of what came while it ran
        self._running = RunningWatch(self._receive_meanwhile)
        self._monitor: Any = None
        self._loaded: LoadedVersion | None = None
        self._silence_s = ANSWER_S
        self._stopping = False
        self._said = ""
        self._place, self._node = place, node or sockets.gethostname()

    def stop(self, *_: Any) -> None:
        """End after the batch at hand; a handler of signals."""
        self._stopping = True

    def run(self, *, once: bool = False) -> None:
        """Serve one connection after the other until `stop`, or the first that ends if `once`. Raises
        LoadFailed."""
        try:
            while not self._stopping:
                try:
                    self._open()
                    self._serve()
                except (SessionEnded, ProtocolFault) as ended:
                    self._end(ended, once=once)
                    if once:
                        return
                finally:
                    self._close_socket()
        finally:
            if self._loaded is not None:
                self._unload(self._loaded)
            self._context.term()

    def _end(self, ended: Exception, *, once: bool) -> None:
        if str(ended) != self._said:  # once, however often it happens
            self._said = str(ended)
            log.warning("%s: %s", self._connect, ended)
        if not once and not self._stopping:
            time.sleep(ended.wait_s if isinstance(ended, SessionEnded) else ANSWER_S)

    def _open(self) -> None:
        zmq = self._zmq
        made = self._socket = self._context.socket(zmq.DEALER)
        made.linger = 0
        made.sndhwm = made.rcvhwm = QUEUED_MESSAGES
        made.rcvtimeo = int(TURN_S * 1000)
        made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = (
            1000,
            1000 * (MISSED - 1),
            1000 * MISSED,
        )
        made.maxmsgsize = MOST_FRAMES_BYTES
        made.reconnect_ivl = int(RETRY_S * 1000)
        if self._key is not None:
            secure_worker(made, self._key)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failed |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = made.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | failed)
        made.connect(f"tcp://{self._connect}")
        known = self._loaded.key if self._loaded else ""
        hello = Hello(fastserve.__version__, PROTOCOL, self._node, os.getpid(), known, self._place)
        made.send_multipart(pack_message(MessageKind.HELLO, hello))

    def _close_socket(self) -> None:
        self._arrived.clear()
        self._fault = None
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close()  # after its linger: what was sent last may be on its way
            self._socket = None
        if self._monitor is not None:
            self._monitor.close(0)
            self._monitor = None

    def _receive(self, limit_s: float) -> WireMessage:
        """The next message that is no PING. Raises SessionEnded after `limit_s` without any message."""
        until = time.monotonic() + limit_s
        while True:
            if self._stopping:
                raise SessionEnded("it was told to stop")
            if self._fault is not None:
                raise self._fault
            if self._arrived:
                message = self._arrived.popleft()
            else:
                try:
                    self._take(receive_frames(self._socket, 0))  # waits for TURN_S
                except self._zmq.Again:
                    if time.monotonic() >= until:
                        raise SessionEnded(self._silence()) from None
                continue
            if message.kind is MessageKind.PING:
                until = time.monotonic() + limit_s
                self._send(pack_message(MessageKind.PONG))
                continue
            if message.kind in (MessageKind.BYE, MessageKind.REFUSED):
                refused = message.kind is MessageKind.REFUSED
                raise SessionEnded(
                    f"the server said: {read_body(message, Words).reason}", ANSWER_S if refused else RETRY_S
                )
            return message

    def _take(self, frames: Sequence[Any]) -> None:
        """Keep messages for later, but for what they say of batches that have come. Raises ProtocolFault."""
        for message in read_messages(frames):
            if message.kind is MessageKind.WAITING:
                self._leave(message)
            else:
                self._arrived.append(message)

    def _receive_meanwhile(self) -> None:
        """Take what has come while the model runs. PINGs of a worker that runs need no answer."""
        while self._fault is None:
            try:
                self._take(receive_frames(self._socket, self._zmq.NOBLOCK))
            except self._zmq.Again:
                return
            except ProtocolFault as fault:  # not the model's: raised once it has run
                self._fault = fault

    def _leave(self, told: WireMessage) -> None:
        if self._loaded is not None and self._loaded.arena is not None:
            self._loaded.arena.keep(told.batch, {row for row, _ in told.table}, self._arrived)

    def _silence(self) -> str:
        """Say why nobody has answered, by what happened to the connection."""
        zmq, events = self._zmq, set()
        while self._monitor.poll(0):
            data = self._monitor.recv_multipart()
            events.add(int.from_bytes(data[0][:2], "little"))
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in events:
            return "the server turned this key away: is it worker.key of the keys whose server.key it has?"
        if zmq.EVENT_CONNECTED in events and self._said != "":
            return "connected again, and no answer: are the keys of one pair, and is the port the server's?"
        if zmq.EVENT_CONNECTED in events:
            return "connected, and no answer: one side has a key and the other none, or they are of two pairs"
        return "nobody listens there yet"

    def _send(self, frames: Sequence[Any], *, copy: bool = True) -> Any:
        try:
            return self._socket.send_multipart(frames, self._zmq.NOBLOCK, copy=copy, track=not copy)
        except self._zmq.Again:
            raise SessionEnded("the connection is lost") from None

    def _serve(self) -> None:
        greeted = self._receive(ANSWER_S)
        if greeted.kind is not MessageKind.WELCOME:
            raise ProtocolFault(f"{greeted.kind.name} instead of WELCOME")
        welcome = read_body(greeted, Welcome)
        self._said = ""
        self._silence_s = MISSED * welcome.heartbeat_s + 1.0
        loaded = self._load(welcome)
        signatures = loaded.backend.signatures if isinstance(loaded.backend, SupportsSignatures) else {}
        specs = write_specs(loaded.backend.inputs), write_specs(loaded.backend.outputs)
        self._send(
            pack_message(MessageKind.LOADED, LoadedModel(*specs, {k: dict(v) for k, v in signatures.items()}))
        )
        told = self._receive_late()
        if told.kind is not MessageKind.GO:
            raise ProtocolFault(f"{told.kind.name} instead of GO")
        arena = self._warm_up(loaded, dense=read_body(told, Go).dense)
        self._send(pack_message(MessageKind.READY))
        log.info("%s/%s is ready", welcome.name, welcome.version)
        self._answer_batches(arena, int(loaded.config["run_timeout_ms"]), welcome.most_bytes)

    def _receive_late(self) -> WireMessage:
        return self._receive(self._silence_s)

    def _answer_batches(self, arena: LocalArena, limit_ms: int, most_bytes: int) -> None:
        answers, since_s, alarm_s = list[Part](), 0.0, 0.0
        while True:
            batch = self._next_batch(answers)
            now = time.monotonic()
            since_s = since_s if answers else now
            if limit_ms and now > alarm_s:  # the kernel's: a model that hangs may hold Python's lock
                signal.setitimer(signal.ITIMER_REAL, limit_ms / 1000 + WATCHDOG_S)
                alarm_s = now + ALARM_S
            try:
                frames, leases = arena.run(batch, self._running) if batch.table else (_left(batch), [])
            except ProtocolFault:
                self._drop_arena()  # with what was half written into it
                raise
            if len(frames) > 1 and sum(map(len, frames)) > most_bytes:
                frames = _too_large(batch, most_bytes)
            del batch
            if len(frames) == 1:
                answers.append(frames[0])
                arena.release(leases)
            else:
                arena.release_sent(self._send(frames, copy=False), leases)
            if limit_ms and not self._arrived:
                signal.setitimer(signal.ITIMER_REAL, 0)
                alarm_s = 0.0
            if not self._arrived or len(answers) >= MOST_HELD or time.monotonic() > since_s + HELD_S:
                self._send_joined(answers)
                arena.forget()

    def _next_batch(self, answers: list[Part]) -> WireMessage:
        try:
            message = self._receive_late()
        except SessionEnded:
            self._send_joined(answers)  # it was told to stop while others waited
            raise
        if message.kind is not MessageKind.BATCH:
            raise ProtocolFault(f"{message.kind.name} while it was ready")
        return message

    def _send_joined(self, answers: list[Part]) -> None:
        """Send the answers that were held, in frames of a bounded size."""
        first, nbytes = 0, 0
        for number, one in enumerate(answers, 1):
            nbytes += len(one)
            if nbytes >= COPIED_BYTES or number == len(answers):
                self._send([b"".join(answers[first:number])])
                first, nbytes = number, 0
        answers.clear()

    def _drop_arena(self) -> None:
        if self._loaded is not None and self._loaded.arena is not None:
            self._loaded.arena.close()
            self._loaded.arena = None

    def _load(self, welcome: Welcome) -> LoadedVersion:
        """Load the version, unless it is the one that is loaded. Raises LoadFailed."""
        if self._loaded is not None and self._loaded.key == welcome.key:
            return self._loaded
        if self._loaded is not None:
            before, self._loaded = self._loaded, None
            self._unload(before)
        self._need_environment(welcome.config)
        folder = self._folder(welcome)
        try:
            config = {**welcome.config, **({"device": self._device} if self._device else {})}
            backend = create({"name": welcome.name, **config}, folder, welcome.instance)
            try:
                backend.load()
                check_capabilities(backend)
            except BaseException:
                backend.close()
                raise
        except BaseException as error:  # a model may raise anything, sys.exit() included
            self._fail(error, str(folder))
        self._loaded = LoadedVersion(welcome.key, backend, config)
        return self._loaded

    def _need_environment(self, config: Mapping[str, Any]) -> None:
        """Raises OtherEnvironment unless this process began with the variables of the model: libraries read
        them when they are imported."""
        wanted = worker_environment(config.get("threads", 1), config.get("env") or {})
        mark = hashlib.sha256(
            repr((config.get("threads", 1), sorted((config.get("env") or {}).items()))).encode()
        )
        if os.environ.get(ENVIRONMENT_MARK) != mark.hexdigest():
            raise OtherEnvironment({**wanted, ENVIRONMENT_MARK: mark.hexdigest()})

    def _folder(self, welcome: Welcome) -> Path:
        if welcome.path:
            if not Path(welcome.path).is_dir():
                self._fail(ConfigError(f"placement: path: {welcome.path} is no folder here"), "")
            return Path(welcome.path)
        try:
            return fetch_folder(welcome.files, self._cache, self._fetch)
        except OSError as error:
            self._fail(ConfigError(f"the model's files cannot be kept: {error.strerror}"), "")
            raise AssertionError from error  # not reached

    def _fetch(self, asked: FileRequest) -> bytes:
        self._send(pack_message(MessageKind.FETCH, asked))
        found = self._receive_late()
        if found.kind is not MessageKind.DATA or len(found.parts) != 1:
            raise ProtocolFault(f"{found.kind.name} instead of a file's bytes")
        return bytes(found.parts[0])

    def _warm_up(self, loaded: LoadedVersion, *, dense: bool) -> LocalArena:
        if loaded.arena is not None and loaded.arena.dense == dense:
            return loaded.arena
        try:
            loaded.arena = LocalArena(loaded.backend, loaded.config, dense=dense)
        except BaseException as error:
            self._fail(error, "")
        assert loaded.arena is not None
        keep_freed_memory()  # for the next batch and its arrays
        return loaded.arena

    def _fail(self, error: BaseException, folder: str) -> None:
        """Tell the server, and end. Raises LoadFailed."""
        trace = "" if isinstance(error, ConfigError) else raw_trace(error)
        failure = Failure(explain(error, folder)[:60_000], kind_of(error).value, trace[-60_000:])
        self._socket.linger = 2000  # it is the last message
        self._send(pack_message(MessageKind.FAILED, failure))
        raise LoadFailed(failure.message) from error

    def _unload(self, loaded: LoadedVersion) -> None:
        if loaded.arena is not None:
            loaded.arena.close()
        try:
            loaded.backend.close()
        except Exception:
            log.exception("the model failed to close")


def _left(batch: WireMessage) -> list[Part]:
    """Answer a batch whose clients have left before it could run."""
    return _failed(batch, Kind.CANCELLED, "nobody waits for it any more")


def _too_large(batch: WireMessage, most_bytes: int) -> list[Part]:
    text = f"the outputs of this batch have more than {most_bytes >> 20} MB (max_answer_mb of placement)"
    return _failed(batch, Kind.RESOURCE_EXHAUSTED, text)


def _failed(batch: WireMessage, kind: Kind, text: str) -> list[Part]:
    return WireMessage(MessageKind.ANSWER, batch.batch, batch.rows, kind.value, parts=[text.encode()]).pack()
