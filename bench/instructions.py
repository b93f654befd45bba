"""Instructions of a server's front process per request, of one checkout or of two side by side, by callgrind.

    python -m bench.instructions                              # this checkout, every row
    python -m bench.instructions --old ../old/.venv/bin/python tiny grpc-tiny
    python -m bench.instructions --old ../old/.venv/bin/python tiny --functions 20
    python -m bench.instructions --keys tiny grpc-tiny        # without API keys, and with them
    python -m bench.instructions --traced 1 tiny              # without traces, and with every request traced

The clock of a shared machine differs by a fifth from run to run, a count of instructions by a hundredth (of
one request at a time by four): it shows what a change adds where no load generator can. What is counted: user
instructions and system calls of the front process, of all its threads. What is not: time in the kernel, waits
for memory, housekeeping by the clock, and the workers, which run outside valgrind (`--worker` counts that of
`tiny`).

One turn sends a request on each connection or stream at once. The processes are stopped while it is sent, and
the workers until the front has done all its work and sleeps: every turn has the same order of events, however
busy the machine is. The median of three segments counts, so a collection of garbage in one of them does not.

valgrind has no pidfd_open and no AVX-512: a death of a worker goes unnoticed here, and vector code is AVX2's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import h2.config
import h2.connection
import h2.events
import h2.settings

from bench import workloads
from bench.load import grpc_load, grps_load, servers, tfs_grpc_load, v1_load, v2_load
from bench.load.h2_load import GRPC
from bench.workloads import WORKLOADS
from fastserve.settings.key_file import changing, make_key

SEGMENTS = 3
WARM_TURNS = 6
REST_S, REST_INSTRUCTIONS = 0.4, 20_000
LIMIT_S = 30.0  # of one turn, and of what valgrind is asked
START_S = 300.0
ONCE, LARGE, MANY = 32, 4, 200  # requests of one turn beside one request
DIALECTS = "tfserving,kserve_v2,triton_v1,grps,textgen"
MODELS = ("tiny", "mlp", "image", "batch")
# The same hashes each time. Copies as instructions, not as one that valgrind counts for each byte.
ENVIRONMENT = ("PYTHONHASHSEED=0", "GLIBC_TUNABLES=glibc.cpu.hwcaps=-ERMS,-FSRM")
# What the checkout's python runs in place of `python -m fastserve`. What the front does by
# the clock is slowed down, as valgrind slows down the requests in between: timers, and LOOK_NS, after which a
# queue looks at whose turn it is.
LAUNCH = """
import os
import uvloop
class SlowLoop(uvloop.Loop):
    def call_later(self, delay, *more, **named):
        return super().call_later(100 * delay if 0.2 <= delay <= 10 else delay, *more, **named)
