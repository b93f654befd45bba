"""The grps API under load.

grps-tiny, grps-image    gtensors as JSON, against a columnar body of the TensorFlow Serving API of the same
                         server: the same numbers in another text
grps-bytes               600 KB of bin_data both ways, against the reference server's raw bodies
grps-grpc                Predict with 4 floats, against V2's ModelInfer of the same server
"""

from __future__ import annotations

import json
import statistics
import urllib.request
from collections.abc import Sequence

import numpy as np

from bench import workloads
from bench.load import h2load, servers, table
from bench.load.grpc_load import HOW, TURN_SECONDS, make_request
from bench.load.measure import Plan, Sample
from bench.load.servers import Server
from bench.load.v2_load import Request, Runs, make_row, scratch
from bench.reference.grpc_echo import PATH
from bench.workloads import WORKLOADS
from fastserve.protos import load

GRPS = load("grps")
GRPS_PATH = "/grps.protos.v1.GrpsService/Predict"
BYTES = "application/octet-stream"
# part -> (model, least)
LEAST = {"grps-tiny": ("tiny", 0.87), "grps-image": ("image", 0.87), "grps-bytes": ("image", 0.7)}
PARTS = [*LEAST, "grps-grpc"]


def texts_of(model: str, plan: Plan) -> list[str]:
    return [repr(float(v)) if plan.doubles else str(v) for v in workloads.row(model)]


def grps_request(model: str, texts: Sequence[str]) -> Request:
    tensor = f'{{"name":"x","dtype":"DT_FLOAT32","shape":[1,{len(texts)}],"flat_float32":['
    body = '{"gtensors":{"tensors":[' + tensor + ",".join(texts) + "]}]}}"
    return Request(f"/grps/v1/infer/predict?model={model}-1", body.encode(), workloads.expected(model))


def columnar_request(model: str, texts: Sequence[str]) -> Request:
    body = '{"inputs":[[' + ",".join(texts) + "]]}"
    return Request(f"/v1/models/{model}:predict", body.encode(), workloads.expected(model))


def bytes_request(model: str) -> Request:
    raw = workloads.row(model).astype("<f4").tobytes()
    return Request(f"/grps/v1/infer/predict?model={model}-1", raw, workloads.expected(model), BYTES)


def verify(server: Server, request: Request) -> None:
    """One reply against the model's own answer; raises RuntimeError when they differ, OSError unanswered."""
    sent = urllib.request.Request(
        server.origin + request.path, request.body, {"Content-Type": request.content_type}
    )
    with urllib.request.urlopen(sent, timeout=20) as reply:
        raw = reply.read()
    if request.content_type == BYTES:
        got = np.frombuffer(raw, "<f4")
    else:
        answer = json.loads(raw)
        found = (
            answer["gtensors"]["tensors"][0]["flat_float32"] if "gtensors" in answer else answer["outputs"]
        )
        got = np.array(found, np.float32)
    want = request.want.reshape(-1)
    if got.size != want.size or not np.allclose(got.reshape(-1), want, rtol=1e-4, atol=1e-5):
        raise server.fail(f"{request.path}: answered {got[:4]}, the model says {want[:4]}")


def row(part: str, plan: Plan) -> table.Row:
    """One line of the table."""
    if part == "grps-grpc":
        return _rpc(plan)
    model, least = LEAST[part]
    if part == "grps-bytes":
        return _bytes(part, model, least, plan)
    texts = texts_of(model, plan)
    pair = columnar_request(model, texts), grps_request(model, texts)
    speaking = ("--http", f"127.0.0.1:{servers.free_port()}=tfserving,grps")
    with scratch() as folder, servers.fastserve_model(model, [plan.server_core], *speaking) as server:
        server.port = int(speaking[1].partition("=")[0].rpartition(":")[2])
        for request in pair:
            servers.wait_ready(server, lambda request=request: verify(server, request))  # type: ignore[misc]
        samples = Runs(folder, plan, [plan.load_core], WORKLOADS[model].connections).take_turns(
            part, server, pair
        )
    return make_row(part, samples, least, "beside a columnar body of the TensorFlow Serving API here")


def _bytes(part: str, model: str, least: float, plan: Plan) -> table.Row:
    workload, request = WORKLOADS["imagebin"], bytes_request(model)
    body = workloads.body(workload, doubles=plan.doubles)
    theirs = Request(workload.path, body, request.want, workload.content_type)
    port = servers.free_port()
    speaking = ("--http", f"127.0.0.1:{port}=tfserving,grps")
    with (
        scratch() as folder,
        servers.fastserve_model(model, [plan.server_core], *speaking) as ours,
        servers.reference(workload.name, [plan.server_core]) as base,
    ):
        ours.port = port
        servers.wait_ready(base, lambda: servers.verify(base, workload, body))
        servers.wait_ready(ours, lambda: verify(ours, request))
        runs, samples = Runs(folder, plan, [plan.load_core], workload.connections), (Sample(), Sample())
        for turn in range(plan.repeats):
            for server, asked, sample in zip((base, ours), (theirs, request), samples, strict=True):
                sample.loads.append(runs.post(server, asked))
                plan.say(f"{part}: {server.name} {turn + 1}/{plan.repeats}  {sample.loads[-1].rate:,.0f}/s")
    return make_row(part, samples, least, "beside the reference's raw bodies")


def _rpc(plan: Plan) -> table.Row:
    message = GRPS.GrpsMessage(model="tiny-1")
    values = workloads.row("tiny")
    message.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=[1, values.size], flat_float32=values)
    calls = ((PATH, make_request("tiny")), (GRPS_PATH, message.SerializeToString()))
    port = servers.free_port()
    listener = ("--grpc", f"127.0.0.1:{port}=kserve_v2,grps")
    rates: list[list[float]] = [[], []]
    with servers.fastserve_model("tiny", [plan.server_core], *listener) as server:
        servers.wait_ready(server, lambda: servers.healthy(server))
        for turn in range(max(1, round(plan.repeats * plan.seconds / TURN_SECONDS))):
            for (path, data), found in zip(calls, rates, strict=True):
                core = plan.load_core
                found.append(h2load.grpc_rate(port, path, data, core=core, seconds=TURN_SECONDS, **HOW))
            plan.say(f"grps-grpc: {turn + 1}  {rates[0][-1]:,.0f}/s {rates[1][-1]:,.0f}/s")
    base, ours = map(statistics.median, rates)
    note = "4 floats, beside V2's ModelInfer here"
    return table.Row("grps-grpc", f"{base:,.0f}/s", f"{ours:,.0f}/s", ours / base, 0.9, note=note)
