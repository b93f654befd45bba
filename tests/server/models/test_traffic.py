"""Requests without a version are split over a model's versions by weight, sticky where a header says so, and
copies of some run on a shadow version, whose answers nobody gets and which stands in the way of none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import yaml

from fastserve.engine.schedulers.shadow import MOST_COPIES, compare_outputs, read_value
from fastserve.net.traffic_split import BY_VALUE, RequestDraw, SplitRule, TrafficSplit, hash_point
from fastserve.protos import load
from fastserve.settings import AdminOptions, Listener
from fastserve.settings.key_file import changing, make_key
from fastserve.tensor import DTYPES, Tensor
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import SOURCE, Client, run, serving, write_model

V2, TFS, V1, GRPS = load("kserve_v2"), load("tfserving"), load("triton_v1"), load("grps")
FRONTS = 3
ADMIN = AdminOptions(traffic=True)
LABELS = {"stable": 1, "canary": 2}


def write_versions(folder: Path, numbers: tuple[int, ...] = (1, 2), **config: Any) -> Path:
    """Write a model whose version N answers 2 x + 1000 N, or as `answers` says."""
    answers: Mapping[int, str] = config.pop("answers", {})
    given = {"version_policy": "all", "labels": LABELS, "max_batch_size": 64, **config}
    model = write_model(folder, numbers=numbers, **given)
    for number in numbers:
        told = answers.get(number, f"x * 2 + {1000 * number}")
        (model / str(number) / "model.py").write_text(SOURCE.replace("x * 2 + self.add", told))
    return model


async def ask(client: Client, body: Mapping[str, Any], target: str, **headers: str) -> tuple[int, Any]:
    raw = json.dumps(body).encode()
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST {target} HTTP/1.1\r\nHost: t\r\n{lines}Content-Length: {len(raw)}\r\n\r\n"
    client.writer.write(head.encode() + raw)
    status, answer = await client.page()
    return status, json.loads(answer)


async def ask_v1(
    client: Client, value: float, target: str = "/v1/models/twice:predict", **headers: str
) -> int:
    """Return the version that has answered, by the values of its answer."""
    status, answer = await ask(client, {"instances": [[value, 0.5]]}, target, **headers)
    assert status == 200, answer
    return version_of(answer["predictions"][0][0], value)


async def ask_v2(client: Client, value: float, target: str = "/v2/models/twice/infer", **headers: str) -> int:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 0.5]}
    status, answer = await ask(client, {"inputs": [tensor]}, target, **headers)
    assert status == 200, answer
    found = version_of(answer["outputs"][0]["data"][0], value)
    assert answer["model_version"] == str(found)
    return found


def version_of(answer: float, value: float) -> int:
    version, rest = divmod(answer - 2 * value, 1000)
    assert rest == 0
    return int(version)


async def read_counts(client: Client, metric: str, label: str, **wanted: str) -> Counter[str]:
    """Return a metric's sums by one label, over the series that have the wanted labels."""
    _, page = await client.get("/metrics")
    found: Counter[str] = Counter()
    for line in page.decode().splitlines():
        if line.startswith(metric + "{"):
            inside, _, value = line[len(metric) + 1 :].rpartition("} ")
            labels = dict(part.split("=", 1) for part in inside.replace('"', "").split(","))
            if all(labels.get(name) == value for name, value in wanted.items()):
                found[labels[label]] += int(float(value))
    return found


# -- the split


def test_points_are_uniform_and_compartments_few() -> None:
    made: list[dict[str, str]] = []

    class Place:
        def __init__(self, arms: Mapping[str, str]) -> None:
            self.arms = dict(arms)
            made.append(self.arms)

    split = TrafficSplit(Place)  # type: ignore[arg-type]
    split.change(
        {
            "a": SplitRule((95, 5), ("stable", "canary")),
            "b": SplitRule((1, 1, 2), ("1", "2", "3")),
            "c": SplitRule((0.5, 0.5), ("1", "2"), b"x-user"),
        }
    )
    counts: Counter[tuple[str, str]] = Counter()
    asked = 100_000
    for at in range(asked):
        fields = [(b"x-user", b"user-%d" % at)] if at % 2 else []
        for pair in split.choose(fields, 10**12 + at * 20_000).arms.items():  # type: ignore[attr-defined]
            counts[pair] += 1
    shares = {pair: count / asked for pair, count in counts.items()}
    wanted = {("a", "stable"): 0.95, ("a", "canary"): 0.05, ("b", "1"): 0.25, ("b", "2"): 0.25}
    wanted |= {("b", "3"): 0.5, ("c", "1"): 0.5, ("c", "2"): 0.5}
    assert shares.keys() == wanted.keys()
    for pair, share in wanted.items():
        assert abs(shares[pair] - share) < 0.01, pair
    assert len(made) <= 4 * 2, "places between the borders of a and b, for each of those of c"


def test_a_larger_canary_keeps_the_clients_it_had() -> None:
    users = [b"user-%d" % number for number in range(10_000)]
    small, large = (SplitRule((share, 100 - share), ("canary", "stable")).borders()[0] for share in (5, 20))
    before = {user for user in users if hash_point(user) < small}
    after = {user for user in users if hash_point(user) < large}
    assert before < after
    assert 300 < len(before) < 700 < 1700 < len(after) < 2300