uvloop.run.__kwdefaults__["loop_factory"] = SlowLoop
os.pidfd_open = lambda pid, flags=0: os.eventfd(0)
from fastserve.engine import batch_queue
batch_queue.LOOK_NS = 100 * getattr(batch_queue, "LOOK_NS", 0)
from fastserve.cli import main
main()
"""
TEXT_YAML = "backend: text_python\ntext: {tokenizer: words, max_new_tokens: 512}\n"
# A step each 20 ms, which the front has behind it before the next: no two tokens share one.
TEXT_MODEL = '''"""A token each 20 ms."""
import itertools, time
class Model:
    def __init__(self, config):
        pass
    def generate(self, request):
        due = time.monotonic()
        for token in itertools.cycle(((626, "am"), (263, " a"), (5176, " French"))):
            due += 0.02
            while time.monotonic() < due:
                time.sleep(0.001)
                yield None
            yield token
'''
# Outside valgrind the clock is read without one.
SYSCALL = re.compile(
    r"^SYSCALL\[\d+,\d+\]\(\d+\) (?!sys_clock_gettime|sys_gettimeofday|sys_time )", re.MULTILINE
)


@dataclass(frozen=True)
class Row:
    """One kind of request. `together`: connections, and streams of each, of a turn of many requests."""

    path: str
    body: bytes
    content_type: str = "application/json"
    lines: tuple[str, ...] = ()  # further header lines, name and value in turn
    http2: bool = False
    together: tuple[int, int] = (ONCE, 1)
    sized: bool = True  # the length of its body is told before the body
    paced: bool = False  # its worker decides when the front works

    def ways(self) -> Iterator[tuple[int, int, int]]:
        """(connections, streams, turns of a segment), one request a turn first."""
        large, huge = len(self.body) > 100_000, len(self.body) > 1_000_000
        if not self.paced:
            yield 1, 1, 2 if huge else 4 if large else 40
        if not huge:  # one is most of a turn
            yield *self.together, 1 if self.paced else 2 if large or self.together[0] > ONCE else 6


def framed(message: bytes) -> bytes:
    """A gRPC message behind its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def make_rows() -> dict[str, Row]:
    """Every row by its name, in the table's order: names are those of `bench.load` where it has the row."""
    rows: dict[str, Row] = {}
    texts = {model: [str(v) for v in workloads.row(model)] for model in MODELS}
    many = {"tiny": (ONCE, 1), "mlp": (ONCE, 1), "image": (LARGE, 1), "batch": (MANY, 1)}

    def add(name: str, model: str, path: str, body: bytes, *kind: str) -> None:
        rows[name] = Row(path, body, *kind[:1], kind[1:], together=many[model])

    def add_http2(name: str, model: str, path: str, body: bytes, kind: str, streams: int = 1) -> None:
        together = (many[model][0] // streams, streams)
        rows[name] = Row(path, body, kind, http2=True, together=together)

    def add_grpc(name: str, model: str, path: str, message: bytes, streams: int = 1) -> None:
        add_http2(name, model, path, framed(message), GRPC, streams)

    for name, workload in WORKLOADS.items():
        add(name, workload.model, workload.path, workloads.body(workload), workload.content_type)
    for part, (model, *_) in v2_load.BESIDE.items():
        binary = part.endswith("bin")
        asked = v2_load.binary_request(model) if binary else v2_load.json_request(model, texts[model])
        add(part, model, asked.path, asked.body, asked.content_type, *asked.lines)
    for part, (model, _) in v1_load.LEAST.items():
        raw, path = workloads.row(model).astype("<f4").tobytes(), f"/api/infer/{model}?format=binary"
        add(part, model, path, raw, v1_load.CONTENT_TYPE, *v1_load.header(model))
    for part, (model, _) in grps_load.LEAST.items():
        sent = (
            grps_load.bytes_request(model)
            if part == "grps-bytes"
            else grps_load.grps_request(model, texts[model])
        )
        add(part, model, sent.path, sent.body, sent.content_type)
    for model in MODELS:
        add_grpc(f"grpc-{model}", model, grpc_load.PATH, grpc_load.make_request(model))
    add_grpc("grpc-tiny-8", "tiny", grpc_load.PATH, grpc_load.make_request("tiny"), 8)
    for part, (model, content, _) in tfs_grpc_load.LEAST.items():
        add_grpc(part, model, tfs_grpc_load.PATH, tfs_grpc_load.make_request(model, content))
    add_grpc("grps-grpc", "tiny", grps_load.GRPS_PATH, grps_message())
    for part, name, streams in (
        ("h2-tiny", "tiny", 1),
        ("h2-streams", "tiny", 8),
        ("h2-imagebin", "imagebin", 1),
    ):
        workload = WORKLOADS[name]
        body = workloads.body(workload)
        add_http2(part, workload.model, workload.path, body, workload.content_type, streams)
    rows["h2-unsized"] = replace(rows["h2-imagebin"], sized=False)
    words = {"model": "text", "prompt": "one two three", "max_tokens": 32, "stream": True}
    rows["text-stream"] = Row("/v1/completions", json.dumps(words).encode(), together=(8, 1), paced=True)
    return rows


def grps_message() -> bytes:
    message, values = grps_load.GRPS.GrpsMessage(model="tiny-1"), workloads.row("tiny")
    message.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=[1, values.size], flat_float32=values)
    data: bytes = message.SerializeToString()
    return data


class WrongAnswer(RuntimeError):
    """A request was not answered, or not well."""


