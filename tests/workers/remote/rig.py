"""Remote workers as processes of this machine, and one played by a test, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

import fastserve
from fastserve._ext.remote_batches import PROTOCOL, MessageKind, WireMessage, read_messages
from fastserve.backends.base import write_specs
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.workers.arena import Arena, plan_geometry
from fastserve.workers.process import worker_environment
from fastserve.workers.remote.connections import WorkerConnections
from fastserve.workers.remote.keys import SideKey, secure_worker
from fastserve.workers.remote.main import WorkerOrder
from fastserve.workers.remote.protocol import Hello, LoadedModel, Welcome, pack_message
from fastserve.workers.remote.runner import RemoteRunner, RemoteVersion
from fastserve.workers.remote.supervisor import SupervisedWorker
from tests import warm

WAIT_S = 30.0
SPEC = TensorSpec("x", DTYPES["float32"], (2,))


class WarmRemoteWorker(SupervisedWorker):
    """A remote worker that starts warm (tests/warm.py); one that is given a key's content does not."""

    def start(self) -> int:
        environment = worker_environment(0, {})
        zygote = warm.ZYGOTES.find(environment)
        if zygote is None or self._key:
            return super().start()
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as null:
            order = {
                "module": self._entry[-1], "arguments": [], "environment": environment, "session": True,
                "more": [msgspec.json.encode(self.order).decode()],
            }  # fmt: skip
            pid = zygote.start(order, [null.fileno(), 2, 2, theirs.fileno()])
        process: Any = warm.WarmProcess(pid, self._entry)
        self._popen, self._tie, self._began_s = process, ours, time.monotonic()
        return os.pidfd_open(pid)


class Machine:
    """A machine with remote workers, which end with the test."""

    def __init__(self, listen: str, cache: Path, key: Path | None = None) -> None:
        self.listen = listen
        self._order = WorkerOrder(listen, str(key or ""), str(cache), log_level="warning")
        self._workers: dict[SupervisedWorker, int] = {}

    def start(self, count: int = 1) -> list[SupervisedWorker]:
        """Start workers, which connect by themselves."""
        made = [WarmRemoteWorker(self._order) for _ in range(count)]
        for worker in made:
            self._workers[worker] = worker.start()
        return made

    def await_end(self, worker: SupervisedWorker) -> str:
        """Wait until a worker has ended; how it did."""
        pidfd = self._workers.pop(worker)
        line = select.poll()
        line.register(pidfd, select.POLLIN)
        assert line.poll(WAIT_S * 1000), "it has not ended"
        os.close(pidfd)
        return worker.ended()

    def close(self) -> None:
        """End all of them."""
        for worker in list(self._workers):
            worker.signal(signal.SIGKILL)
            self.await_end(worker)


@contextlib.contextmanager
def machine(listen: str, cache: Path, key: Path | None = None) -> Iterator[Machine]:
    made = Machine(listen, cache, key)
    try:
        yield made
    finally:
        made.close()


class CableLink:
    """A TCP link to an address, which a test stalls (nothing flows, nobody is told) and cuts."""

    def __init__(self, to: str) -> None:
        self._to, self.flowing = to, asyncio.Event()
        self.flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0

    async def __aenter__(self) -> CableLink:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        host, _, port = self._to.rpartition(":")
        ends = [writer]
        try:
            there, back = await asyncio.open_connection(host, int(port))
            ends.append(back)
            self._writers.update(ends)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except OSError:
            pass  # one end is gone, and so is the other
        finally:
            self._writers.difference_update(ends)
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


def welcome(**changes: Any) -> Welcome:
    fields = {
        **{"key": "k", "name": "m", "version": "1", "config": {}, "files": "", "path": "/nowhere"},
        **{"heartbeat_s": 0.2, "most_bytes": 1 << 20, "instance": 0},
    }
    return Welcome(**{**fields, **changes})