def test_the_split_over_every_protocol(tmp_path: Path) -> None:
    write_versions(tmp_path, traffic={"stable": 80, "canary": 20})
    asked, share = 400, 0.2

    async def work() -> None:
        both = {"http": (Listener("127.0.0.1:0"),), "grpc": (Listener("127.0.0.1:0"),)}
        async with serving(tmp_path, **both) as at:
            client = await at.client()
            place = at.server.front.grpc[0].address
            async with grpc.aio.insecure_channel(f"127.0.0.1:{place[1]}") as channel:

                async def ask_grpc(value: float, version: str = "") -> int:
                    request = V2.ModelInferRequest(model_name="twice", model_version=version)
                    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                    tensor.contents.fp32_contents.extend([value, 0.5])
                    call = channel.unary_unary(
                        "/inference.GRPCInferenceService/ModelInfer",
                        V2.ModelInferRequest.SerializeToString,
                        V2.ModelInferResponse.FromString,
                    )
                    answer = await call(request, timeout=60)
                    return version_of(struct.unpack("<2f", answer.raw_output_contents[0])[0], value)

                async def ask_tfs(value: float) -> int:
                    request = TFS.PredictRequest()
                    request.model_spec.name = "twice"
                    tensor = request.inputs["x"]
                    tensor.dtype = 1
                    tensor.tensor_shape.dim.add(size=1)
                    tensor.tensor_shape.dim.add(size=2)
                    tensor.float_val.extend([value, 0.5])
                    call = channel.unary_unary(
                        "/tensorflow.serving.PredictionService/Predict",
                        TFS.PredictRequest.SerializeToString,
                        TFS.PredictResponse.FromString,
                    )
                    answer = await call(request, timeout=60)
                    found = version_of(answer.outputs["y"].float_val[0], value)
                    assert answer.model_spec.version.value == found
                    return found

                for way in (
                    lambda value: ask_v1(client, value),
                    lambda value: ask_v2(client, value),
                    ask_grpc,
                    ask_tfs,
                ):
                    counts = Counter([await way(float(value % 100)) for value in range(asked)])
                    assert counts.keys() == {1, 2}
                    # five deviations of 8
                    assert abs(counts[2] - share * asked) < 5 * (asked * share * (1 - share)) ** 0.5, counts
                for number, label in ((1, "stable"), (2, "canary")):
                    for _ in range(20):
                        assert (
                            await ask_v1(client, 1.0, f"/v1/models/twice/versions/{number}:predict") == number
                        )
                        assert await ask_v1(client, 1.0, f"/v1/models/twice/labels/{label}:predict") == number
                        assert (
                            await ask_v2(client, 1.0, f"/v2/models/twice/versions/{number}/infer") == number
                        )
                        assert await ask_grpc(1.0, str(number)) == number
            counts = await read_counts(client, "fastserve_requests_total", "version", model="twice")
            assert sum(counts.values()) == 4 * asked + 160
            assert 0.1 < counts["2"] / (4 * asked + 160) < 0.4

    run(work())


@pytest.mark.parametrize("users", [4, 64])
def test_a_header_is_sticky_in_every_front_and_protocol(tmp_path: Path, users: int) -> None:
    write_versions(tmp_path, traffic={"stable": 50, "canary": 50}, sticky={"header": "X-User"})

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS, listen=(Listener("127.0.0.1:0"),), http=()) as at:
            clients = list((await connect_to_each(at, FRONTS)).values())
            wanted = {f"user-{number}": 0 for number in range(users)}
            for user in wanted:
                wanted[user] = 2 if hash_point(user.encode()) < 0.5 else 1  # canary, stable: by name
            assert set(wanted.values()) == {1, 2}
            for client in clients:
                for user, version in wanted.items():
                    for _ in range(3):  # the later ones take the fast path
                        assert await ask_v1(client, 1.0, x_user=user) == version
                        assert await ask_v2(client, 2.0, X_USER=f" {user} ") == version
            for _ in range(FRONTS):  # each connection may go to another front
                async with grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
                    call = channel.unary_unary(
                        "/inference.GRPCInferenceService/ModelInfer",
                        V2.ModelInferRequest.SerializeToString,
                        V2.ModelInferResponse.FromString,
                    )
                    request = V2.ModelInferRequest(model_name="twice")
                    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                    tensor.contents.fp32_contents.extend([3.0, 0.5])
                    for user, version in wanted.items():
                        answer = await call(request, metadata=(("x-user", user),), timeout=60)
                        assert answer.model_version == str(version)
            without = Counter([await ask_v1(clients[0], 1.0) for _ in range(100)])
            assert without.keys() == {1, 2}, "no header: at random"

    run(work())