class Connection:
    """A connection that asks one thing again and again, `streams` at a time."""

    def __init__(self, port: int, row: Row, streams: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self._row, self._streams, self._out = row, streams, bytearray()

    def send(self) -> None:
        """Write what the socket takes at once."""
        raise NotImplementedError

    def receive(self) -> None:
        """Write the rest and read every reply to its end. Raises WrongAnswer, OSError."""
        raise NotImplementedError

    def close(self) -> None:
        self._socket.close()

    def _push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self._socket.send(self._out, socket.MSG_DONTWAIT)]

    def more(self) -> bool:
        """Write what the socket takes, and say whether there is more."""
        self._push()
        return bool(self._out)

    def _read(self) -> bytes:
        found = self._socket.recv(1 << 20)
        if not found:
            raise WrongAnswer(f"{self._row.path}: the connection was closed")
        return found


class Http1Connection(Connection):
    """One request at a time."""

    def __init__(self, port: int, row: Row, streams: int) -> None:
        super().__init__(port, row, streams)
        lines = dict(zip(row.lines[::2], row.lines[1::2], strict=True))
        lines |= {"Host": f"127.0.0.1:{port}", "Content-Type": row.content_type}
        lines["Content-Length"] = str(len(row.body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._request = f"POST {row.path} HTTP/1.1\r\n{head}\r\n".encode() + row.body

    def send(self) -> None:
        self._out += self._request
        self._push()

    def receive(self) -> None:
        head, found, data = b"", b"", b""
        while not found:
            head, found, data = (head + self._read()).partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise WrongAnswer((head + found + data)[:500].decode(errors="replace"))
        length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
        while len(data) < int(length[1]) if length else not data.endswith(b"0\r\n\r\n"):
            data += self._read()


class Http2Connection(Connection):
    """Over HTTP/2, gRPC too."""

    def __init__(self, port: int, row: Row, streams: int) -> None:
        super().__init__(port, row, streams)
        self._engine = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._engine.initiate_connection()
        self._engine.increment_flow_control_window(1 << 30)
        self._headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", row.path),
            (":authority", f"127.0.0.1:{port}"),
            ("content-type", row.content_type),
            ("te", "trailers"),
            *zip(row.lines[::2], row.lines[1::2], strict=True),
        ]
        if row.sized and row.content_type != GRPC:  # which tells a message's length in its prefix
            self._headers.append(("content-length", str(len(row.body))))
        self._left: dict[int, bytes] = {}
        self._open = set[int]()

    def send(self) -> None:
        for _ in range(self._streams):
            stream = self._engine.get_next_available_stream_id()
            self._engine.send_headers(stream, self._headers)
            self._left[stream] = self._row.body
            self._open.add(stream)
        self._fill()
        self._push()

    def more(self) -> bool:
        while self._left and select.select([self._socket], [], [], 0)[0]:
            self._hear()
        return super().more() or bool(self._left)

    def receive(self) -> None:
        while self._open:
            self._hear()

    def _fill(self) -> None:
        """Frames of what the windows take."""
        for stream, body in list(self._left.items()):
            while body and (window := self._engine.local_flow_control_window(stream)) > 0:
                size = min(window, self._engine.max_outbound_frame_size, len(body))
                self._engine.send_data(stream, body[:size], end_stream=size == len(body))
                body = body[size:]
            self._left[stream] = body
            if not body:
                del self._left[stream]
        self._out += self._engine.data_to_send()

    def _hear(self) -> None:
        for event in self._engine.receive_data(self._read()):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                found = {str(name): str(value) for name, value in event.headers}
                if found.get(":status", "200") != "200" or found.get("grpc-status", "0") != "0":
                    raise WrongAnswer(f"{self._row.path}: {found}")
            elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                raise WrongAnswer(f"{self._row.path}: {event}")
            elif isinstance(event, h2.events.StreamEnded):
                self._open.discard(event.stream_id)
        self._fill()
        self._push()


@dataclass(frozen=True)
class Cost:
    """What a request cost a process."""

    instructions: float
    syscalls: float
    functions: dict[str, float] = field(default_factory=dict)  # instructions in each itself; its system calls


def read_functions(dump: str) -> dict[str, int]:
    """Instructions of each function itself, of the text of one of callgrind's files.

    A line of `calls=` is followed by one of what the called function cost, which is not the caller's own.
    """
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    name, skip = "", False
    for line in dump.splitlines():
        if line.startswith("fn="):
            number, _, words = line[3:].partition(" ")
            name = names.setdefault(number, words)
        elif line.startswith(("cfn=", "cfi=", "cob=", "fl=", "fi=", "fe=", "ob=")):
            if line.startswith("cfn="):
                number, _, words = line[4:].partition(" ")
                names.setdefault(number, words)
        elif line.startswith("calls="):
            skip = True
        elif line[:1] in "+-*0123456789" and line and name:
            if not skip:
                costs[name] += int(line.rpartition(" ")[2])
            skip = False
    return dict(costs)


class CountedProcess:
    """A process under callgrind that is asked what it has executed."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self._folder = pid, folder
        self._log = folder / f"log.{pid}"
        self._read, self._dumps = 0, 0

    def count(self) -> None:
        """Begin to count."""
        self._ask("instrumentation", "on")

    def take(self) -> tuple[int, int, str]:
        """Return instructions and system calls since the last take, and callgrind's file of them."""
        self._ask("dump")
        self._dumps += 1
        path = self._folder / f"counts.{self.pid}.{self._dumps}"
        dump = path.read_text()
        path.unlink()
        total = re.search(r"^totals: (\d+)", dump, re.MULTILINE)
        with self._log.open() as log:
            log.seek(self._read)
            lines = log.read()
            self._read = log.tell()
        return int(total[1]) if total else 0, len(SYSCALL.findall(lines)), dump

    def _ask(self, *words: str) -> None:
        command = ["vgdb", f"--vgdb-prefix={self._folder}/vgdb", "--wait=5", f"--pid={self.pid}", *words]
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)


