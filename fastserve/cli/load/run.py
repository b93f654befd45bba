"""Starts the generator processes, shows how far they are, and gathers what they saw."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import msgspec

from fastserve.cli.load.generator import Plan
from fastserve.cli.load.histogram import Histogram

Process = subprocess.Popen[bytes]
GOOD = ("200", "OK")


@dataclass
class Texts:
    """Of streams of text, all processes together."""

    first: Histogram = field(default_factory=Histogram)
    gaps: Histogram = field(default_factory=Histogram)
    pieces: int = 0
    answers: int = 0
    tokens: int = 0
    """Of whole answers, as their pieces are."""
    answers_pieces: int = 0

    def add(self, result: dict[str, Any]) -> None:
        for mine, theirs in ((self.first, result["first"]), (self.gaps, result["gaps"])):
            mine.merge({int(bucket): count for bucket, count in theirs.items()})
        self.pieces += result["pieces"]
        answers, tokens, pieces = result["answers"]
        self.answers, self.tokens = self.answers + answers, self.tokens + tokens
        self.answers_pieces += pieces

    def rate(self, seconds: float) -> float:
        """Tokens a second: pieces of the measured time, each worth what those of whole answers are."""
        worth = self.tokens / self.answers_pieces if self.answers_pieces else 0.0
        return self.pieces * worth / seconds if seconds else 0.0


@dataclass
class Outcome:
    """All processes together. `seconds` is the measured time, without the warm-up."""

    histogram: Histogram = field(default_factory=Histogram)
    statuses: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    body_bytes: int = 0
    seconds: float = 0.0
    texts: Texts = field(default_factory=Texts)

    def add(self, result: dict[str, Any]) -> None:
        self.histogram.merge({int(bucket): count for bucket, count in result["histogram"].items()})
        for mine, theirs in ((self.statuses, result["statuses"]), (self.faults, result["faults"])):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.body_bytes += result["body_bytes"]
        self.texts.add(result["texts"])
        self.seconds = max(self.seconds, result["seconds"])

    @property
    def rate(self) -> float:
        return self.histogram.total / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        return sum(self.faults.values()) + sum(n for s, n in self.statuses.items() if s not in GOOD)


def share(total: int, parts: int) -> list[int]:
    """`total` in at most `parts` nearly equal pieces, none of them empty."""
    parts = min(parts, total)
    return [total // parts + (i < total % parts) for i in range(parts)]


@contextmanager
def started(plans: Sequence[Plan], requests: Sequence[bytes]) -> Iterator[list[Process]]:
    """One process per plan, ended whatever happens."""
    processes: list[Process] = []
    command = [sys.executable, "-m", "fastserve.cli.load.generator"]
    try:
        for plan in plans:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(plan) + b"\n" + b"".join(requests))
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def read(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise click.ClickException(f"a load process ended with exit code {process.wait()}")
    message: dict[str, Any] = json.loads(line)
    return message


def results(process: Process, progress: Callable[[int], None]) -> dict[str, Any]:
    """Reads to the end; `progress` hears the number of requests so far."""
    while True:
        message = read(process)
        if "result" in message:
            found: dict[str, Any] = message["result"]
            return found
        progress(message["done"])


def run(plans: Sequence[Plan], requests: Sequence[bytes], show: bool) -> Outcome:
    """The load of all plans at once. `show` draws a progress bar on standard error."""
    outcome = Outcome()
    with started(plans, requests) as processes:
        for process in processes:
            read(process)  # {"ready": true}
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        # The first process stands for all of them on the bar; the others are silent until their result.
        outcome.add(watch(processes[0], plans[0], show))
        for process in processes[1:]:
            outcome.add(results(process, lambda done: None))
    return outcome


def watch(process: Process, plan: Plan, show: bool) -> dict[str, Any]:
    """Reads one process to its end; the bar counts time."""
    if not show:
        return results(process, lambda done: None)
    total_ms = int((plan.warm_up_s + plan.duration_s) * 1000)
    began = time.monotonic()
    with click.progressbar(length=total_ms, label="load", file=sys.stderr, show_percent=True) as bar:

        def progress(done: int) -> None:
            passed_ms = int((time.monotonic() - began) * 1000)
            bar.update(min(passed_ms, total_ms) - bar.pos)

        found = results(process, progress)
        bar.update(total_ms - bar.pos)
    return found
