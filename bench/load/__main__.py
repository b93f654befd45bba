"""`python -m bench.load`: the whole table, or the parts asked for. See --help."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from functools import partial
from pathlib import Path

import click

from bench.load import grps_load, h2_load, h2load, idle, measure, scale, stream_load, table, v2_load, wrk
from bench.load.measure import Plan
from bench.workloads import WORKLOADS

BUSY_LOAD = 0.7
GRPC = ["grpc-tiny", "grpc-image"]
TFS_GRPC = ["tfs-grpc-tiny", "tfs-grpc-mlp", "tfs-grpc-image", "tfs-grpc-content"]
V1 = ["v1-tiny", "v1-image"]
PARTS = [
    *WORKLOADS, *h2_load.PARTS, *idle.PARTS, *v2_load.PARTS, *GRPC, *TFS_GRPC, *V1,
    *grps_load.PARTS,
    *stream_load.PARTS,
    "latency", "frontends", "memory", "codec",
]  # fmt: skip
GROUPS = {"http2": [*h2_load.PARTS, *idle.PARTS]}


def cores() -> tuple[int, int]:
    """(server's core, load generator's core): the first two this process may use."""
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise click.ClickException("two cores are needed: one for the server, one for the load generator")
    return found[0], found[1]


def rows(part: str, plan: Plan, subject: measure.Start, soak: int) -> list[table.Row]:
    if part in WORKLOADS:
        return [table.load_row(WORKLOADS[part], *measure.versus(WORKLOADS[part], plan, subject))]
    if part in v2_load.PARTS:
        return [v2_load.row(part, plan)]
    if part in grps_load.PARTS:
        return [grps_load.row(part, plan)]
    if part in stream_load.PARTS:
        return [stream_load.row(part, plan)]
    if part in h2_load.PARTS:
        return [h2_load.row(part, plan)]
    if part in idle.PARTS:
        return [idle.row(part, plan)]
    if part in GRPC:
        from bench.load import grpc_load

        return [grpc_load.row(part, plan)]
    if part in TFS_GRPC:
        from bench.load import tfs_grpc_load

        return [tfs_grpc_load.row(part, plan)]
    if part in V1:
        from bench.load import v1_load

        return [v1_load.row(part, plan)]
    if part == "latency":
        return [table.alone_row(*measure.alone(plan, subject))]
    if part == "frontends":
        return scale.rows(plan, plan.fronts, plan.workers)
    if part == "codec":
        from bench.load import codec

        return [table.codec_row(found) for found in codec.codecs()]
    mb = measure.memory(plan)
    found = [table.Row("front process, demo, idle", "", f"{mb:.1f} MB", mb, 60, unit="MB")]
    if soak:
        sent, gained = measure.growth(plan, soak)
        found.append(table.Row(f"growth, {sent:,} requests", "", f"{gained:.1f} MB", gained, 1.0, unit="MB"))
    return found


def warn_when_busy() -> None:
    """Others on the machine make every figure low, and ratios of short runs uncertain."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        click.echo(f"the machine is busy (load {load:.1f}): figures will be low and noisy", err=True)


def describe(plan: Plan, hello: float) -> dict[str, object]:
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "repeats": plan.repeats,
        "seconds": plan.seconds,
        "load_before": os.getloadavg()[0],
        "hello_per_s": round(hello),
    }


@click.command(
    help="Compare `fastserve serve` with the reference server, on one core each, under wrk. The part http2"
    " stands for all rows of HTTP/2 and gRPC: `python -m bench.load http2`."
)
@click.argument("parts", nargs=-1, type=click.Choice([*PARTS, *GROUPS]), metavar="[PART]...")
@click.option(
    "--repeats", default=3, show_default=True, help="Runs of each server, taking turns; medians count."
)
@click.option("--seconds", default=3.0, show_default=True, help="Length of one run.")
@click.option("--doubles", is_flag=True, help="Send numbers of 16 to 17 digits instead of 6 to 9.")
@click.option("--soak", default=0, help="With `memory`: send this many requests and report what it grew by.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write results here too."
)
@click.option(
    "--fronts", default="1,2,4,8", show_default=True, help="With `frontends`: processes that serve."
)
@click.option("--workers", default="1,2,4", show_default=True, help="With `frontends`: workers of the model.")
@click.option("--self-test", is_flag=True, help="Put the reference server in fastserve's place.")
def main(
    parts: tuple[str, ...],
    repeats: int,
    seconds: float,
    doubles: bool,
    soak: int,
    json_file: Path | None,
    fronts: str,
    workers: str,
    self_test: bool,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every server is stopped on the way out
    chosen = [one for part in parts for one in GROUPS.get(part, [part])]
    chosen = chosen or list(WORKLOADS if self_test else PARTS)
    try:
        wrk.require()
        h2load.require()
    except (wrk.NoWrk, h2load.NoH2load) as fault:
        raise click.ClickException(str(fault)) from None
    warn_when_busy()
    subject = measure.start_reference if self_test else measure.start_fastserve
    counts = [tuple(map(int, listed.split(","))) for listed in (fronts, workers)]
    say = partial(click.echo, err=True)
    plan = Plan(repeats, seconds, *cores(), doubles, say, *counts)
    about = describe(plan, measure.hello(plan))
    found = [row for part in chosen for row in rows(part, plan, subject, soak)]
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    table.print_table(found)
    if json_file is not None:
        report = {**about, "rows": [row.as_json() for row in found]}
        json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