def wait_for_state(pid: int, state: str) -> None:
    """Until every thread of a process is in a state of proc(5): S asleep, T stopped. Raises RuntimeError."""
    deadline, seen = time.monotonic() + LIMIT_S, 0
    while True:
        found = set[str]()
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError):
                found.add(Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0])
        seen = seen + 1 if found == {state} else 0
        if seen == (2 if state == "S" else 1):  # a thread that hands on a lock sleeps for a moment
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} is in states {found}, not {state}, for {LIMIT_S:.0f} s")
        time.sleep(0.0003)


class CountedServer:
    """A server of a checkout, whose front process runs under callgrind, or its worker too."""

    def __init__(self, server: servers.Server, folder: Path, worker: bool) -> None:
        self._server, self._front = server, server.process.pid
        self._workers = servers.tree(self._front)[1:]
        counted = CountedProcess(self._workers[0] if worker else self._front, folder)
        counted.count()
        self._counted = counted
        self._settle()

    def _settle(self) -> None:
        """Wait until what follows a start is over. Raises RuntimeError."""
        deadline = time.monotonic() + LIMIT_S
        self._counted.take()
        while True:
            time.sleep(REST_S)
            if self._counted.take()[0] < REST_INSTRUCTIONS:
                return
            if time.monotonic() > deadline:
                raise self._server.fail(f"does not come to rest in {LIMIT_S:.0f} s")

    def measure(self, row: Row, connections: int, streams: int, turns: int) -> Cost:
        """The median of SEGMENTS of so many turns."""
        kind = Http2Connection if row.http2 else Http1Connection
        with contextlib.ExitStack() as stack:
            asking: list[Connection] = []
            for _ in range(connections):
                asking.append(kind(self._server.port, row, streams))
                stack.callback(asking[-1].close)
            alone = row.paced or connections * streams == 1
            turn = self._free_turn if alone else self._turn
            for _ in range(max(WARM_TURNS, turns)):
                turn(asking)
            self._counted.take()
            taken = [self._segment(turn, asking, turns) for _ in range(SEGMENTS)]
        requests = connections * streams * turns
        taken.sort(key=lambda one: one[0])
        instructions, syscalls, dump = taken[SEGMENTS // 2]
        functions = {name: cost / requests for name, cost in read_functions(dump).items()}
        return Cost(instructions / requests, syscalls / requests, functions)

    def _segment(
        self, turn: Callable[[Sequence[Connection]], None], asking: Sequence[Connection], turns: int
    ) -> tuple[int, int, str]:
        """(instructions, system calls, callgrind's file)."""
        for _ in range(turns):
            turn(asking)
        wait_for_state(self._front, "S")
        return self._counted.take()

    def _turn(self, asking: Sequence[Connection]) -> None:
        """All at once: the front reads, then the workers compute, then the front answers."""
        wait_for_state(self._front, "S")
        stopped = [self._front, *self._workers]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            for pid in stopped:
                wait_for_state(pid, "T")
            for one in asking:
                one.send()
            os.kill(self._front, signal.SIGCONT)
            while sum(one.more() for one in asking):
                time.sleep(0.0005)
            wait_for_state(self._front, "S")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        for one in asking:
            one.receive()

    def _free_turn(self, asking: Sequence[Connection]) -> None:
        for one in asking:
            one.send()
        for one in asking:
            one.receive()


@contextlib.contextmanager
def counted_server(
    python: Path, models: Sequence[str], *, worker: bool = False, keys: str = "", options: Sequence[str] = ()
) -> Iterator[CountedServer]:
    """The server of a checkout, named by its interpreter, with models of bench/repository and `text`. `keys`
    is a file of API keys, which it asks for; `options` are further ones of its command line.

    Raises RuntimeError with the end of its log when it does not start.
    """
    port = servers.free_port()
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as name:
        folder = Path(name)
        for model in models:
            if model == "text":
                (folder / "models/text/1").mkdir(parents=True)
                (folder / "models/text/model.yaml").write_text(TEXT_YAML)
                (folder / "models/text/1/model.py").write_text(TEXT_MODEL)
            else:
                shutil.copytree(workloads.REPOSITORY / model, folder / "models" / model)
        command = ["env", f"--chdir={folder}", "--unset=PYTHONPATH", *ENVIRONMENT, "valgrind"]
        command += ["--tool=callgrind", "--instr-atstart=no", f"--vgdb-prefix={folder}/vgdb"]
        command += [f"--callgrind-out-file={folder}/counts.%p", f"--log-file={folder}/log.%p"]
        command += ["--trace-syscalls=yes", f"--trace-children={'yes' if worker else 'no'}"]
        command += [str(python), "-c", LAUNCH, "serve", f"{folder}/models", "--frontends", "1"]
        command += ["--poll-s", "3600"]  # a look at the repository costs more than a few requests
        command += ["--listen", f"127.0.0.1:{port}={DIALECTS}"]
        command += [*(("--keys", keys) if keys else ()), *options]
        cores = sorted(os.sched_getaffinity(0))
        with servers.started(f"fastserve of {python}", command, port, cores) as server:
            workload = WORKLOADS[models[0]]
            body = workloads.body(workload)
            if not keys:
                servers.wait_ready(server, lambda: servers.verify(server, workload, body), START_S)
            servers.wait_ready(server, lambda: servers.healthy(server), START_S)
            yield CountedServer(server, folder, worker)


Way = tuple[str, int]  # row, requests a turn
HEAD = ("row", "requests a turn", "instructions a request", "system calls")
HEAD_OF_TWO = (*HEAD[:2], "old", "new", "new / old", "system calls, old", "new")
HEAD_OF_KEYS = (*HEAD[:2], "without keys", "with keys", "with / without", "system calls, without", "with")
HEAD_OF_TRACES = (*HEAD[:2], "without traces", "with traces", *HEAD_OF_KEYS[4:])
NO_COLLECTOR = "http://127.0.0.1:9"  # spans are made, and no further than the exporter's process


def measure_keys(python: Path, names: Sequence[str]) -> Iterator[tuple[Way, list[Cost]]]:
    """Each way of each row with what the same requests cost without API keys and with a file of 100."""
    rows = make_rows()
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastserve-bench-")), "keys.yaml")
        made = [make_key(f"k{number}", ("infer",)) for number in range(100)]
        with changing(file) as entries:
            entries += [entry for _, entry in made]
        contexts = [counted_server(python, MODELS), counted_server(python, MODELS, keys=str(file))]
        with ThreadPoolExecutor(2) as pool:
            counted = list(pool.map(stack.enter_context, contexts))
        for name in names:
            header = "authorization" if rows[name].http2 else "Authorization"
            row = replace(rows[name], lines=(*rows[name].lines, header, f"Bearer {made[50][0]}"))
            for connections, streams, turns in row.ways():
                costs = [one.measure(row, connections, streams, turns) for one in counted]
                yield (name, connections * streams), costs


def measure_traces(python: Path, names: Sequence[str], ratio: float) -> Iterator[tuple[Way, list[Cost]]]:
    """Each way of each row with what it costs without traces and where a share of requests is traced."""
    rows = make_rows()
    traced = ("--otel", NO_COLLECTOR, "--otel-ratio", str(ratio))
    with contextlib.ExitStack() as stack:
        contexts = [counted_server(python, MODELS), counted_server(python, MODELS, options=traced)]
        with ThreadPoolExecutor(2) as pool:
            counted = list(pool.map(stack.enter_context, contexts))
        for name in names:
            for connections, streams, turns in rows[name].ways():
                costs = [one.measure(rows[name], connections, streams, turns) for one in counted]
                yield (name, connections * streams), costs


def measure(pythons: Sequence[Path], names: Sequence[str], worker: bool) -> Iterator[tuple[Way, list[Cost]]]:
    """Each way of each row with what it costs each checkout: its front process, or the worker of `tiny`."""
    rows, models = make_rows(), ("tiny",) if worker else (*MODELS, "text")
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(pythons)) as pool:
            contexts = [counted_server(python, models, worker=worker) for python in pythons]
            counted = list(pool.map(stack.enter_context, contexts))
        for name in names:
            for connections, streams, turns in rows[name].ways():
                costs = [one.measure(rows[name], connections, streams, turns) for one in counted]
                yield (name, connections * streams), costs


