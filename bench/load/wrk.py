"""One run of the load generator wrk, pinned to its core."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("post.lua")


class NoWrk(RuntimeError):
    """wrk is not on PATH."""


@dataclass(frozen=True)
class Load:
    """What wrk saw. `failed` counts refused, broken, timed-out and non-2xx requests together."""

    requests: int
    seconds: float
    p50_us: float
    p99_us: float
    failed: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def require() -> None:
    for tool, package in (("wrk", "wrk"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            raise NoWrk(f"{tool} is needed and not installed: apt-get install {package}")


def post(
    url: str,
    body_file: Path,
    content_type: str,
    *headers: str,
    connections: int,
    seconds: float,
    cores: Sequence[int],
    threads: int = 1,
) -> Load:
    """`headers` are further ones, name and value in turn. Raises RuntimeError when wrk gives no result."""
    command = ["taskset", "-c", ",".join(map(str, cores)), "wrk", f"-t{threads}", f"-c{connections}"]
    command += [f"-d{max(1, round(seconds))}s", "--timeout", "10s", "-s", str(SCRIPT), url]
    command += ["--", str(body_file), content_type, *headers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return Load(**json.loads(line.removeprefix("RESULT ")))
    raise RuntimeError(f"wrk gave no result: {done.stdout}{done.stderr}")
