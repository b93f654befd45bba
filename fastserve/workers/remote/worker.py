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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastserve
from fastserve.backends import Backend, create
from fastserve.backends.base import SupportsSignatures, check_capabilities, write_specs
from fastserve.backends.model_errors import explain, kind_of
from fastserve.errors import ConfigError, Kind
from fastserve.util.logs import raw_trace
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
    Header,
    Hello,
    LoadedModel,
    MessageKind,
    ProtocolFault,
    Welcome,
    Words,
    pack_message,
    pack_table,
    read_body,
    read_header,
    read_table,
    receive_parts,
)

log = logging.getLogger(__name__)

RETRY_S = 0.2
TURN_S = 0.25  # between two looks whether it was told to stop
ANSWER_S = 5.0  # for a server that listens to say something
ENVIRONMENT_MARK = "_FASTSERVE_ENVIRONMENT"
WATCHDOG_S = 1.0  # beyond run_timeout_ms, after which the runner has given the batch up
MOST_FRAMES_BYTES = 1 << 32


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
        self._held: deque[tuple[Any, list[tuple[int, int]]]] = (
            deque()
        )  # outputs on their way, and their leases
        self.dense = geometry.dense
        warm_up(self._runner, self._arena, backend, config)

    def run(self, header: Header, frames: Sequence[Any]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Run one batch; returns the frames of its answer, and the leases that `sent` is to be given. Raises
        ProtocolFault."""
        table = read_table(header, frames)
        leases = self._put(header.rows, table, frames[2:])
        slot = leases[0][0] >> 16
        taken = self._ring.take()
        if taken != slot:
            raise ProtocolFault("a batch that did not come to be one of its own")
        answer(self._ring, self._runner, slot)
        getattr(self._runner, "drain", lambda: None)()
        self._front.drain()
        _, _, run_ns, ran_ns, _ = self._front.times_ns(slot)
        found = Header(MessageKind.ANSWER, header.batch, header.rows, ran_ns=max(ran_ns - run_ns, 0))
        return self._collect(found, table, leases), leases

    def sent(self, tracker: Any, leases: list[tuple[int, int]]) -> None:
        """Release what is on its way, once it has been sent."""
        self._held.append((tracker, leases))
        while self._held and (self._held[0][0] is None or self._held[0][0].done):
            for lease, rows in self._held.popleft()[1]:
                self._front.release(lease, rows)

    def close(self) -> None:
        """Close the arena."""
        getattr(self._runner, "close", lambda: None)()
        self._held.clear()
        self._memory.release()
        self._arena.close()

    def _put(self, rows: int, table: list[tuple[int, int]], parts: Sequence[Any]) -> list[tuple[int, int]]:
        """Write a batch as a front would; each request is a lease, and so is what lies between them."""
        if not 1 <= rows <= self._ring.max_rows or not table or len(table) > rows:
            raise ProtocolFault(f"a batch of {rows} rows")
        spans, at = [], 0
        for row, count in table:
            if row < at or count < 1 or row + count > rows:
                raise ProtocolFault("a table of requests that overlap, or lie outside of their batch")
            spans += [(at, row - at)] * (row > at) + [(row, count)]
            at = row + count
        spans += [(at, rows - at)] * (at < rows)
        if len(parts) != (self._inputs if self.dense else len(table)):
            raise ProtocolFault(
                "a batch with parts of another number than its model's inputs, or its requests"
            )
        return self._fill(self._front.reserve(spans[0][1]), spans, table, parts, rows)

    def _fill(
        self,
        first: int,
        spans: list[tuple[int, int]],
        table: list[tuple[int, int]],
        parts: Sequence[Any],
        rows: int,
    ) -> list[tuple[int, int]]:
        if first < 0 or first & 0xFFFF:
            raise ProtocolFault("a batch while no slot is free")
        leases = [(first, spans[0][1])]
        leases += [(self._front.reserve(count), count) for _, count in spans[1:]]
        if any(lease != first + row for (lease, _), (row, _) in zip(leases, spans, strict=True)):
            raise ProtocolFault("a batch that does not fit into a slot")
        wanted = {row: number for number, (row, _) in enumerate(table)}
        try:
            for number, part in enumerate(parts) if self.dense else ():
                at, row_bytes = self._ring.column_span(first >> 16, number, False)
                if len(part) != rows * row_bytes:
                    raise ProtocolFault(f"a column of {len(part)} bytes for {rows} rows of {row_bytes}")
                self._memory[at : at + len(part)] = part
            for (row, _), (lease, _) in zip(spans, leases, strict=True):
                if not self.dense and row in wanted:
                    self._attach(lease, parts[wanted[row]])
        except BaseException:
            for lease, count in leases:
                self._front.abandon(lease, count)
            raise
        for lease, count in leases:
            self._front.commit(lease, count)
        for (row, _), (lease, count) in zip(spans, leases, strict=True):
            if row not in wanted:  # its caller has left: here, too, nobody waits for these rows
                self._front.drop(lease, count)
        self._front.seal(first)
        return [lease for lease, (row, _) in zip(leases, spans, strict=True) if row in wanted]

    def _attach(self, lease: int, part: Any) -> None:
        offset = self._front.allocate_slab(len(part)) if len(part) else 0
        if not offset:
            raise ProtocolFault("a request without tensors, or of more than fit here")
        self._front.slab(offset, len(part), True)[:] = part
        self._front.attach_slab(lease, offset, len(part))

    def _collect(
        self, header: Header, table: list[tuple[int, int]], leases: list[tuple[int, int]]
    ) -> list[Any]:
        front, slot = self._front, leases[0][0] >> 16
        failed = front.failure(slot)
        if failed is not None:
            status, text = failed
            return _pack(header, status, [], [text.encode("utf-8", "replace")])
        if not self.dense:
            entries = [(lease & 0xFFFF, front.lease_status(lease)) for lease, _ in leases]
            return _pack(header, 0, entries, [self._slab(lease) for lease, _ in leases])
        parts: list[Any] = []
        for number in range(self._outputs):
            at, row_bytes = self._ring.column_span(slot, number, True)
            parts.append(self._memory[at : at + header.rows * row_bytes])
        faults = [
            (row, lease) for lease, _ in leases if front.lease_status(lease) for row in [lease & 0xFFFF]
        ]
        entries = [(row, front.lease_status(lease)) for row, lease in faults]
        return _pack(header, 0, entries, parts + [self._slab(lease) for _, lease in faults])

    def _slab(self, lease: int) -> Any:
        offset, nbytes = self._front.answer_slab(lease)
        return self._front.slab(offset, nbytes) if offset else b""


def _pack(header: Header, status: int, entries: list[tuple[int, int]], parts: list[Any]) -> list[Any]:
    header.word, header.entries, header.parts = status, len(entries), len(parts)
    header.nbytes = sum(map(len, parts))
    return [header.pack(), pack_table(entries), *parts]


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
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close()  # after its linger: what was sent last may be on its way
            self._socket = None
        if self._monitor is not None:
            self._monitor.close(0)
            self._monitor = None

    def _receive(self, limit_s: float) -> tuple[Header, Sequence[Any]]:
        """The next message that is no PING. Raises SessionEnded after `limit_s` without any message."""
        until = time.monotonic() + limit_s
        while True:
            left_s = until - time.monotonic()
            if self._stopping:
                raise SessionEnded("it was told to stop")
            try:
                frames = receive_parts(self._socket, 0, self._zmq.RCVMORE)  # waits for TURN_S
            except self._zmq.Again:
                if left_s <= 0:
                    raise SessionEnded(self._silence()) from None
                continue
            header = read_header(frames[0])
            if header.kind is MessageKind.PING:
                until = time.monotonic() + limit_s
                self._send(pack_message(MessageKind.PONG))
                continue
            if header.kind in (MessageKind.BYE, MessageKind.REFUSED):
                refused = header.kind is MessageKind.REFUSED
                raise SessionEnded(
                    f"the server said: {read_body(frames, Words).reason}", ANSWER_S if refused else RETRY_S
                )
            return header, frames

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
        header, frames = self._receive(ANSWER_S)
        if header.kind is not MessageKind.WELCOME:
            raise ProtocolFault(f"{header.kind.name} instead of WELCOME")
        welcome = read_body(frames, Welcome)
        self._said = ""
        self._silence_s = MISSED * welcome.heartbeat_s + 1.0
        loaded = self._load(welcome)
        signatures = loaded.backend.signatures if isinstance(loaded.backend, SupportsSignatures) else {}
        specs = write_specs(loaded.backend.inputs), write_specs(loaded.backend.outputs)
        self._send(
            pack_message(MessageKind.LOADED, LoadedModel(*specs, {k: dict(v) for k, v in signatures.items()}))
        )
        header, frames = self._receive_late()
        if header.kind is not MessageKind.GO:
            raise ProtocolFault(f"{header.kind.name} instead of GO")
        arena = self._warm_up(loaded, dense=read_body(frames, Go).dense)
        self._send(pack_message(MessageKind.READY))
        log.info("%s/%s is ready", welcome.name, welcome.version)
        self._answer_batches(arena, int(loaded.config["run_timeout_ms"]), welcome.most_bytes)

    def _receive_late(self) -> tuple[Header, Sequence[Any]]:
        return self._receive(self._silence_s)

    def _answer_batches(self, arena: LocalArena, limit_ms: int, most_bytes: int) -> None:
        while True:
            header, frames = self._receive_late()
            if header.kind is not MessageKind.BATCH:
                raise ProtocolFault(f"{header.kind.name} while it was ready")
            if limit_ms:  # the kernel's: a model that hangs may hold Python's lock
                signal.setitimer(signal.ITIMER_REAL, limit_ms / 1000 + WATCHDOG_S)
            try:
                found, leases = arena.run(header, frames)
            except ProtocolFault:
                self._drop_arena()  # with what was half written into it
                raise
            if limit_ms:
                signal.setitimer(signal.ITIMER_REAL, 0)
            del frames
            nbytes = sum(map(len, found))
            if nbytes > most_bytes:
                found = _too_large(header, most_bytes)
            copied = nbytes < COPIED_BYTES or nbytes > most_bytes
            arena.sent(self._send(found, copy=copied), leases)

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
        header, frames = self._receive_late()
        if header.kind is not MessageKind.DATA or len(frames) != 2:
            raise ProtocolFault(f"{header.kind.name} instead of a file's bytes")
        return bytes(frames[1])

    def _warm_up(self, loaded: LoadedVersion, *, dense: bool) -> LocalArena:
        if loaded.arena is not None and loaded.arena.dense == dense:
            return loaded.arena
        try:
            loaded.arena = LocalArena(loaded.backend, loaded.config, dense=dense)
        except BaseException as error:
            self._fail(error, "")
        assert loaded.arena is not None
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


def _too_large(header: Header, most_bytes: int) -> list[Any]:
    text = f"the outputs of this batch have more than {most_bytes >> 20} MB (max_answer_mb of placement)"
    found = Header(MessageKind.ANSWER, header.batch, header.rows)
    return _pack(found, Kind.RESOURCE_EXHAUSTED.value, [], [text.encode()])
