"""Triton's V1 API under load: raw tensors beside a header in text.

`v1-image` is compared with the reference server's raw bodies (`imagebin`): the same bytes in and the same
model, without a header to read or to write. `v1-tiny` is compared with the TensorFlow Serving API of the
same server, one row of JSON: V1 should not cost more.
"""

from __future__ import annotations

import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import workloads
from bench.load import servers, table, wrk
from bench.load.measure import Plan, Sample
from bench.load.servers import Server
from bench.workloads import WORKLOADS, Workload

LEAST = {"v1-tiny": ("tiny", 0.9), "v1-image": ("image", 0.7)}
CONTENT_TYPE = "application/octet-stream"
Turn = Callable[[], wrk.Load]


def header(model: str) -> tuple[str, str]:
    """The request's header, as the original's client writes it."""
    dims = workloads.ROW_ITEMS[model]
    return "NV-InferRequest", f'batch_size: 1 input {{ name: "x" dims: {dims} }} output {{ name: "y" }}'


def url(server: Server, model: str) -> str:
    return f"{server.origin}/api/infer/{model}?format=binary"


def verify(server: Server, model: str, body: bytes) -> None:
    """One reply against the model's own answer; raises RuntimeError when they differ, OSError unanswered."""
    headers = dict([("Content-Type", CONTENT_TYPE), header(model)])
    with urllib.request.urlopen(
        urllib.request.Request(url(server, model), body, headers), timeout=20
    ) as reply:
        raw = reply.read()
    want = workloads.expected(model).reshape(-1)
    got = np.frombuffer(raw[: want.nbytes], "<f4")
    if len(raw) <= want.nbytes or not np.allclose(got, want, rtol=1e-4, atol=1e-5):
        raise server.fail(f"{model}: answered {raw[:64]!r}, the model says {want[:4]}")


def _turn(server: Server, workload: Workload, body: Path, plan: Plan) -> Turn:
    """A run over the TensorFlow Serving API."""
    return lambda: wrk.post(
        server.origin + workload.path,
        body,
        workload.content_type,
        connections=workload.connections,
        seconds=plan.seconds,
        cores=[plan.load_core],
    )


def _turn_v1(server: Server, workload: Workload, body: Path, plan: Plan) -> Turn:
    return lambda: wrk.post(
        url(server, workload.model),
        body,
        CONTENT_TYPE,
        *header(workload.model),
        connections=workload.connections,
        seconds=plan.seconds,
        cores=[plan.load_core],
    )


def row(part: str, plan: Plan) -> table.Row:
    """One line of the table; the two taking turns under load."""
    model, least = LEAST[part]
    raw = part == "v1-image"
    base = WORKLOADS["imagebin" if raw else model]
    with (
        tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder,
        servers.fastserve_model(model, [plan.server_core]) as ours,
        servers.reference(base.name, [plan.server_core]) as theirs,
    ):
        beside = theirs if raw else ours
        bodies = Path(folder) / "base", Path(folder) / "v1"
        bodies[0].write_bytes(workloads.body(base, doubles=plan.doubles))
        bodies[1].write_bytes(workloads.row(model).astype("<f4").tobytes())
        servers.wait_ready(beside, lambda: servers.verify(beside, base, bodies[0].read_bytes()))
        servers.wait_ready(ours, lambda: verify(ours, model, bodies[1].read_bytes()))
        turns = _turn(beside, base, bodies[0], plan), _turn_v1(ours, base, bodies[1], plan)
        samples = Sample(), Sample()
        for number in range(plan.repeats):
            for turn, sample, name in zip(turns, samples, ("base", "v1"), strict=True):
                sample.loads.append(turn())
                plan.say(f"{part}: {name} {number + 1}/{plan.repeats}  {sample.loads[-1].rate:,.0f}/s")
    return _make_row(part, least, *samples)


def _make_row(part: str, least: float, base: Sample, ours: Sample) -> table.Row:
    against = "the reference's raw bodies" if part == "v1-image" else "the TensorFlow Serving API here"
    failed = f"; FAILED {base.failed} + {ours.failed}" if base.failed or ours.failed else ""
    note = f"beside {against}; p50 {ours.p50_us:,.0f} us{failed}"
    return table.Row(
        part, f"{base.rate:,.0f}/s", f"{ours.rate:,.0f}/s", ours.rate / base.rate, least, note=note
    )
