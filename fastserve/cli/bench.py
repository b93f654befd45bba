"""`fastserve bench`: a load generator for a model of a running server."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import click

from fastserve.cli.load.protocols import PROTOCOLS
from fastserve.cli.load.requests import Target, Wish
from fastserve.cli.rest import Server, url_option
from fastserve.cli.trust import Trust, with_trust

option = partial(click.option, show_default=True)
PORTS = {"http": 80, "https": 443}
READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


def address(target: Target, over_grpc: bool) -> tuple[str, int]:
    """Where the connections of a load go."""
    url, flag = (target.grpc_url, "--grpc") if over_grpc else (target.http.url, "--url")
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
@option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@with_trust
def bench(
    model: str, url: str, grpc: str, protocol: str, connections: int, duration: float, warm_up: float,
    processes: int, rows: int, length: int, tokens: int, signature: str, data: Path | None, timeout: float,
    as_json: bool, trust: Trust,
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
      v2-shm         the same, tensors in system shared memory (--allow-client-shm)
      v2-grpc        V2 over gRPC, raw contents
      v2-grpc-shm    V2 over gRPC, tensors in system shared memory
      text           OpenAI's completions, streamed: time to the first token, gaps, tokens/s
      chat           OpenAI's chat completions, the same
    """
    from fastserve.cli.load import report, run
    from fastserve.cli.load.generator import Plan

    target = Target(Server(url, trust), grpc)
    chosen = PROTOCOLS[protocol]()
    host, port = address(target, chosen.over_grpc)
    secured = (target.grpc_url if chosen.over_grpc else target.http.url).startswith("https://")
    wish = Wish(model, rows, length, signature, data.read_bytes() if data else None, tokens)
    try:
        asked = chosen.requests(target, wish)
        sent = [one.body if chosen.over_grpc else one.encode(f"{host}:{port}") for one in asked]
        sizes, method = [len(one) for one in sent], asked[0].path if chosen.over_grpc else ""
        plans = [
            Plan(
                *(host, port, count, warm_up, duration, timeout, sizes, method, chosen.events),
                trust=trust if secured else None,
                progress=not i,
            )
            for i, count in enumerate(run.share(connections, processes))
        ]
        outcome = run.run(plans, sent, show=sys.stderr.isatty())
    finally:
        chosen.close()
    lines = [json.dumps(report.as_json(outcome), indent=2)] if as_json else report.text(outcome)
    for line in lines:
        click.echo(line)
    sys.exit(1 if outcome.failed or not outcome.histogram.total else 0)
