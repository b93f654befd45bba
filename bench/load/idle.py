"""What connections cost on which nothing happens: memory of each, and what the busy ones lose to 10,000.

An idle connection has made one request and been answered, as those of a client's pool have.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import workloads
from bench.load import h2load, servers
from bench.load.measure import Plan
from bench.load.servers import Server
from bench.load.table import Row
from bench.workloads import WORKLOADS
from fastserve._ext.http2_frames import frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS = 1, 4  # types of frames, and their flags (RFC 9113, 6)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PARTS = ["idle-memory", "idle-busy"]
MEASURED = 4000
IDLE, BUSY = 10_000, 100
AT_ONCE = 200  # opened before anybody's answer is waited for
BUSY_S = 2.0
SPARE_DESCRIPTORS = 1000
# GET http://a/healthz/live, nothing of it to be indexed
HEAD = b"\x82\x86\x04\x0d/healthz/live\x01\x01a"
ASK = (
    PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(SETTINGS, ACK, 0, b"")
    + frame(HEADERS, END_STREAM | END_HEADERS, 1, HEAD)
)
ASK_1 = b"GET /healthz/live HTTP/1.1\r\nHost: a\r\n\r\n"


def raise_limit(connections: int) -> None:
    """Let this process, and what it starts, have so many. Raises RuntimeError when it may not."""
    need = connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise RuntimeError(f"{need} open files are needed, this shell allows {hard}: ulimit -n {need}")
    if soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


@contextlib.contextmanager
def idle(server: Server, count: int, ask: bytes = ASK) -> Iterator[None]:
    """So many connections, each with one request answered."""
    links: list[socket.socket] = []
    try:
        while len(links) < count:
            some = [
                socket.create_connection(("127.0.0.1", server.port), timeout=20)
                for _ in range(min(AT_ONCE, count - len(links)))
            ]
            links += some
            for link in some:
                link.sendall(ask)
            wait_quiet(some)
        yield
    finally:
        for link in links:
            link.close()


def wait_quiet(links: list[socket.socket]) -> None:
    """Until each has been answered, and nothing more comes."""
    with selectors.DefaultSelector() as selector:
        for link in links:
            link.setblocking(False)
            selector.register(link, selectors.EVENT_READ)
        silent = set(links)
        while found := selector.select(0.05 if not silent else 20):
            for key, _ in found:
                link = key.fileobj
                assert isinstance(link, socket.socket)
                if not link.recv(65536):
                    raise RuntimeError("the server has closed a connection")
                silent.discard(link)
        if silent:
            raise RuntimeError(f"{len(silent)} connections are not answered")


def pss_bytes(server: Server) -> int:
    """Of the front process."""
    for line in Path(f"/proc/{server.process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{server.name} is gone")


def row(part: str, plan: Plan) -> Row:
    """One line of the table."""
    return memory_row(plan) if part == "idle-memory" else busy_row(plan)


def memory_row(plan: Plan) -> Row:
    raise_limit(MEASURED)
    found = {}
    for name, ask in (("HTTP/1.1", ASK_1), ("HTTP/2", ASK)):
        with servers.listening_model("tiny", [plan.server_core]) as server:
            servers.wait_ready(server, lambda server=server: servers.healthy(server))  # type: ignore[misc]
            with idle(server, AT_ONCE, ask):
                before = pss_bytes(server)
                with idle(server, MEASURED, ask):
                    found[name] = (pss_bytes(server) - before) / MEASURED / 1000
        plan.say(f"idle-memory: {name} {found[name]:.2f} kB")
    ours = found["HTTP/2"]
    label = f"an idle connection of {MEASURED:,}, HTTP/2"
    return Row(
        label, "", f"{ours:.1f} kB", ours, 12, 6, unit="kB", note=f"HTTP/1.1 {found['HTTP/1.1']:.1f} kB"
    )


def busy_row(plan: Plan) -> Row:
    """Without and with the idle ones, in turns."""
    h2load.require()
    raise_limit(IDLE + BUSY)
    tiny, without, beside = WORKLOADS["tiny"], [], []
    flags = ("--limits-connections", str(2 * IDLE), "--limits-idle-timeout-s", "600")
    with (
        tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder,
        servers.listening_model("tiny", [plan.server_core], *flags) as server,
    ):
        body = Path(folder) / "body"
        body.write_bytes(workloads.body(tiny))
        servers.wait_ready(server, lambda: servers.verify(server, tiny, body.read_bytes()))

        def load() -> float:
            return h2load.post(
                server.origin + tiny.path, body, tiny.content_type,
                connections=BUSY, streams=1, seconds=BUSY_S, core=plan.load_core,
            ).rate  # fmt: skip

        for turn in range(max(3, plan.repeats)):
            without.append(load())
            with idle(server, IDLE):
                beside.append(load())
            plan.say(f"idle-busy: {turn + 1}  {without[-1]:,.0f}/s, beside the idle ones {beside[-1]:,.0f}/s")
    ratio = statistics.median(low / high for low, high in zip(beside, without, strict=True))
    label = f"{BUSY} connections beside {IDLE:,} idle ones, HTTP/2"
    rates = [f"{statistics.median(rates):,.0f}/s" for rates in (without, beside)]
    return Row(label, rates[0], rates[1], ratio, 0.95, note="beside none")