def test_values_of_an_input_draw_as_a_header_does() -> None:
    rule = SplitRule((1, 3), ("canary", "stable"), BY_VALUE)
    split = TrafficSplit(lambda arms: dict(arms))  # type: ignore[arg-type, return-value]
    split.change({"a": rule, "b": SplitRule((1, 1), ("1", "2"), b"x-user")})
    assert split.by_value
    counts: Counter[tuple[str, str]] = Counter()
    asked, again = 100_000, 0
    for at in range(asked):
        fields, came_ns = [(b"x-user", b"%d" % (at % 7))], 10**12 + at * 20_000
        drawn: Any = split.choose(fields, came_ns)
        counts["drawn", drawn["a"]] += 1
        draw, value = RequestDraw(split, fields, came_ns), b"user-%d" % at
        if draw.leads_away("a", value):
            again += 1
            other: Any = split.choose(fields, came_ns, draw.point)
            assert (other["a"] != drawn["a"], other["b"]) == (True, drawn["b"])
            drawn = other
        assert drawn["a"] == ("canary" if hash_point(value) < 0.25 else "stable")
        counts["by value", drawn["a"]] += 1
    assert all(abs(counts[way, "canary"] / asked - 0.25) < 0.01 for way in ("drawn", "by value"))
    assert abs(again / asked - 2 * 0.25 * 0.75) < 0.01
    assert not RequestDraw(split, [], 1).leads_away("nobody", b"x")


@pytest.mark.parametrize(
    ("dtype", "data", "value"),
    [
        ("bytes", b"\x02\0\0\0ab\x01\0\0\0c", b"ab"),
        ("bytes", b"\0\0\0\0", b""),
        ("int64", struct.pack("<2q", -7, 1), b"-7"),
        ("uint8", b"\xff", b"255"),
        ("int64", b"", None),
        ("bytes", b"", None),
        ("float32", struct.pack("<f", 7), None),
        ("bool", b"\1", None),
    ],
)
def test_the_value_of_an_input(dtype: str, data: bytes, value: bytes | None) -> None:
    assert read_value(Tensor(DTYPES[dtype], (1,), data)) == value
    assert read_value(None) is None


WHICH = """
import numpy as np

class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"y": np.full((len(inputs["x"]), 1), NUMBER, np.float32)}
"""


@pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
@pytest.mark.parametrize("dtype", ["int64", "bytes"])
def test_an_input_is_sticky_over_every_protocol(tmp_path: Path, dtype: str) -> None:
    tensors = {
        "inputs": {"x": {"dtype": "float32", "shape": [1]}, "user": {"dtype": dtype, "shape": [1]}},
        "outputs": {"y": {"dtype": "float32", "shape": [1]}},
    }
    rules = {"traffic": {"stable": 50, "canary": 50}, "sticky": {"input": "user"}}
    model = write_versions(tmp_path, **rules, **tensors, shadow={"version": 3}, numbers=(1, 2, 3))
    for number in (1, 2, 3):
        (model / str(number) / "model.py").write_text(WHICH.replace("NUMBER", str(number)))
    users = [str(number) for number in range(40, 52)]
    wanted = {user: 2 if hash_point(user.encode()) < 0.5 else 1 for user in users}
    assert set(wanted.values()) == {1, 2}
    text = dtype == "bytes"

    def v2_body(user: str) -> dict[str, Any]:
        kind = "BYTES" if text else "INT64"
        given = {"name": "user", "shape": [1, 1], "datatype": kind, "data": [user if text else int(user)]}
        return {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}, given]}

    sort = {"content_type": "application/json"}

    def raw_user(user: str) -> bytes:
        return struct.pack("<I", len(user)) + user.encode() if text else struct.pack("<q", int(user))

    async def work() -> None:
        apis = "tfserving", "kserve_v2", "triton_v1", "grps"
        both = {
            "http": (Listener("127.0.0.1:0", (*apis, "mlflow")),),
            "grpc": (Listener("127.0.0.1:0", apis),),
        }
        async with serving(tmp_path, **both, frontends=2) as at:
            client = await at.client()
            place = at.server.front.grpc[0].address
            async with grpc.aio.insecure_channel(f"127.0.0.1:{place[1]}") as channel:

                async def call(path: str, request: Any, answer: Any) -> Any:
                    method = channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
                    return await method(request, timeout=60)

                async def v1(user: str, target: str = "/v1/models/twice:predict") -> float:
                    rows = [{"x": [1.0], "user": [user if text else int(user)]}] * 3
                    return (await ask(client, {"instances": rows}, target))[1]["predictions"][2][0]

                async def v2(user: str, target: str = "/v2/models/twice/infer") -> float:
                    answer = (await ask(client, v2_body(user), target))[1]
                    assert answer["model_version"] == str(int(answer["outputs"][0]["data"][0]))
                    return answer["outputs"][0]["data"][0]

                async def binary(user: str) -> float:
                    told, raws = v2_body(user), [struct.pack("<f", 1.0), raw_user(user)]
                    for tensor, raw in zip(told["inputs"], raws, strict=True):
                        del tensor["data"]
                        tensor["parameters"] = {"binary_data_size": len(raw)}
                    head = json.dumps(told).encode()
                    raw = head + b"".join(raws)
                    client.writer.write(
                        b"POST /v2/models/twice/infer HTTP/1.1\r\nHost: t\r\n"
                        b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%b"
                        % (len(head), len(raw), raw)
                    )
                    return json.loads((await client.page())[1])["outputs"][0]["data"][0]

                async def v2_grpc(user: str) -> float:
                    request = V2.ModelInferRequest(model_name="twice")
                    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
                    request.inputs.add(name="user", datatype="BYTES" if text else "INT64", shape=[1, 1])
                    request.raw_input_contents.extend([struct.pack("<f", 1.0), raw_user(user)])
                    path = "/inference.GRPCInferenceService/ModelInfer"
                    answer = await call(path, request, V2.ModelInferResponse)
                    assert answer.model_version == str(wanted[user])
                    return struct.unpack("<f", answer.raw_output_contents[0])[0]

                async def tfs_grpc(user: str) -> float:
                    request = TFS.PredictRequest()
                    request.model_spec.name = "twice"
                    for name, kind in (("x", 1), ("user", 7 if text else 9)):
                        request.inputs[name].dtype = kind
                        for _ in range(2):
                            request.inputs[name].tensor_shape.dim.add(size=1)
                    request.inputs["x"].float_val.append(1.0)
                    if text:
                        request.inputs["user"].string_val.append(user.encode())
                    else:
                        request.inputs["user"].int64_val.append(int(user))
                    path = "/tensorflow.serving.PredictionService/Predict"
                    answer = await call(path, request, TFS.PredictResponse)
                    assert answer.model_spec.version.value == wanted[user]
                    return answer.outputs["y"].float_val[0]

                async def grps(user: str) -> float:
                    tensors = [
                        {"name": "x", "dtype": 7, "shape": [1, 1], "flat_float32": [1.0]},
                        {"name": "user", "dtype": 5, "shape": [1, 1], "flat_int64": [int(user)]},
                    ]
                    if text:
                        tensors[1] = {
                            "name": "user",
                            "dtype": 9,
                            "shape": [1, 1],
                            "flat_string": [user],
                        }
                    body = {"gtensors": {"tensors": tensors}}
                    answer = (await ask(client, body, "/grps/v1/infer/predict", **sort))[1]
                    assert "gtensors" in answer, answer
                    return answer["gtensors"]["tensors"][0]["flat_float32"][0]

                async def grps_grpc(user: str) -> float:
                    request = GRPS.GrpsMessage()
                    tensors = request.gtensors.tensors
                    tensors.add(name="x", dtype=7, shape=[1, 1], flat_float32=[1.0])
                    if text:
                        tensors.add(name="user", dtype=9, shape=[1, 1], flat_string=[user])
                    else:
                        tensors.add(name="user", dtype=5, shape=[1, 1], flat_int64=[int(user)])
                    answer = await call("/grps.protos.v1.GrpsService/Predict", request, GRPS.GrpsMessage)
                    assert len(answer.gtensors.tensors) == 1, answer
                    return answer.gtensors.tensors[0].flat_float32[0]

                async def triton_v1(user: str) -> float:
                    raw = struct.pack("<f", 1.0) + raw_user(user)
                    named = f'input {{ name: "user" dims: 1 batch_byte_size: {len(raw) - 4} }}'
                    asked = f'batch_size: 1 input {{ name: "x" dims: 1 }} {named} output {{ name: "y" }}'
                    head = f"POST /api/infer/twice HTTP/1.1\r\nHost: t\r\nNV-InferRequest: {asked}\r\n"
                    client.writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
                    status, body = await client.page()
                    assert status == 200, body
                    return struct.unpack("<f", body[:4])[0]

                async def triton_v1_grpc(user: str) -> float:
                    raws = [struct.pack("<f", 1.0), raw_user(user)]
                    request = V1.InferRequest(model_name="twice", model_version=-1, raw_input=raws)
                    request.meta_data.batch_size = 1
                    for name, raw in zip(("x", "user"), raws, strict=True):
                        request.meta_data.input.add(name=name, dims=[1], batch_byte_size=len(raw))
                    request.meta_data.output.add(name="y")
                    answer = await call(
                        "/nvidia.inferenceserver.GRPCService/Infer", request, V1.InferResponse
                    )
                    assert answer.meta_data.model_version == wanted[user], answer
                    return struct.unpack("<f", answer.raw_output[0])[0]

                async def mlflow(user: str) -> float:
                    row = {"x": [[1.0]], "user": [[user if text else int(user)]]}
                    answer = (await ask(client, {"inputs": row}, "/endpoints/twice/invocations", **sort))[1]
                    assert "predictions" in answer, answer
                    return np.ravel(answer["predictions"])[0]

                old = triton_v1, triton_v1_grpc
                for way in (v1, v2, binary, v2_grpc, tfs_grpc, grps, grps_grpc, *old, mlflow):
                    found = {user: [await way(user) for _ in range(4)] for user in users}
                    assert found == {user: [version] * 4 for user, version in wanted.items()}, way
                for user in users:  # those that name a version get it
                    assert await v1(user, "/v1/models/twice/versions/1:predict") == 1
                    assert await v2(user, "/v2/models/twice/versions/2/infer") == 2

    run(work())


