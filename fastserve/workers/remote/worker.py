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
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastserve
from fastserve.backends import Backend, create
from fastserve.backends.base import SupportsSignatures, check_capabilities, write_specs
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
    COPIED_BYTES,
    PROTOCOL,
    Failure,
    FileRequest,
    Go,
    Hello,
    LoadedModel,
    MessageKind,
    ProtocolFault,
    Welcome,
    WireMessage,
    Words,
    pack_message,
    read_body,
    read_messages,
    receive_frames,
)

log = logging.getLogger(__name__)

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


class LocalArena:
    """An arena of this process alone, of which it is the front and the worker."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], *, dense: bool) -> None:
        geometry = plan_geometry(config, backend.inputs, backend.outputs, parted=not dense)
        self._arena = Arena.create(geometry)
        self._front, self._ring = self._arena.ring(front=0), self._arena.ring(worker=0)
        self._memory = memoryview(self._arena.memory)
        self._runner: Runner = make_runner(WorkerContext(self._arena, self._ring, backend, config))
        self._inputs, self._outputs = len(backend.inputs), len(backend.outputs)
        self._spans: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        self._finish: Callable[[], None] = getattr(self._runner, "drain", lambda: None)
        self._held: deque[tuple[Any, list[tuple[int, int]]]] = (
            deque()
        )  # outputs on their way, and their leases
        self.dense = geometry.dense
        warm_up(self._runner, self._arena, backend, config)

    def run(self, batch: WireMessage) -> tuple[WireMessage, list[tuple[int, int]]]:
        """Run one batch; returns its answer, and the leases to be released once that was sent. Raises
        ProtocolFault."""
        leases, wanted = self._put(batch.rows, batch.table, batch.parts)
        slot = leases[0][0] >> 16
        if self._ring.take() != slot:
            raise ProtocolFault("a batch that did not come to be one of its own")
        answer(self._ring, self._runner, slot)
        self._finish()
        _, _, run_ns, ran_ns, _ = self._front.times_ns(slot)
        found = WireMessage(MessageKind.ANSWER, batch.batch, batch.rows, ran_ns=max(ran_ns - run_ns, 0))
        self._collect(found, slot, wanted)
        return found, wanted

    def release(self, leases: Sequence[tuple[int, int]]) -> None:
        """Release a batch whose answer was sent."""
        for lease, rows in leases:
            self._front.release(lease, rows)

    def forget(self) -> None:
        """Read what the ring says of batches that are done, which `run` knows: it keeps only so much."""
        self._front.drain()

    def release_sent(self, tracker: Any, leases: list[tuple[int, int]]) -> None:
        """Release a batch whose answer is on its way, once it has been sent."""
        self._held.append((tracker, leases))
        while self._held and (self._held[0][0] is None or self._held[0][0].done):
            self.release(self._held.popleft()[1])

    def close(self) -> None:
        """Close the arena."""
        getattr(self._runner, "close", lambda: None)()
        self._held.clear()
        self._memory.release()
        self._arena.close()

    def _put(
        self, rows: int, table: Sequence[tuple[int, int]], parts: Sequence[Any]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Write a batch as a front would. Each request is a lease, and so is what lies between them: here,
        too, nobody waits for rows whose caller has left. Returns all leases, and those of requests."""
        if not 1 <= rows <= self._ring.max_rows or not table or len(table) > rows:
            raise ProtocolFault(f"a batch of {rows} rows")
        if len(parts) != (self._inputs if self.dense else len(table)):
            raise ProtocolFault(
                "a batch with parts of another number than its model's inputs, or its requests"
            )
        spans, at = [], 0
        for row, count in table:
            if row < at or count < 1 or row + count > rows:
                raise ProtocolFault("a table of requests that overlap, or lie outside of their batch")
            if row > at:
                spans.append((at, row - at))
            spans.append((row, count))
            at = row + count
        if at < rows:
            spans.append((at, rows - at))
        leases = self._reserve(spans)
        wanted = leases if len(spans) == len(table) else [leases[spans.index(entry)] for entry in table]
        try:
            self._write(leases[0][0] >> 16, rows, wanted, parts)
        except BaseException:
            for lease, count in leases:
                self._front.abandon(lease, count)
            raise
        for lease, count in leases:
            self._front.commit(lease, count)
        if wanted is not leases:
            for lease, count in set(leases).difference(wanted):
                self._front.drop(lease, count)
        self._front.seal(leases[0][0])
        return leases, wanted

    def _reserve(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        leases = []
        for row, count in spans:
            lease = self._front.reserve(count)
            if lease < 0 or lease & 0xFFFF != row:
                raise ProtocolFault("a batch that does not fit into a slot, or while none is free")
            leases.append((lease, count))
        return leases

    def _write(self, slot: int, rows: int, wanted: Sequence[tuple[int, int]], parts: Sequence[Any]) -> None:
        if not self.dense:
            for (lease, _), part in zip(wanted, parts, strict=True):
                self._attach(lease, part)
            return
        inputs, _ = self._columns(slot)
        for (at, row_bytes), part in zip(inputs, parts, strict=True):
            if len(part) != rows * row_bytes:
                raise ProtocolFault(f"a column of {len(part)} bytes for {rows} rows of {row_bytes}")
            self._memory[at : at + len(part)] = part

    def _columns(self, slot: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Where the input and the output columns of a slot begin, and the bytes of a row of each."""
        found = self._spans.get(slot)
        if found is None:
            found = self._spans[slot] = (
                [self._ring.column_span(slot, number, False) for number in range(self._inputs)],
                [self._ring.column_span(slot, number, True) for number in range(self._outputs)],
            )
        return found

    def _attach(self, lease: int, part: Any) -> None:
        offset = self._front.allocate_slab(len(part)) if len(part) else 0
        if not offset:
            raise ProtocolFault("a request without tensors, or of more than fit here")
        self._front.slab(offset, len(part), True)[:] = part
        self._front.attach_slab(lease, offset, len(part))

    def _collect(self, found: WireMessage, slot: int, leases: list[tuple[int, int]]) -> None:
        """Write an answer: of the slot's outputs, which it does not copy."""
        front, failed = self._front, self._front.failure(slot)
        if failed is not None:
            found.word, found.parts = failed[0], [failed[1].encode("utf-8", "replace")]
            return
        statuses = [(lease, front.lease_status(lease)) for lease, _ in leases]
        parts: list[Any] = []
        if self.dense:
            _, outputs = self._columns(slot)
            parts = [self._memory[at : at + found.rows * row_bytes] for at, row_bytes in outputs]
            statuses = [(lease, status) for lease, status in statuses if status]
        found.table = [(lease & 0xFFFF, status) for lease, status in statuses]
        found.parts = parts + [self._slab(lease) for lease, _ in statuses]

    def _slab(self, lease: int) -> Any:
        offset, nbytes = self._front.answer_slab(lease)
        return self._front.slab(offset, nbytes) if offset else b""


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
            if self._arrived:
                message = self._arrived.popleft()
            else:
                try:
                    self._arrived.extend(read_messages(receive_frames(self._socket, 0)))  # waits for TURN_S
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
        answers, since_s, alarm_s = list[bytes](), 0.0, 0.0
        while True:
            batch = self._next_batch(answers)
            now = time.monotonic()
            since_s = since_s if answers else now
            if limit_ms and now > alarm_s:  # the kernel's: a model that hangs may hold Python's lock
                signal.setitimer(signal.ITIMER_REAL, limit_ms / 1000 + WATCHDOG_S)
                alarm_s = now + ALARM_S
            try:
                found, leases = arena.run(batch)
            except ProtocolFault:
                self._drop_arena()  # with what was half written into it
                raise
            del batch
            frames = found.pack()
            if len(frames) > 1 and sum(map(len, frames)) > most_bytes:
                frames = _too_large(found, most_bytes).pack()
            if len(frames) == 1:
                answers += frames
                arena.release(leases)
            else:
                arena.release_sent(self._send(frames, copy=False), leases)
            if limit_ms and not self._arrived:
                signal.setitimer(signal.ITIMER_REAL, 0)
                alarm_s = 0.0
            if not self._arrived or len(answers) >= MOST_HELD or time.monotonic() > since_s + HELD_S:
                self._send_joined(answers)
                arena.forget()

    def _next_batch(self, answers: list[bytes]) -> WireMessage:
        try:
            message = self._receive_late()
        except SessionEnded:
            self._send_joined(answers)  # it was told to stop while others waited
            raise
        if message.kind is not MessageKind.BATCH:
            raise ProtocolFault(f"{message.kind.name} while it was ready")
        return message

    def _send_joined(self, answers: list[bytes]) -> None:
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


def _too_large(found: WireMessage, most_bytes: int) -> WireMessage:
    text = f"the outputs of this batch have more than {most_bytes >> 20} MB (max_answer_mb of placement)"
    status = Kind.RESOURCE_EXHAUSTED.value
    return WireMessage(MessageKind.ANSWER, found.batch, found.rows, status, parts=[text.encode()])
