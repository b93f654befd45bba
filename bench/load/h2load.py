"""One run of the load generator h2load, pinned to its core: HTTP/2 with any body, gRPC too, or HTTP/1.1.

Of a gRPC reply it sees the HTTP status alone, which is 200 for failed calls too: who asks gRPC looks at the
server's own count of errors (servers.count_answers).
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.load.wrk import Load

_DONE = re.compile(r"finished in [\d.]+m?s, ([\d.]+) req/s")
_COUNTS = re.compile(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")


class NoH2load(RuntimeError):
    """h2load is not on PATH."""


def require() -> None:
    if shutil.which("h2load") is None:
        raise NoH2load("h2load is needed and not installed: apt-get install nghttp2-client")


def post(
    url: str,
    body_file: Path,
    content_type: str,
    *,
    connections: int,
    streams: int,
    seconds: float,
    core: int,
    cores: Sequence[int] = (),
    http1: bool = False,
    times: Path | None = None,
) -> Load:
    """`cores`: several in place of one, each with a thread. `times`: a file for the time of each request;
    without it the percentiles are 0. Raises RuntimeError when a request failed."""
    listed = ",".join(map(str, cores or [core]))
    command = ["taskset", "-c", listed, "h2load", f"-t{min(len(cores) or 1, connections)}"]
    command += [f"-c{connections}", f"-m{streams}", f"-D{max(1, round(seconds))}s"]  # whole ones
    command += ["-d", str(body_file), "-H", f"content-type: {content_type}", "-H", "te: trailers"]
    command += ["--h1"] * http1 + (["--log-file", str(times)] if times else []) + [url]
    if times is not None:
        times.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    rate, counts = _DONE.search(done.stdout), _COUNTS.search(done.stdout)
    if rate is None or counts is None or any(map(int, counts.groups()[1:])) or not int(counts[1]):
        raise RuntimeError(f"h2load: {done.stdout}{done.stderr}")
    requests = int(counts[1])
    p50_us, p99_us = percentiles(times) if times else (0.0, 0.0)
    return Load(requests, requests / float(rate[1]), p50_us, p99_us, 0)


def grpc_rate(
    port: int, path: str, message: bytes, *, connections: int, streams: int, seconds: float, core: int
) -> float:
    """Return unary calls a second. Raises RuntimeError when one had no reply."""
    with tempfile.NamedTemporaryFile(prefix="fastserve-bench-") as body:
        body.write(b"\0" + len(message).to_bytes(4, "big") + message)
        body.flush()
        url, kind = f"http://127.0.0.1:{port}{path}", "application/grpc"
        how = {"connections": connections, "streams": streams, "core": core}
        return post(url, Path(body.name), kind, seconds=seconds, **how).rate


def percentiles(times: Path) -> tuple[float, float]:
    """The 50th and 99th of a file of times, in microseconds."""
    spans = sorted(float(line.split("\t")[2]) for line in times.read_text().splitlines())
    return statistics.median(spans), spans[len(spans) * 99 // 100]