def test_without_the_input_requests_are_drawn(tmp_path: Path) -> None:
    write_versions(tmp_path, traffic={"stable": 50, "canary": 50}, sticky={"input": "x"})

    async def work() -> None:
        async with serving(tmp_path, admin=ADMIN) as at:
            client = await at.client()
            # x is of floats, which name nobody
            assert {await ask_v2(client, 1.0) for _ in range(60)} == {1, 2}
            status, told = await ask(
                client, {"traffic": {"1": 1}, "sticky": {"header": "a", "input": "x"}}, "/traffic/twice"
            )
            assert (status, told["error"]) == (400, told["error"])
            assert "a header or an input" in told["error"]
            status, told = await ask(
                client, {"traffic": {"1": 1}, "sticky": {"input": "x"}}, "/traffic/twice"
            )
            assert (status, told["sticky"]) == (200, {"header": "", "input": "x"})
            assert {await ask_v2(client, 1.0) for _ in range(20)} == {1}

    run(work())


def test_an_arm_that_is_not_there_leaves_its_share_to_the_heaviest(tmp_path: Path) -> None:
    write_versions(tmp_path, (1, 2, 3), traffic={1: 60, 2: 30, 3: 10})

    async def work() -> None:
        async with serving(tmp_path) as at:
            client = await at.client()
            assert {await ask_v2(client, 1.0) for _ in range(200)} == {1, 2, 3}
            rewrite(tmp_path, version_policy={"specific": [2, 3]}, labels=None)
            await at.server.repository.load("twice")
            counts = Counter([await ask_v2(client, 1.0) for _ in range(300)])
            assert counts.keys() == {2, 3}
            assert counts[2] > 230, "90 of 100, that of version 1 too"

    run(work())


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "twice" / "model.yaml"
    config = {**yaml.safe_load(path.read_text()), **fields}
    path.write_text(yaml.safe_dump({name: value for name, value in config.items() if value is not None}))


@pytest.mark.logs_errors
def test_a_replaced_front_splits_as_the_others(tmp_path: Path) -> None:
    write_versions(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2, admin=ADMIN) as at:
            status, shown = await ask(await at.client(), {"traffic": {"1": 1}}, "/traffic/twice")
            assert status == 200
            link = at.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await at.until(lambda: link.pid not in (0, victim) and link._listening)
            for client in (await connect_to_each(at, 2)).values():
                assert {await ask_v2(client, 1.0) for _ in range(5)} == {1}
                assert json.loads((await client.get("/traffic/twice"))[1]) == shown

    run(work())


def test_a_watched_file_changes_the_split_and_loads_nothing(tmp_path: Path) -> None:
    write_versions(tmp_path, traffic={1: 1})

    async def work() -> None:
        async with serving(tmp_path, model_control="poll", poll_s=0.05, load_models=()) as at:
            client = await at.client()
            before = at.pids
            assert await ask_v2(client, 1.0) == 1
            rewrite(tmp_path, traffic={"canary": 1})
            while await ask_v2(client, 1.0) == 1:
                await asyncio.sleep(0.002)
            rewrite(tmp_path, traffic={"canary": 1, "stable": 1}, sticky={"header": "x-user"})
            users = {f"user-{number}": 1 + (hash_point(b"user-%d" % number) < 0.5) for number in range(8)}
            for user, version in users.items():
                while await ask_v2(client, 1.0, x_user=user) != version:
                    await asyncio.sleep(0.002)
            assert at.pids == before

    run(work())


@pytest.mark.logs_errors
def test_an_arm_without_a_worker_gets_no_requests(tmp_path: Path) -> None:
    write_versions(tmp_path, traffic={1: 50, 2: 50}, restart_backoff_s=30.0)

    async def work() -> None:
        async with serving(tmp_path) as at:
            client = await at.client()
            assert {await ask_v2(client, 1.0) for _ in range(60)} == {1, 2}
            model = at.server.catalog.models["twice"]
            hosted = next(one for one in at.server.host.hosted.values() if one.version.number == 2)
            pid = hosted.group.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await at.until(lambda: model.versions[2].down)
            for _ in range(60):
                assert await ask_v2(client, 1.0) == 1
                if not model.versions[2].down:
                    break

    run(work())


TALKER = """
class Model:
    info = {"max_tokens": 1 << 20}

    def __init__(self, config):
        pass

    def generate(self, request):
        for token in range(1 << 16):
            yield token, "VERSION "
"""


def test_generated_text_is_split_and_stopped(tmp_path: Path) -> None:
    talks = tmp_path / "talks"
    for number in (1, 2):
        (talks / str(number)).mkdir(parents=True)
        (talks / str(number) / "model.py").write_text(TALKER.replace("VERSION", f"v{number}"))
    text = {"tokenizer": "words", "max_new_tokens": 60_000, "max_tokens": 120_000}
    rules = {"version_policy": "all", "traffic": {1: 50, 2: 50}}
    (talks / "model.yaml").write_text(yaml.safe_dump({"backend": "text_python", "text": text, **rules}))

    async def work() -> None:
        async with serving(tmp_path, http=(Listener("127.0.0.1:0", ("textgen",)),)) as at:
            client, counts = await at.client(), Counter[str]()
            for _ in range(40):
                body = {"model": "talks", "prompt": "x", "max_tokens": 2}
                status, answer = await ask(client, body, "/v1/completions")
                assert status == 200, answer
                counts[answer["choices"][0]["text"].strip()] += 1
            assert counts.keys() == {"v1 v1", "v2 v2"}
            for number in range(8):  # the call to stop is drawn too, and finds the request in any version
                asked = {"id": f"r{number}", "text_input": "x", "parameters": {"max_new_tokens": 60_000}}
                raw, writer = json.dumps(asked).encode(), await at.client()
                head = f"POST /v2/models/talks/generate HTTP/1.1\r\nHost: t\r\nContent-Length: {len(raw)}"
                writer.writer.write(head.encode() + b"\r\n\r\n" + raw)
                stopped = 404
                while stopped == 404:  # until it runs
                    stopper = await at.client()  # a refusal of this API ends its connection
                    stopped, told = await ask(stopper, {"id": f"r{number}"}, "/v2/models/talks/stopInfer")
                    stopper.close()
                assert stopped == 200, told
                assert (await writer.page())[0] == 200

    run(work())


@pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
def test_calls_of_an_open_channel_are_split_as_soon_as_rules_say_so(tmp_path: Path) -> None:
    write_versions(tmp_path)

    async def work() -> None:
        listen = (Listener("127.0.0.1:0"),)
        async with serving(tmp_path, frontends=2, listen=listen, http=(), admin=ADMIN) as at:
            admin = await at.client()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
                call = channel.unary_unary(
                    "/inference.GRPCInferenceService/ModelInfer",
                    V2.ModelInferRequest.SerializeToString,
                    V2.ModelInferResponse.FromString,
                )
                stream = channel.stream_stream(
                    "/inference.GRPCInferenceService/ModelStreamInfer",
                    V2.ModelInferRequest.SerializeToString,
                    V2.ModelStreamInferResponse.FromString,
                )
                request = V2.ModelInferRequest(model_name="twice")
                tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                tensor.contents.fp32_contents.extend([3.0, 0.5])

                async def versions() -> set[str]:
                    found = {(await call(request, timeout=60)).model_version for _ in range(30)}
                    for _ in range(10):
                        answers = stream(iter([request] * 3), timeout=60)
                        told = {answer.infer_response.model_version async for answer in answers}
                        assert len(told) == 1, "one stream, one version"
                        found |= told
                    return found

                for share in (0, 50, 100, 50, 0):
                    rules = {"traffic": {"1": 100 - share, "2": share}}
                    rules = {"traffic": {arm: weight for arm, weight in rules["traffic"].items() if weight}}
                    assert (await ask(admin, rules, "/traffic/twice"))[0] == 200
                    assert await versions() == set(rules["traffic"])
                admin.writer.write(b"DELETE /traffic/twice HTTP/1.1\r\nHost: t\r\n\r\n")
                assert (await admin.page())[0] == 200
                assert await versions() == {"2"}

    run(work())


def test_requests_of_keys_of_some_models_are_split(tmp_path: Path) -> None:
    write_versions(tmp_path, traffic={1: 50, 2: 50})
    write_model(tmp_path, "other")
    keys = tmp_path / "keys.yaml"
    with changing(keys) as entries:
        some, entry = make_key("some", ("infer", "metadata"), models=("twice",))
        admin, another = make_key("admin", ("admin",))
        entries += [entry, another]

    async def work() -> None:
        async with serving(tmp_path, keys=str(keys), admin=ADMIN, load_models=("*",)) as at:
            client, bearer = await at.client(), {"authorization": f"Bearer {some}"}
            assert {await ask_v2(client, 1.0, **bearer) for _ in range(60)} == {1, 2}
            assert (await ask(client, {}, "/v2/models/other/infer", **bearer))[0] == 403
            assert (await ask(client, {"traffic": {"1": 1}}, "/traffic/twice", **bearer))[0] == 403
            changed = await ask(
                client, {"traffic": {"1": 1}}, "/traffic/twice", authorization=f"Bearer {admin}"
            )
            assert changed[0] == 200
            assert {await ask_v2(client, 1.0, **bearer) for _ in range(30)} == {1}
            assert {await ask_v1(client, 1.0, **bearer) for _ in range(30)} == {1}

    run(work())


# -- changes