class Player:
    """A remote worker played by a test."""

    def __init__(self, address: str, key: SideKey | None = None) -> None:
        self._context = zmq.Context()
        self._arrived: list[WireMessage] = []
        self.socket: Any = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if key is not None:
            secure_worker(self.socket, key)
        self.socket.connect(f"tcp://{address}")

    def send(self, frames: Sequence[Any]) -> None:
        self.socket.send_multipart(frames)

    def hello(self, **changes: Any) -> None:
        fields = {"fastserve": fastserve.__version__, "protocol": PROTOCOL, "node": "n", "pid": 1, **changes}
        self.send(pack_message(MessageKind.HELLO, Hello(**fields)))

    def receive(
        self, connections: WorkerConnections, turn: Any = None, limit_s: float = WAIT_S
    ) -> WireMessage | None:
        """The next message but for PINGs, which are answered, as `connections` turns; None if none comes."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            (turn or connections.turn)()
            while self.socket.poll(2):
                self._arrived += read_messages(self.socket.recv_multipart())
            while self._arrived:
                message = self._arrived.pop(0)
                if message.kind is not MessageKind.PING:
                    return message
                self.send(pack_message(MessageKind.PONG))
        return None

    def expect(self, connections: WorkerConnections, kind: MessageKind, turn: Any = None) -> WireMessage:
        found = self.receive(connections, turn)
        assert found is not None, f"no {kind.name}"
        assert found.kind is kind, found.kind.name
        return found

    def load(self, connections: WorkerConnections) -> None:
        """Greet, and have the version loaded."""
        self.hello()
        self.expect(connections, MessageKind.WELCOME)
        self.loaded()

    def loaded(self) -> None:
        specs = write_specs({"x": SPEC})
        self.send(pack_message(MessageKind.LOADED, LoadedModel(specs, specs)))

    def close(self) -> None:
        self._context.destroy(0)


class Bench:
    """A remote runner and its arena, whose front is the test."""

    def __init__(self, **config: Any) -> None:
        self.config = {
            **{"backend": "python", "max_batch_size": 4, "max_queue_rows": 16, "max_queue_bytes": 1 << 20},
            **{"max_queue_delay_us": 0, "instances": 1, "run_timeout_ms": 0},
            **{"placement": {"remote": {"heartbeat_s": 0.2, **config.pop("remote", {})}}, **config},
        }
        specs = {"x": SPEC}
        self.connections = WorkerConnections("127.0.0.1:0", None, welcome(), None, answer_bytes=1 << 20)
        version = RemoteVersion(self.config, Path("m/1"), "m")
        version.connections, version.inputs, version.outputs = self.connections, specs, specs
        self.arena = Arena.create(plan_geometry(self.config, specs, specs))
        self.front, self.ring = self.arena.ring(front=0), self.arena.ring(worker=0)
        self.runner = RemoteRunner(self.arena, self.ring, version, self.config)
        self.players: list[Player] = []

    def player(self) -> Player:
        """A worker that is ready for batches."""
        made = Player(self.connections.address)
        self.players.append(made)
        made.load(self.connections)
        self.until(lambda: len(self.connections.loaded) == len(self.players))
        self.connections.go(dense=True)
        made.expect(self.connections, MessageKind.GO)
        made.send(pack_message(MessageKind.READY))
        self.until(lambda: len(self.connections.ready) == len(self.players))
        return made

    def until(self, true: Any) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end
            self.connections.wait(0.01)
            self.connections.turn()

    def put(self, *rows: Sequence[float]) -> int:
        """Have the runner send a batch of one request; its lease."""
        lease = self.commit(*rows)
        slot = self.ring.take()
        assert slot == lease >> 16
        self.runner.run(slot)
        return lease

    def commit(self, *rows: Sequence[float]) -> int:
        """Have a batch of one request wait; its lease."""
        lease: int = self.front.reserve(len(rows))
        self.front.input_rows(lease, len(rows), 0)[:] = b"".join(map(floats, rows))
        self.front.commit(lease, len(rows))
        self.front.seal(lease)
        return lease

    def result(self, lease: int, rows: int = 1) -> Any:
        """The output of a lease whose batch is done, or (status, text) of its failure; None before that."""
        slot = lease >> 16
        if not self.front.is_done(slot, self.front.seq(slot)):
            return None
        failed = self.front.failure(slot)
        found = failed if failed is not None else bytes(self.front.output_rows(lease, rows, 0))
        self.front.release(lease, rows)
        return found

    def close(self) -> None:
        for player in self.players:
            player.close()
        self.connections.close()
        self.runner.close()
        self.connections.on_answer = self.connections.on_lost = lambda *_: (
            None
        )  # bound to the runner, whose arena is unmapped
        del self.runner, self.front, self.ring
        self.arena.close()


@contextlib.contextmanager
def bench(**config: Any) -> Iterator[Bench]:
    made = Bench(**config)
    try:
        yield made
    finally:
        made.close()


def floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def answer(
    asked: WireMessage,
    *parts: bytes,
    entries: Sequence[tuple[int, int]] = (),
    status: int = 0,
    ran_ns: int = 1000,
) -> list[bytes]:
    """The answer to a BATCH."""
    return WireMessage(
        MessageKind.ANSWER, asked.batch, asked.rows, status, ran_ns, table=entries, parts=parts
    ).pack()


HEADER_FIELDS = {"kind": ("<H", 6), "entries": ("<I", 20), "parts": ("<I", 28), "nbytes": ("<Q", 32)}


def damaged(frames: Sequence[bytes], **fields: int) -> list[bytes]:
    """A message whose header says other things than it should."""
    head = bytearray(frames[0])
    for name, value in fields.items():
        form, at = HEADER_FIELDS[name]
        struct.pack_into(form, head, at, value)
    return [bytes(head), *frames[1:]]
