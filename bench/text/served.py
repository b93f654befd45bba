"""Text generation through the real server and real HTTP clients, against transformers in a process by itself.

    python -m bench.text.served FOLDER [--concurrency 32] [--new 96] [--rounds 3] [--device cuda]

The server's worker has as many threads as transformers gets here. Server and clients share the machine; the
rivals run while they idle, in turns with them, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.load.servers import Server, cpu_ns, fastserve, healthy, wait_ready
from bench.text.clients import Heard, ask
from bench.text.engine import Line
from bench.text.rivals import Rivals
from bench.text.runs import percentile

# For every prompt token: any model has these.
VOCAB = 1000
LONG, BESIDE = 900, 16
# The goals in milliseconds are of a machine whose bare loop makes so many tokens a second of 32 sequences.
GOALS_RATE = 6100


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with served(asked) as server:
        bench = Served(server, asked)
        for line in (*bench.throughput(), *bench.latency(), *bench.manners()):
            mark = {None: " ", True: "+", False: "-"}[line.good]
            print(f"{mark} {line.name:<62} {line.goal:>16}  {line.measured}", flush=True)


@contextmanager
def served(asked: argparse.Namespace) -> Iterator[Server]:
    """The folder as model `text` of a server, on every core there is."""
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as home:
        model = Path(home) / "text"
        model.mkdir()
        shutil.copytree(asked.folder, model / "1")
        sizes = f"text: {{max_sequences: {asked.concurrency}}}\nthreads: {asked.threads}\n"
        devices = f"device: {asked.device}\n" if asked.device != "cpu" else ""
        (model / "model.yaml").write_text(f"backend: text\n{sizes}{devices}")
        with fastserve(home, sorted(os.sched_getaffinity(0))) as server:
            wait_ready(server, lambda: healthy(server))
            yield server


@dataclass(frozen=True)
class Asked:
    """One request to come."""

    port: int
    prompt: list[int]
    new: int
    heard: Heard | None
    more: dict[str, int]

    async def __call__(self) -> Heard:
        return await ask(self.port, self.prompt, self.new, self.heard, **self.more)


class Served:
    """One server, and the sizes of its requests."""

    def __init__(self, server: Server, asked: argparse.Namespace) -> None:
        self._server, self._asked = server, asked
        self._bare_ms = float("nan")  # a step of transformers' bare loop; throughput() measures it
        self._dice = random.Random(0)
        self._run([self._ask(8) for _ in range(2)])

    def throughput(self) -> list[Line]:
        """Tokens per second, all of it: prompts too."""
        asked = self._asked
        other = Rivals(asked.folder, torch.float32, asked.device, time.perf_counter)
        best: dict[str, float] = {}
        prompts = self._prompts(asked.concurrency)
        costs = []
        for _ in range(asked.rounds):
            for name, way in {
                "generate": lambda: other.generate(prompts[: max(2, asked.concurrency // 8)], asked.new),
                "forward": lambda: other.forward(prompts, asked.new),
                "batching": lambda: other.batching(prompts, asked.new),
                "served": lambda: self._rate(costs),
            }.items():
                best[name] = max(best.get(name, 0.0), way())
        self._bare_ms = asked.concurrency / best["forward"] * 1e3
        lines = [Line(f"{name}, tokens/s", "", f"{rate:.0f}") for name, rate in best.items()]
        for words, name, goal in (
            ("one-after-another generate", "generate", 10.0),
            ("a raw batched forward loop", "forward", 0.95),
            ("transformers' continuous batching", "batching", 2.0),
        ):
            ratio = best["served"] / best[name]
            lines.append(Line(f"against {words}", f"at least {goal} x", f"{ratio:.2f} x", ratio >= goal))
        cost = min(costs)
        return [
            *lines,
            Line("front process, a streamed token", "at most 15 us", f"{cost:.1f} us", cost <= 15),
        ]

    def latency(self) -> list[Line]:
        """Times of tokens, of the best round."""
        rounds = range(self._asked.rounds)
        idle = min(
            percentile([self._run([self._ask(1)])[0].first_ms for _ in range(20)], 0.5) for _ in rounds
        )
        runs = [self._run([self._ask() for _ in range(self._asked.concurrency)]) for _ in rounds]
        first = min(percentile([one.first_ms for one in run], 0.5) for run in runs)
        gaps = min(
            ([gap for one in run for gap in one.gaps_ms] for run in runs),
            key=lambda found: percentile(found, 0.99),
        )
        half, late = percentile(gaps, 0.5), percentile(gaps, 0.99)
        beside = min(BESIDE, self._asked.concurrency - 1)  # the long prompt wants a row, too
        worst = [asyncio.run(self._beside_long_prompt(beside)) for _ in rounds if beside]
        return [
            Line("TTFT p50, idle", "at most 8 ms", f"{idle:.1f} ms", idle <= 8),
            Line("TTFT p50, all arriving at once", "at most 60 ms", self._in_steps(first, 60), first <= 60),
            Line("gap p50", "at most 7 ms", self._in_steps(half, 7), half <= 7),
            Line("gap p99", "at most 25 ms", self._in_steps(late, 25), late <= 25),
            *(
                Line(
                    f"worst gap of {beside}, beside a prompt of {LONG}",
                    "at most 15 ms",
                    self._in_steps(ms, 15),
                    ms <= 15,
                )
                for ms in sorted(worst)[:1]
            ),
        ]

    def _in_steps(self, ms: float, goal_ms: float) -> str:
        """A time, and how many steps of the bare loop that is, of how many the goal is: milliseconds are the
        machine's."""
        goal = goal_ms * GOALS_RATE / 32e3
        return f"{ms:.1f} ms, {ms / self._bare_ms:.2f} bare steps ({goal:.1f})"

    def manners(self) -> list[Line]:
        """Who goes first."""
        urgent, patient = asyncio.run(self._priorities())
        words = "TTFT of 4 of priority 1 behind 40 queued, against the queued"
        measured = f"{urgent:.0f} ms against {patient:.0f} ms"
        return [Line(words, "under 1/5", measured, urgent < patient / 5)]

    def _prompts(self, count: int, length: int = 0) -> list[list[int]]:
        return [
            [self._dice.randrange(VOCAB) for _ in range(length or self._asked.prompt)] for _ in range(count)
        ]

    def _ask(self, new: int = 0, heard: Heard | None = None, **more: int) -> Asked:
        return Asked(self._server.port, self._prompts(1)[0], new or self._asked.new, heard, more)

    def _run(self, asked: list[Asked]) -> list[Heard]:
        async def run() -> list[Heard]:
            return await asyncio.gather(*(one() for one in asked))

        return asyncio.run(run())

    def _rate(self, costs: list[float]) -> float:
        """Tokens per second of a full house; the front's CPU time for each is one more of `costs`, in us."""
        asked = [self._ask() for _ in range(self._asked.concurrency)]
        tokens = len(asked) * self._asked.new
        start, before = time.perf_counter(), cpu_ns(self._server.process.pid)
        self._run(asked)
        took = time.perf_counter() - start
        costs.append((cpu_ns(self._server.process.pid) - before) / tokens / 1e3)
        return tokens / took

    async def _beside_long_prompt(self, beside: int) -> float:
        """The worst gap, in milliseconds, of so many that write while a long prompt arrives."""
        heard = [Heard() for _ in range(beside)]
        writing = [asyncio.ensure_future(self._ask(120, one)()) for one in heard]
        while min(len(one.times) for one in heard) < 8:
            await asyncio.sleep(0.001)
        before = [len(one.times) for one in heard]
        await ask(self._server.port, self._prompts(1, LONG)[0], 2)
        after = [len(one.times) for one in heard]
        await asyncio.gather(*writing)
        spans = zip(heard, before, after, strict=True)
        return max(gap for one, first, last in spans for gap in one.gaps_ms[first - 1 : last])

    async def _priorities(self) -> tuple[float, float]:
        """Mean milliseconds to the first token of 4 urgent requests behind 40 that wait, and of those 40."""
        # Rows become free one by one, as they do where requests differ.
        house = [Heard() for _ in range(self._asked.concurrency)]
        running = [asyncio.ensure_future(self._ask(24 + 3 * i, one)()) for i, one in enumerate(house)]
        while not all(one.times for one in house):
            await asyncio.sleep(0.001)
        patient = [asyncio.ensure_future(self._ask()()) for _ in range(40)]
        await asyncio.sleep(0)  # they are sent before the urgent ones
        urgent = [asyncio.ensure_future(self._ask(priority=1)()) for _ in range(4)]
        await asyncio.gather(*running)
        waits = [[one.first_ms for one in await asyncio.gather(*many)] for many in (urgent, patient)]
        return sum(waits[0]) / len(urgent), sum(waits[1]) / len(patient)


if __name__ == "__main__":
    main()