def test_rules_of_the_file_and_of_a_client_hold_in_every_front(tmp_path: Path) -> None:
    write_versions(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS, admin=ADMIN) as at:
            clients = list((await connect_to_each(at, FRONTS)).values())

            async def versions(asked: int = 20) -> set[int]:
                return {await ask_v2(client, 1.0) for client in clients for _ in range(asked)}

            assert await versions() == {2}, "without rules the highest"
            for position, client in enumerate(clients):
                arm = 1 + position % 2
                status, shown = await ask(client, {"traffic": {str(arm): 1}}, "/traffic/twice")
                assert (status, shown["traffic"], shown["set"]) == (200, {str(arm): 1.0}, True)
                assert await versions() == {arm}
                told = [json.loads((await one.get("/traffic/twice"))[1]) for one in clients]
                assert told == [shown] * FRONTS
            status, _ = await ask(clients[1], {"traffic": {"stable": 1, "canary": 1}}, "/traffic/twice")
            assert status == 200
            assert await versions() == {1, 2}
            rewrite(tmp_path, traffic={"stable": 1})  # the file speaks last
            await at.server.repository.load("twice")
            await at.server.fronts.settle()
            assert await versions() == {1}
            assert not json.loads((await clients[0].get("/traffic/twice"))[1])["set"]
            assert (await ask(clients[2], {"traffic": {"canary": 1}}, "/traffic/twice"))[0] == 200
            assert await versions() == {2}
            clients[0].writer.write(b"DELETE /traffic/twice HTTP/1.1\r\nHost: t\r\n\r\n")
            assert (await clients[0].page())[0] == 200
            assert await versions() == {1}, "the file's again"

    run(work())


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "the body is no JSON"),
        (b"[]", 400, "no JSON object"),
        (b'{"traffic": {"1": 0}}', 400, "traffic.1: given 0.0, allowed: a number above 0"),
        (b'{"traffic": {"7": 1}}', 400, "traffic.7: version 7 would not be served"),
        (b'{"traffic": {"blue": 1}}', 400, "traffic.blue: neither a version nor a label"),
        (b'{"sticky": {"header": "x"}}', 400, 'sticky: given "x", allowed: nothing without traffic'),
        (b'{"traffic": {"1": 1}, "shadow": {"version": 1}}', 400, "shadow.version: given 1"),
        (b'{"traffic": {"1": 1}, "color": 1}', 400, "color: unknown field"),
    ],
)
def test_wrong_rules_change_nothing(tmp_path: Path, body: bytes, status: int, told: str) -> None:
    write_versions(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, admin=ADMIN) as at:
            client = await at.client()
            found, answer = await client.post("/traffic/twice", body)
            assert (found, told in json.loads(answer)["error"]) == (status, True), answer
            assert (await client.post("/traffic/other", b'{"traffic": {"1": 1}}'))[0] == 404
            assert json.loads((await client.get("/traffic/twice"))[1])["traffic"] == {}
            assert await ask_v2(client, 1.0) == 2

    run(work())