def print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def cells_of(way: Way, costs: Sequence[Cost]) -> list[str]:
    """A line of the table. The older checkout is the first of two."""
    counts = [f"{cost.instructions:,.0f}" for cost in costs]
    if len(costs) == 2:
        counts.append(f"{costs[1].instructions / costs[0].instructions:.3f}")
    return [way[0], str(way[1]), *counts, *(f"{cost.syscalls:.1f}" for cost in costs)]


def print_functions(way: Way, costs: Sequence[Cost], count: int) -> None:
    """The functions that differ most, or of one checkout those that cost most."""
    none: dict[str, float] = {}
    old, new = [none] * (2 - len(costs)) + [cost.functions for cost in costs]
    change = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in {*new, *old}}
    print(f"\n{way[0]}, {way[1]} a turn: instructions a request in a function itself: old, new, change")
    for name in sorted(change, key=lambda one: -abs(change[one]))[:count]:
        print(f"{old.get(name, 0.0):12,.0f} {new.get(name, 0.0):12,.0f} {change[name]:+12,.0f}  {name}")


@click.command(help="Count instructions of the front process per request.")
@click.argument("names", nargs=-1, type=click.Choice(sorted(make_rows())), metavar="[ROW]...")
@click.option(
    "--old", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The interpreter of another checkout's environment, to compare with.",
)  # fmt: skip
@click.option(
    "--new", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=sys.executable,
    help="The interpreter whose fastserve is measured; this one's by default.",
)  # fmt: skip
@click.option("--functions", default=0, help="Print so many functions that differ most, for each row.")
@click.option("--worker", is_flag=True, help="Count the worker of `tiny` in place of the front process.")
@click.option("--keys", is_flag=True, help="Compare the server without API keys and with them.")
@click.option(
    "--traced", type=click.FloatRange(0, 1),
    help="Compare the server without traces and with this share of requests traced.",
)  # fmt: skip
def main(
    names: tuple[str, ...],
    old: Path | None,
    new: Path,
    functions: int,
    worker: bool,
    keys: bool,
    traced: float | None,
) -> None:
    if shutil.which("valgrind") is None:
        raise click.ClickException("valgrind is needed and not installed: apt-get install valgrind")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every server is stopped on the way out
    chosen = names or (("tiny", "grpc-tiny") if worker else tuple(make_rows()))
    if keys:
        head: tuple[str, ...] = HEAD_OF_KEYS
    elif traced is not None:
        head = HEAD_OF_TRACES
    else:
        head = HEAD if old is None else HEAD_OF_TWO
    print_row(head)
    print("|---|" + "---:|" * (len(head) - 1))
    taken = []
    pythons = [one.absolute() for one in (old, new) if one is not None]
    if keys:
        measured = measure_keys(pythons[-1], chosen)
    elif traced is not None:
        measured = measure_traces(pythons[-1], chosen, traced)
    else:
        measured = measure(pythons, chosen, worker)
    for way, costs in measured:
        print_row(cells_of(way, costs))
        taken.append((way, costs))
    for way, costs in taken if functions else ():
        print_functions(way, costs, functions)


if __name__ == "__main__":
    main()
