"""The V2 protocol under load, beside the TensorFlow Serving API of the same server and model.

v2-tiny, v2-mlp, v2-image    JSON, against JSON rows of the other API
v2-tinybin, v2-imagebin      the binary tensor extension both ways, as tritonclient sends it; an image
                             against the other API's raw bodies
v2-shm                       an image in the client's shared memory, against v2-tiny: what 600 KB cost
v2-simple, v2-cached         a model of Triton's Python backend, on all cores, against what Triton's own
                             server reached with it on two: 8.5 k/s, and 20 k/s where it kept the response
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import workloads
from bench.load import servers, table, wrk
from bench.load.measure import Plan, Sample
from bench.load.servers import Server
from bench.workloads import WORKLOADS

TRITON = Path(__file__).parents[1] / "triton"
LENGTH = "Inference-Header-Content-Length"
# part -> (model, the other API's workload, least)
BESIDE = {
    "v2-tiny": ("tiny", "tiny", 1.0),
    "v2-mlp": ("mlp", "mlp", 1.0),
    "v2-image": ("image", "image", 1.0),
    "v2-tinybin": ("tiny", "tiny", 1.0),
    "v2-imagebin": ("image", "imagebin", 1.0),
}
TRITONS_OWN = {"v2-simple": ("simple", 8500), "v2-cached": ("cached", 20_000)}
PARTS = [*BESIDE, "v2-shm", *TRITONS_OWN]
CACHE_BYTES = 1 << 24


@dataclass(frozen=True)
class Request:
    """One request, sent over and over, and what its outputs must begin with."""

    path: str
    body: bytes
    want: np.ndarray
    content_type: str = "application/json"
    lines: tuple[str, ...] = ()  # further header lines, name and value in turn


def json_request(model: str, texts: Sequence[str]) -> Request:
    head = f'{{"inputs":[{{"name":"x","shape":[1,{len(texts)}],"datatype":"FP32","data":['
    body = head + ",".join(texts) + "]}]}"
    return Request(f"/v2/models/{model}/infer", body.encode(), workloads.expected(model))


def binary_request(model: str) -> Request:
    """As tritonclient's http client writes it."""
    raw = workloads.row(model).astype("<f4").tobytes()
    tensor = {"name": "x", "shape": [1, len(raw) // 4], "datatype": "FP32"}
    inputs = [tensor | {"parameters": {"binary_data_size": len(raw)}}]
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    header = json.dumps({"inputs": inputs, "outputs": outputs}, separators=(",", ":")).encode()
    path, lines = f"/v2/models/{model}/infer", (LENGTH, str(len(header)))
    return Request(path, header + raw, workloads.expected(model), "application/octet-stream", lines)


def shared_request(model: str) -> Request:
    items = workloads.ROW_ITEMS[model]
    place = {"shared_memory_region": "bench", "shared_memory_byte_size": 4 * items}
    tensor = {"name": "x", "shape": [1, items], "datatype": "FP32", "parameters": place}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    return Request(f"/v2/models/{model}/infer", body, workloads.expected(model))


def pair_request(model: str) -> Request:
    a, b = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
    pair = {"INPUT0": a, "INPUT1": b}
    inputs = [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": data.tolist()}
        for name, data in pair.items()
    ]
    return Request(f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode(), a + b)


def request_of(part: str, plan: Plan) -> Request:
    model = BESIDE[part][0]
    if part.endswith("bin"):
        return binary_request(model)
    row = workloads.row(model)
    return json_request(model, [repr(float(v)) if plan.doubles else str(v) for v in row])


def verify(server: Server, request: Request) -> None:
    """One reply against the model's own answer; raises RuntimeError when they differ, OSError unanswered."""
    lines = dict(zip(request.lines[::2], request.lines[1::2], strict=True))
    sent = urllib.request.Request(
        server.origin + request.path, request.body, {"Content-Type": request.content_type, **lines}
    )
    with urllib.request.urlopen(sent, timeout=20) as reply:
        raw, length = reply.read(), reply.headers[LENGTH]
    output = json.loads(raw[: int(length)] if length else raw)["outputs"][0]
    got = np.array(output["data"]) if "data" in output else np.frombuffer(raw[int(length) :], "<f4")
    if got.shape != request.want.shape or not np.allclose(got, request.want, rtol=1e-4, atol=1e-5):
        raise server.fail(f"{request.path}: answered {got[:4]}, the model says {request.want[:4]}")


class Runs:
    """Requests written out for wrk, and runs of them."""

    def __init__(self, folder: Path, plan: Plan, cores: Sequence[int], connections: int) -> None:
        self._folder, self._plan, self._cores, self._connections = folder, plan, cores, connections

    def post(self, server: Server, request: Request) -> wrk.Load:
        body = self._folder / f"{abs(hash(request.path))}-{len(request.body)}"
        if not body.exists():
            body.write_bytes(request.body)
        return wrk.post(
            server.origin + request.path,
            body,
            request.content_type,
            *request.lines,
            connections=self._connections,
            seconds=self._plan.seconds,
            cores=self._cores,
        )

    def take_turns(self, part: str, server: Server, pair: Sequence[Request]) -> list[Sample]:
        samples = [Sample() for _ in pair]
        for turn in range(self._plan.repeats):
            for request, sample in zip(pair, samples, strict=True):
                sample.loads.append(self.post(server, request))
                rate = sample.loads[-1].rate
                self._plan.say(f"{part}: {request.path} {turn + 1}/{self._plan.repeats}  {rate:,.0f}/s")
        return samples


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        yield Path(folder)


def row(part: str, plan: Plan) -> table.Row:
    """One line of the table."""
    if part in TRITONS_OWN:
        return _tritons_own(part, plan)
    return _shared(plan) if part == "v2-shm" else _beside(part, plan)


def _beside(part: str, plan: Plan) -> table.Row:
    model, other, least = BESIDE[part]
    workload, request = WORKLOADS[other], request_of(part, plan)
    body = workloads.body(workload, doubles=plan.doubles)
    theirs = Request(workload.path, body, request.want, workload.content_type)
    with scratch() as folder, servers.fastserve_model(model, [plan.server_core]) as server:
        servers.wait_ready(server, lambda: servers.verify(server, workload, theirs.body))
        verify(server, request)
        runs = Runs(folder, plan, [plan.load_core], workload.connections)
        samples = runs.take_turns(part, server, (theirs, request))
    return make_row(part, samples, least, "beside the TensorFlow Serving API here")


def _shared(plan: Plan) -> table.Row:
    tiny, request = json_request("tiny", [str(v) for v in workloads.row("tiny")]), shared_request("image")
    key = f"fastserve-bench-{os.getpid()}"
    path = Path("/dev/shm") / key
    with scratch() as folder:
        for model in ("tiny", "image"):
            shutil.copytree(workloads.REPOSITORY / model, folder / "models" / model)
        path.write_bytes(workloads.row("image").astype("<f4").tobytes())
        try:
            models = str(folder / "models")
            with servers.fastserve(models, [plan.server_core], "--allow-client-shm") as server:
                servers.wait_ready(server, lambda: verify(server, tiny))
                register(server, key, path.stat().st_size)
                verify(server, request)
                samples = Runs(folder, plan, [plan.load_core], 32).take_turns(
                    "v2-shm", server, (tiny, request)
                )
        finally:
            path.unlink()
    return make_row(
        "v2-shm", samples, 1 / 1.3, "600 KB in shared memory beside v2-tiny; asked: 1.3 x its cost"
    )


def register(server: Server, key: str, nbytes: int) -> None:
    body = json.dumps({"key": key, "offset": 0, "byte_size": nbytes}).encode()
    servers.post(f"{server.origin}/v2/systemsharedmemory/region/bench/register", body, "application/json")


def _tritons_own(part: str, plan: Plan) -> table.Row:
    model, reached = TRITONS_OWN[part]
    request, cores = pair_request(model), sorted(os.sched_getaffinity(0))
    with scratch() as folder:
        shutil.copytree(TRITON / model, folder / "models" / model)
        extra = ("--response-cache-bytes", str(CACHE_BYTES))
        with servers.fastserve(str(folder / "models"), cores, *extra) as server:
            servers.wait_ready(server, lambda: verify(server, request))
            sample = Runs(folder, plan, cores, 8).take_turns(part, server, [request])[0]
    base = Sample([wrk.Load(reached, 1.0, 0, 0, 0)])
    note = f"8 connections, {len(cores)} cores with the load generator; reference: Triton's server, elsewhere"
    return make_row(part, [base, sample], 2.0, note)


def make_row(part: str, samples: Sequence[Sample], least: float, note: str) -> table.Row:
    """One line out of two samples, the base first."""
    base, ours = samples
    failed = f"; FAILED {base.failed} + {ours.failed}" if base.failed or ours.failed else ""
    note += f"; p50 {ours.p50_us:,.0f} us{failed}"
    return table.Row(
        part, f"{base.rate:,.0f}/s", f"{ours.rate:,.0f}/s", ours.rate / base.rate, least, note=note
    )
