"""The text engine in process, without sockets, against transformers: ratios of one run on one machine.

    python -m bench.text.engine FOLDER [--device cuda] [--threads 2] [--new 96] [--rounds 3]

`generate` is transformers' own, one request after another; `forward` is a bare loop of its forward over a
batch of equal lengths, without scheduling or sampling but an argmax; `batching` is transformers' continuous
batching. Rounds are run in turns, the best of each counts: a neighbour's load falls on all of them. On a
machine with more work than cores, --threads 1 --cpu-time counts what of the time was this process's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

from bench.text import rivals
from bench.text.runs import Bench, percentile

RIVALS = ("generate", "forward", "batching")


class Line(NamedTuple):
    """One line of the table; `good` is None where there is no goal."""

    name: str
    goal: str
    measured: str
    good: bool | None = None


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch sees fit")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, default=128)
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=RIVALS)
    parser.add_argument("--cpu-time", action="store_true", help="of the process, in place of the clock's")
    asked = parser.parse_args()
    bench = Bench(asked)
    clock = "processor time" if asked.cpu_time else "time"
    load = f"{asked.concurrency} x {asked.prompt} + {asked.new} tokens"
    print(f"{asked.folder.name}, {bench.engine.info.dtype} on {asked.device}, {load},")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {clock}")
    for line in (*throughput(bench, asked), *steps(bench), *latency(bench), *manners(bench)):
        mark = {None: " ", True: "+", False: "-"}[line.good]
        print(f"{mark} {line.name:<62} {line.goal:>16}  {line.measured}", flush=True)


def throughput(bench: Bench, asked: argparse.Namespace) -> list[Line]:
    """Tokens per second, all of it: prompts too."""
    other = rivals.Rivals(asked.folder, bench.dtype, asked.device, bench.clock)
    prompts = bench.prompts(asked.concurrency)
    best: dict[str, float] = {}
    ways = {
        "generate": lambda: other.generate(prompts[: max(2, asked.concurrency // 8)], asked.new),
        "forward": lambda: other.forward(prompts, asked.new),
        "batching": lambda: other.batching(prompts, asked.new),
        "engine": lambda: bench.rate(prompts, asked.new),
        "engine 1": lambda: bench.rate(prompts[:1], asked.new),
        "engine 8": lambda: bench.rate(prompts[:8], asked.new),
    }
    for name in set(RIVALS) - set(asked.rivals):
        del ways[name]
    for _ in range(asked.rounds):
        for name, way in ways.items():
            best[name] = max(best.get(name, 0.0), way())
    ours = best["engine"]
    lines = [Line(f"{name}, tokens/s", "", f"{rate:.0f}") for name, rate in best.items()]
    goals = {
        "generate": ("one-after-another generate", 10.0),
        "forward": ("a raw batched forward loop", 0.95),
        "batching": ("transformers' continuous batching", 2.0),
    }
    for name in asked.rivals:
        (words, goal), ratio = goals[name], ours / best[name]
        lines.append(Line(f"against {words}", f"at least {goal} x", f"{ratio:.2f} x", ratio >= goal))
    return lines


def steps(bench: Bench) -> list[Line]:
    """The share of a step that is not the model's."""
    every = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "typical_p": 0.95}
    every |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
    lines = []
    for name, goal, settings in (("greedy", 8.0, {}), ("every sampler on", 12.0, every)):
        share = min(bench.share_outside(settings) for _ in range(bench.rounds))
        words = f"step time outside the forward, {name}"
        lines.append(Line(words, f"at most {goal:.0f} %", f"{share:.1f} %", share <= goal))
    return lines


def latency(bench: Bench) -> list[Line]:
    """Times of tokens, of the best round."""
    idle = min(percentile(bench.idle_firsts(), 0.5) for _ in range(bench.rounds))
    runs = [bench.at_once() for _ in range(bench.rounds)]
    first = min(percentile(firsts, 0.5) for firsts, _ in runs)
    gaps = min((gaps for _, gaps in runs), key=lambda gaps: percentile(gaps, 0.99))
    half, late = percentile(gaps, 0.5), percentile(gaps, 0.99)
    worst = min(bench.beside_long_prompt() for _ in range(bench.rounds))
    lines = [
        Line("TTFT p50, idle", "at most 8 ms", f"{idle:.1f} ms", idle <= 8),
        Line("TTFT p50, all arriving at once", "at most 60 ms", f"{first:.1f} ms", first <= 60),
        Line("gap p50", "at most 7 ms", f"{half:.1f} ms", half <= 7),
        Line("gap p99", "at most 25 ms", f"{late:.1f} ms", late <= 25),
        Line("worst gap of 16, beside a prompt of 900", "at most 15 ms", f"{worst:.1f} ms", worst <= 15),
    ]
    return lines


def manners(bench: Bench) -> list[Line]:
    """Cancelling, and who goes first."""
    freed, took = bench.cancel()
    urgent, patient = bench.priorities()
    return [
        Line("cancel to slot freed", "1 step", f"{freed} step, {took:.1f} ms", freed == 1),
        Line(
            "TTFT of 4 of priority 1 behind 40 queued, against the queued",
            "under 1/5",
            f"{urgent:.0f} ms against {patient:.0f} ms",
            urgent < patient / 5,
        ),
    ]


if __name__ == "__main__":
    main()