def test_clients_change_nothing_unless_the_settings_say_so(tmp_path: Path) -> None:
    write_versions(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            status, answer = await (await at.client()).post("/traffic/twice", b'{"traffic": {"1": 1}}')
            assert (status, "admin.traffic" in answer.decode()) == (403, True)

    run(work())


@pytest.mark.parametrize("load", [4, 64])
def test_changes_under_load_fail_no_request(tmp_path: Path, load: int) -> None:
    write_versions(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2, admin=ADMIN) as at:
            admin, stop = await at.client(), asyncio.Event()
            counts: Counter[int] = Counter()

            async def asking(number: int) -> None:
                client, ways = await at.client(), (ask_v1, ask_v2)
                while not stop.is_set():
                    counts[await ways[number % 2](client, float(number))] += 1

            tasks = [asyncio.ensure_future(asking(number)) for number in range(load)]
            for share in (1, 50, 99, 50, 1):
                rules = {"traffic": {"1": 100 - share, "2": share}, "sticky": {"header": "x-user"}}
                assert (await ask(admin, rules, "/traffic/twice"))[0] == 200
                before = counts.total()
                await at.until(lambda before=before: counts.total() > before + 2 * load)
            admin.writer.write(b"DELETE /traffic/twice HTTP/1.1\r\nHost: t\r\n\r\n")
            assert (await admin.page())[0] == 200
            stop.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert counts.keys() == {1, 2}

    run(work())


# -- shadows


async def shadow_counts(client: Client) -> Counter[str]:
    return +await read_counts(client, "fastserve_shadow_requests_total", "result", model="twice")


@pytest.mark.logs_errors
@pytest.mark.parametrize(
    ("told", "result"),
    [
        ("x * 2 + 1000", "equal"),
        ("(x * 2 + 1000) * (1 + 1e-6)", "equal"),
        ("x * 2 + 1001", "different"),
        ("x * 2 + 1000 if not x.any() else self.no_method()", "failed"),
    ],
)
def test_a_shadow_is_compared(tmp_path: Path, told: str, result: str) -> None:
    write_versions(tmp_path, answers={2: told}, shadow={"version": 2, "percent": 100}, isolate_failures=False)
    asked = 12

    async def work() -> None:
        async with serving(tmp_path) as at:
            client = await at.client()
            for number in range(asked):
                assert await ask_v2(client, float(number)) == 1, "the shadow answers nobody"
                assert await ask_v1(client, float(number)) == 1
            while (await shadow_counts(client)).total() < 2 * asked:
                await asyncio.sleep(0.002)
            assert await shadow_counts(client) == {result: 2 * asked}
            if result == "equal":
                status, page = await client.get("/v2/models/twice/versions/2/stats")
                assert status == 200
                assert json.loads(page)["model_stats"][0]["inference_count"] >= 2 * asked
            assert (await read_counts(client, "fastserve_requests_total", "version", model="twice")) == {
                "1": 2 * asked
            }

    run(work())


def test_a_shadow_that_is_busy_or_stopped_delays_no_reply(tmp_path: Path) -> None:
    write_versions(
        tmp_path, max_batch_size=1, answers={2: "x * 2 + 1000"}, shadow={"version": 2, "percent": 100}
    )
    asked = 4 * MOST_COPIES

    async def work() -> None:
        async with serving(tmp_path, frontends=1) as at:
            client = await at.client()
            assert await ask_v2(client, 1.0) == 1
            while (await shadow_counts(client)).total() < 1:
                await asyncio.sleep(0.002)
            hosted = next(one for one in at.server.host.hosted.values() if one.version.number == 2)
            pid = hosted.group.pids[0]
            assert pid
            os.kill(pid, signal.SIGSTOP)
            try:
                for number in range(asked):
                    assert await asyncio.wait_for(ask_v2(client, float(number)), 60) == 1
                counts = await shadow_counts(client)
                assert counts["dropped"] >= asked - MOST_COPIES
            finally:
                os.kill(pid, signal.SIGCONT)
            while (await shadow_counts(client)).total() < asked + 1:
                await asyncio.sleep(0.01)
            counts = await shadow_counts(client)
            assert counts["different"] == 0
            assert counts.total() == asked + 1

    run(work())


@pytest.mark.logs_errors
def test_a_shadow_that_dies_fails_alone(tmp_path: Path) -> None:
    write_versions(tmp_path, shadow={"version": 2, "percent": 100}, answers={2: "self.die(x)"})
    source = tmp_path / "twice" / "2" / "model.py"
    die = "def die(self, x):\n        x.any() and os.kill(os.getpid(), signal.SIGKILL)\n        return x\n"
    source.write_text(f"{source.read_text()}\n    {die}")

    async def work() -> None:
        async with serving(tmp_path, strict_readiness=False) as at:
            client = await at.client()
            for number in range(3):
                assert await ask_v2(client, float(number + 1)) == 1
            while (await shadow_counts(client)).total() < 3:
                await asyncio.sleep(0.01)
            assert await shadow_counts(client) == {"failed": 3}

    run(work())


def test_copies_a_second_are_bounded(tmp_path: Path) -> None:
    shadow = {"version": 2, "percent": 100, "most_per_second": 0.001}
    write_versions(tmp_path, answers={2: "x * 2 + 1000"}, shadow=shadow)

    async def work() -> None:
        async with serving(tmp_path) as at:
            client = await at.client()
            for number in range(40):
                assert await ask_v1(client, float(number)) == 1
            while (await shadow_counts(client)).total() < 40:
                await asyncio.sleep(0.002)
            assert await shadow_counts(client) == {"equal": 1, "dropped": 39}

    run(work())


def test_a_shadow_is_begun_and_ended_by_a_client(tmp_path: Path) -> None:
    write_versions(tmp_path, answers={2: "x * 2 + 1000"})

    async def work() -> None:
        async with serving(tmp_path, frontends=2, admin=ADMIN) as at:
            clients = list((await connect_to_each(at, 2)).values())
            for client in clients:
                assert (await ask(client, {}, "/traffic/twice"))[0] == 200
                assert await ask_v2(client, 1.0, "/v2/models/twice/versions/1/infer") == 1
            rules = {"shadow": {"version": 2, "percent": 100}}
            assert (await ask(clients[1], rules, "/traffic/twice"))[0] == 200
            for client in clients:
                for number in range(5):
                    assert await ask_v2(client, float(number)) == 1
            while (await shadow_counts(clients[0])).total() < 10:
                await asyncio.sleep(0.002)
            assert (await ask(clients[0], {"traffic": {"stable": 1}}, "/traffic/twice"))[0] == 200
            for client in clients:
                for number in range(5):
                    assert await ask_v2(client, float(number)) == 1
            assert await shadow_counts(clients[0]) == {"equal": 10}

    run(work())


def tensor(dtype: str, values: Any) -> Tensor:
    array = np.array(values, dtype)
    return Tensor(DTYPES[dtype], array.shape, array.tobytes())


@pytest.mark.parametrize(
    ("dtype", "one", "other", "told"),
    [
        ("float32", [1.0, np.nan, np.inf], [1.000001, np.nan, np.inf], ""),
        ("float32", [1.0, 2.0], [1.0, 2.1], "output 'y': element 1 by more than 1e-05"),
        ("float32", [np.inf], [-np.inf], "output 'y': element 0 by more than 1e-05"),
        ("float32", [np.nan], [1.0], "output 'y': element 0 by more than 1e-05"),
        ("float64", [1e300], [1e300 * (1 + 1e-7)], ""),
        ("float16", [0.0], [-0.0], ""),
        ("float16", [1.0], [1.01], "output 'y': element 0 by more than 1e-05"),
        ("int64", [1 << 60], [(1 << 60) + 1], "output 'y': other values"),
        ("float32", [1.0], [[1.0]], "output 'y': float32 [1, 1] for float32 [1]"),
    ],
)
def test_outputs_are_compared(dtype: str, one: Any, other: Any, told: str) -> None:
    found = asyncio.run(compare_outputs({"y": tensor(dtype, one)}, {"y": tensor(dtype, other)}, 1e-5))
    assert found == told


def test_large_outputs_are_compared_in_part() -> None:
    values = np.ones(100_000, np.float32)
    wrong = values.copy()
    wrong[50_000:] = 2
    pair = ({"y": tensor("float32", values)}, {"y": tensor("float32", wrong)})
    assert asyncio.run(compare_outputs(*pair, 1e-5)) == "output 'y': element 50001 by more than 1e-05"
    names = asyncio.run(compare_outputs({"y": tensor("float32", [1])}, {}, 0.0))
    assert names == "output 'y', which only one of them has"
