"""`fastserve bench`: a load generator for a model of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from math import log2
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from fastserve.cli.bench_requests import PROTOCOLS, LoadOptions
from fastserve.cli.client import ServerClient, Trust, url_option, with_trust
from fastserve.cli.load import LatencyHistogram, LoadPlan, LoadResult, floor_of, run_plans, share

option = partial(click.option, show_default=True)
PORTS = {"http": 80, "https": 443}
READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
PERCENTILES = (50, 90, 99, 99.9)
TEXT_PERCENTILES = (50, 90, 99, 100)
BAR_CHARS = 50
STEPS_PER_DOUBLING = 2


def address(url: str, flag: str) -> tuple[str, int]:
    """Return host and port of a URL that `flag` gives. Raises BadParameter."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise click.BadParameter(f"{url} is not http://HOST:PORT or https://HOST:PORT", param_hint=flag)
    return parts.hostname, parts.port or PORTS[parts.scheme]


@click.command(short_help="Put a running server under load.")
@click.argument("model")
@url_option
@option("--grpc", default="127.0.0.1:8001", metavar="[https://]HOST:PORT", help="The server's gRPC address.")
@option("--protocol", type=click.Choice(list(PROTOCOLS)), default="tfserving", help="How it is asked; below.")
@option("-c", "--connections", type=click.IntRange(1), default=32, help="Requests at a time.")
@option("-d", "--duration", type=click.FloatRange(0.1), default=10.0, help="Seconds measured.")
@option("--warm-up", type=click.FloatRange(0), default=1.0, help="Seconds before, not measured.")
@option("--processes", type=click.IntRange(1), default=1, help="Processes that share the connections.")
@option("--rows", type=click.IntRange(1), default=1, help="Rows in each request.")
@option(
    "--length",
    type=click.IntRange(1),
    default=1,
    help="Items where the model takes any number; words of a prompt.",
)
@option("--tokens", type=click.IntRange(1), default=64, help="Tokens of each answer of text.")
@option("--signature", default="serving_default", help="Signature asked.")
@option("--data", type=READABLE, help="Send this file as every body.")
@option("--timeout", type=click.FloatRange(0.1), default=30.0, help="Seconds to wait for one reply.")
@option("--json", "as_json_text", is_flag=True, help="Print JSON instead of text.")
@with_trust
def bench(
    model: str, url: str, grpc: str, protocol: str, connections: int, duration: float, warm_up: float,
    processes: int, rows: int, length: int, tokens: int, signature: str, data: Path | None, timeout: float,
    as_json_text: bool, trust: Trust,
) -> None:  # fmt: skip
    """Keep CONNECTIONS requests to MODEL under way and show how long each took.

    Inputs are random, in the shapes the model's metadata tells. Exit code 1 when a request failed.

    \b
    fastserve bench half_plus_two
    fastserve bench digits -c 64 -d 30 --rows 4
    fastserve bench digits --protocol v2-binary --json
    fastserve bench llm --protocol text --length 100 --tokens 200

    \b
    Protocols:
      tfserving      TensorFlow Serving REST, rows as JSON
      tfserving-raw  the same, one tensor's bytes as the body
      v2             Open Inference Protocol V2 (KServe, Triton), JSON
      v2-binary      the same, tensors as bytes after a JSON header
      v2-grpc        V2 over gRPC, raw contents
      text           OpenAI's completions, streamed: time to the first token, gaps, tokens/s
      chat           OpenAI's chat completions, the same
    """
    server, chosen = ServerClient(url, trust), PROTOCOLS[protocol]
    grpc_url = grpc if "://" in grpc else f"http://{grpc}"
    target = grpc_url if chosen.grpc else server.url
    host, port = address(target, "--grpc" if chosen.grpc else "--url")
    options = LoadOptions(server, model, grpc_url, rows, length, signature, tokens)
    requests = chosen.requests(options, data.read_bytes() if data else None)
    plans = [
        LoadPlan(
            *(host, port, count, warm_up, duration, timeout),
            [one.body if chosen.grpc else one.encode(f"{host}:{port}") for one in requests],
            method=requests[0].path if chosen.grpc else "",
            events=chosen.events,
            trust=trust if target.startswith("https://") else None,
        )
        for count in share(connections, processes)
    ]
    result = run_plans(plans)
    lines = [json.dumps(as_json(result), indent=2)] if as_json_text else report(result)
    for line in lines:
        click.echo(line)
    sys.exit(1 if result.failed or not result.latency.total else 0)


def show_duration(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"


def report(result: LoadResult) -> Iterator[str]:
    """Return the lines for a terminal. The bars are of the gaps where the replies are streams of text."""
    latency, seconds = result.latency, result.seconds
    yield f"requests   {latency.total:,} in {seconds:.1f} s: {result.rate:,.1f}/s"
    yield f"replies    {result.body_bytes / 1e6 / max(seconds, 1e-9):,.2f} MB/s of bodies"
    yield f"latency    mean {show_duration(latency.mean())}"
    for percent in (*PERCENTILES, 100):
        yield f"  p{percent:<7g} {show_duration(latency.percentile(percent))}"
    if result.answers:
        yield f"tokens     {result.token_rate:,.1f}/s, {result.tokens / result.answers:,.1f} an answer"
        for name, histogram in (("first", result.first), ("gaps", result.gaps)):
            spans = (f"p{p:g} {show_duration(histogram.percentile(p))}" for p in TEXT_PERCENTILES)
            yield f"{name:<9}  {'  '.join(spans)}"
    for status, count in sorted(result.statuses.items()):
        yield f"status {status}  {count:,}"
    for fault, count in sorted(result.faults.items()):
        yield f"FAILED  {fault}: {count:,}"
    yield from bars(result.gaps if result.gaps.total else latency)


def bars(histogram: LatencyHistogram) -> Iterator[str]:
    """Return a line per half doubling of latency; the longest bar is the most common latency."""
    steps: dict[int, int] = {}
    for bucket, count in histogram.counts.items():
        step = int(log2(max(1, floor_of(bucket))) * STEPS_PER_DOUBLING)
        steps[step] = steps.get(step, 0) + count
    if not steps:
        return
    yield ""
    for step in range(min(steps), max(steps) + 1):
        count = steps.get(step, 0)
        upper = show_duration(2 ** ((step + 1) / STEPS_PER_DOUBLING))
        bar = "#" * round(count / max(steps.values()) * BAR_CHARS) or ("." if count else "")
        yield f"  < {upper:>8}  {count:>10,}  {bar}".rstrip()


def as_json(result: LoadResult) -> dict[str, Any]:
    """Return the figures by name, latencies in microseconds."""

    def spans(prefix: str, histogram: LatencyHistogram, percents: Iterable[float]) -> dict[str, float]:
        return {f"{prefix}p{percent:g}_us": histogram.percentile(percent) / 1000 for percent in percents}

    found: dict[str, Any] = {
        "requests": result.latency.total,
        "seconds": result.seconds,
        "requests_per_s": result.rate,
        "mean_us": result.latency.mean() / 1000,
        **spans("", result.latency, PERCENTILES),
        "body_bytes": result.body_bytes,
        "statuses": result.statuses,
        "faults": result.faults,
    }
    if result.answers:
        found |= {"tokens_per_s": result.token_rate, "answers": result.answers, "tokens": result.tokens}
        found |= spans("first_", result.first, TEXT_PERCENTILES)
        found |= spans("gap_", result.gaps, TEXT_PERCENTILES)
    return found
