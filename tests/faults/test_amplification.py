"""Small requests that expand, and large valid ones: each takes bounded memory and time of the event loop, and
another client is served meanwhile.

The limits of this server are small, so that ten times a limit is little. Times are CPU times, which other
processes on the machine do not lengthen.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.kserve import client_models
from tests.faults.bystander import Bystander
from tests.faults.rig import MESSAGES, Grpc, Http, leaks, tensor
from tests.faults.test_counts import BACK
from tests.running import Running

MB = 1 << 20
LIMIT = 4 * MB
LOOP_S = 0.5  # of the loop of a server: at most 0.05 was measured
ROUND_S = 0.001  # of it, for a round of the bystander: 0.3 to 0.9 ms on a busy machine
OPTIONS = ("--admin-log-settings", "--model-control", "explicit", "--load-model", "*")
CLASSIFIES = """
import numpy as np

class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"scores": inputs["x"][:, :1].astype(np.float32)}
"""
SUMS = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"y": inputs["x"].sum(axis=1, keepdims=True)}
"""
CONFIG = f"""
limits: {{body_bytes: {LIMIT}, inflated_bytes: {LIMIT}}}
triton: {{http_max_input_size: {LIMIT}}}
grpc_options: {{message_bytes: {LIMIT}}}
"""


def start(folder: Path, config: str = "") -> Running:
    models = folder / "models"
    models.mkdir()
    side = {"dtype": "float32", "shape": [-1]}
    client_models.write_native(models, "free", BACK, inputs={"x": side}, outputs={"y": side})
    texts = {"dtype": "bytes", "shape": [-1]}
    client_models.write_native(models, "texts", BACK, inputs={"x": texts}, outputs={"y": texts})
    row, one = {"dtype": "float32", "shape": [4]}, {"dtype": "float32", "shape": [1]}
    client_models.write_native(models, "half", BACK, inputs={"x": row}, outputs={"y": row})
    client_models.write_native(models, "sums", SUMS, inputs={"x": side}, outputs={"y": one})
    classify = {"serving_default": {"method": "classify"}}
    client_models.write_native(
        models, "classes", CLASSIFIES, inputs={"x": side}, outputs={"scores": side}, signatures=classify
    )
    (folder / "settings.yaml").write_text(config)
    return Running(models, folder / "log", "--config", str(folder / "settings.yaml"), *OPTIONS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tmp_path_factory.mktemp("amplification"), CONFIG) as running:
        with Grpc(running) as grpc, Http(running) as http:  # what the first requests load is not theirs
            grpc.ask("ServerLive")
            for model in ("free", "half"):
                http.post(f"/v2/models/{model}/infer", {"inputs": [tensor("x", [1, 4], [0] * 4, "FP32")]})
        yield running


class Cost:
    """The cost in the server's own process from now on: memory at its peak, CPU of the thread of its loop. Of
    that not what a bystander makes it work, the more the longer the machine lets all of this last."""

    def __init__(self, served: Running, bystander: Bystander | None = None) -> None:
        self._pid, self._bystander = served.pid, bystander
        self._before_s, self._asked = self._loop_s(), bystander.asked if bystander else 0
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # the peak begins anew
        self._resident = self._read("VmRSS")

    def _read(self, name: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def _loop_s(self) -> float:
        return int(Path(f"/proc/{self._pid}/task/{self._pid}/schedstat").read_text().split()[0]) / 1e9

    @property
    def peak_bytes(self) -> int:
        return self._read("VmHWM") - self._resident

    @property
    def loop_s(self) -> float:
        worked_s = self._loop_s() - self._before_s
        rounds = self._bystander.asked - self._asked if self._bystander else 0
        return worked_s - rounds * ROUND_S


@pytest.fixture
def http(server: Running) -> Iterator[Http]:
    before = server.holds()
    with Http(server) as made:
        yield made
    assert server.alive
    server.settles(before)


GOOD = b'[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]'
INFER, PREDICT = "/v2/models/half/infer", "/v1/models/half:predict"
GENERATE, CLASSIFY = "/v2/models/half/generate", "/v1/models/classes:classify"


def names(count: int) -> bytes:
    return b",".join(b'"%x":1' % number for number in range(count))


def infer(data: bytes, shape: bytes = b"1,4", more: bytes = b"") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%b],"data":[%b]%b}]}' % (shape, data, more)


# Bodies of at most LIMIT that were dear: megabytes a member, a list or an object each.
HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "parameters": (INFER, lambda: b'{"parameters":{%b},"inputs":%b}' % (names(350_000), GOOD)),
    "parameters of an input": (INFER, lambda: infer(b"1,2,3,4", more=b',"parameters":{%b}' % names(350_000))),
    "parameters of an output": (
        INFER, lambda: b'{"inputs":%b,"outputs":[{"name":"y","parameters":{%b}}]}' % (GOOD, names(350_000)),
    ),
    "long parameters": (INFER, lambda: b'{"parameters":{"a":"%b"},"inputs":%b}' % (b"a" * 3 * MB, GOOD)),
    "axes": (INFER, lambda: infer(b"1", b"1," * (LIMIT // 2 - 100) + b"1")),
    "inputs": (INFER, lambda: b'{"inputs":[%b{}]}' % (b"{}," * (LIMIT // 3 - 10))),
    "outputs": (INFER, lambda: b'{"inputs":%b,"outputs":[%b{}]}' % (GOOD, b'{"name":"y"},' * 300_000)),
    "a long name": (INFER, lambda: infer(b"1,2,3,4").replace(b'"x"', b'"%b"' % (b"x" * (LIMIT - 200)))),
    "a long id": (INFER, lambda: b'{"id":"%b","inputs":%b}' % (b"i" * (LIMIT - 200), GOOD)),
    "empty lists": (INFER, lambda: infer(b"[]," * (LIMIT // 3 - 100) + b"[]", b"0,4")),
    "deep": (INFER, lambda: b"[" * LIMIT),
    "empty rows": (PREDICT, lambda: b'{"instances":[%b[]]}' % (b"[]," * (LIMIT // 3 - 20))),
    "deep rows": (PREDICT, lambda: b"[" * LIMIT),
    "generated parameters": (GENERATE, lambda: b'{"x":[1,2,3,4],%b}' % names(350_000)),
    "generated lists": (GENERATE, lambda: b'{"x":[%b1]}' % (b"[]," * (LIMIT // 3 - 20))),
    "trace settings": ("/v2/trace/setting", lambda: b'{"trace_level":[%b1]}' % (b"[]," * (LIMIT // 3 - 20))),
    "log settings": ("/v2/logging", lambda: b'{"a":[%b1]}' % (b"[]," * (LIMIT // 3 - 20))),
    "index": ("/v2/repository/index", lambda: b'{"a":[%b1]}' % (b"[]," * (LIMIT // 3 - 20))),
    "examples": (CLASSIFY, lambda: b'{"examples":[%b{"x":1}]}' % (b'{"x":[1,2]},' * 340_000)),
    "lists of a feature": (CLASSIFY, lambda: b'{"examples":[{"x":[%b0]}]}' % (b"[]," * 1_390_000)),
    "padded examples": (
        CLASSIFY, lambda: b'{"examples":[{"x":[%b0.5]}%b]}' % (b"1.5," * 20_000, b',{"x":1.5}' * 20_000),
    ),
    "a context": (
        CLASSIFY, lambda: b'{"context":{%b},"examples":[{"x":1}%b]}' % (names(20_000), b',{"x":1}' * 20_000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_bodies_that_are_dear(server: Running, http: Http, name: str) -> None:
    path, make = HOSTILE[name]
    body = make()
    assert len(body) <= LIMIT
    with Bystander(server) as bystander:
        cost = Cost(server, bystander)
        answer = http.ask("POST", path, body)
        assert answer.status in (400, 500), answer.error[:200]
        assert not leaks(server, answer)
        assert cost.peak_bytes < 10 * LIMIT
        assert cost.loop_s < LOOP_S
        assert len(answer.body) < 100_000


PACKED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "spaces": (PREDICT, lambda: b'{"instances":[[1,2,3,4]]' + b" " * (LIMIT - 30) + b"}"),
    "too many spaces": (PREDICT, lambda: b'{"instances":[[1,2,3,4]]' + b" " * 20 * LIMIT + b"}"),
    "parameters": (INFER, lambda: b'{"parameters":{%b},"inputs":%b}' % (names(1_000_000), GOOD)),
    "numbers": (INFER, lambda: infer(b"0," * (20 * MB) + b"0", b"1,%d" % (20 * MB + 1))),
    "strings": (
        "/v2/models/texts/infer",
        lambda: infer(b'"",' * (10 * MB) + b'""', b"1,1").replace(b"FP32", b"BYTES"),
    ),
    "members": (INFER, lambda: b""),
}  # fmt: skip


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("name", PACKED)
def test_bodies_that_grow(server: Running, http: Http, name: str, coding: str) -> None:
    """Unpacked bodies are bounded, and so is the memory that is made of them."""
    path, make = PACKED[name]
    body = make()
    sent = gzip.compress(body, 6) if coding == "gzip" else zlib.compress(body, 6)
    sent = sent * 60_000 if name == "members" else sent
    with Bystander(server) as bystander:
        cost = Cost(server, bystander)
        answer = http.ask("POST", path, sent, Content_Encoding=coding)
        assert cost.peak_bytes < 10 * LIMIT
        assert cost.loop_s < LOOP_S
    if name == "spaces" and coding == "gzip":  # 160 KB a byte of gzip is beyond the ratio, and says no more
        assert answer.status == 400
    assert answer.status in (400, 500), answer.error[:200]


def test_a_body_that_grows_as_it_may(server: Running, http: Http) -> None:
    rows = [[index, 1, 2, 3] for index in range(20_000)]
    sent = gzip.compress(json.dumps({"instances": rows}).encode())
    answer = http.ask("POST", PREDICT, sent, Content_Encoding="gzip")
    assert answer.json()["predictions"] == rows


def test_messages_that_are_dear(server: Running) -> None:
    """Fields without an end, parameters, axes, and contents that are larger as a tensor."""
    made = MESSAGES.ModelInferRequest(model_name="half")
    made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    plain = made.SerializeToString()
    made.raw_input_contents.append(bytes(16))
    good = made.SerializeToString()
    entry = MESSAGES.ModelInferRequest(parameters={"a": MESSAGES.InferParameter(int64_param=1)})
    long = MESSAGES.ModelInferRequest(parameters={"a": MESSAGES.InferParameter(string_param="a" * 3 * MB)})
    hostile = {
        "unknown fields": good + b"\xf8\x01\x01" * (LIMIT // 4),
        "names again": good + b"\x0a\x00" * (LIMIT // 3),
        "parameters": good + entry.SerializeToString() * (LIMIT // 16),
        "a long parameter": good + long.SerializeToString(),
        "inputs": plain + b"\x2a\x00" * (LIMIT // 3),
        "axes": plain + b"\x2a\x82\x80\x80\x01" + b"\x18\x01" * (1 << 20) + b"\x18\x01",
    }
    before = server.holds()
    with Bystander(server) as bystander, Grpc(server) as grpc:
        grpc.ask("ServerLive")
        for name, data in hostile.items():
            cost = Cost(server, bystander)
            assert grpc.ask_bytes("ModelInfer", data).status in (3, 8, 13), name
            assert cost.peak_bytes < 10 * LIMIT, name
            assert cost.loop_s < LOOP_S, name
        assert grpc.ask_bytes("ModelInfer", good).status == 200
    server.settles(before)


def test_an_error_quotes_no_more_than_can_be_told(server: Running) -> None:
    """A client of gRPC reads few KB of it."""
    made = MESSAGES.ModelInferRequest(model_name="m" * 3 * MB)
    with Grpc(server) as grpc:
        answer = grpc.ask_bytes("ModelInfer", made.SerializeToString())
        assert answer.status == 5
        assert answer.error.startswith("Request for unknown model: 'mmm")


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The usual limits."""
    with start(tmp_path_factory.mktemp("large")) as running:
        with Grpc(running) as grpc:  # grpcio opens a descriptor of its own when it is first used
            grpc.ask("ServerLive")
        yield running


COUNT = 4_000_000


@pytest.mark.parametrize("dialect", ["v1 rows", "v1 columns", "v2", "v2 packed"])
def test_large_bodies_in_order(usual: Running, dialect: str) -> None:
    """30 MB of numbers are answered, and read beside the loop."""
    numbers = b",".join([b"0.12345"] * COUNT)
    headers = {}
    path = "/v1/models/sums:predict" if dialect.startswith("v1") else "/v2/models/sums/infer"
    if dialect.startswith("v1"):
        body = b'{"%b":[[%b]]}' % (b"instances" if dialect == "v1 rows" else b"inputs", numbers)
    else:
        body = infer(numbers, b"1,%d" % COUNT)
    if dialect == "v2 packed":
        noise = os.urandom(1 << 20).hex().encode()  # or the ratio would be beyond what is allowed
        body = body.replace(b'{"inputs"', b'{"parameters":{"a":"%b"},"inputs"' % noise[: 900 << 10], 1)
        body, headers = gzip.compress(body, 1), {"Content_Encoding": "gzip"}
    with Bystander(usual) as bystander, Http(usual) as http:
        cost = Cost(usual, bystander)
        answer = http.ask("POST", path, body, **headers)
        assert answer.status == 200, answer.error
        found = answer.json()
        value = sum_of(found)
        assert abs(value - COUNT * 0.12345) < COUNT * 1e-3
        assert cost.loop_s < LOOP_S
        assert cost.peak_bytes < 10 * 40 * MB


def test_many_rows_of_strings(usual: Running) -> None:
    """Split over thousands of batches: where a row begins is not looked for from the start for each."""
    count = 200_000
    texts = [b"%d" % (index % 977) for index in range(count)]
    body = infer(b",".join(b'"%b"' % text for text in texts), b"%d,1" % count).replace(b"FP32", b"BYTES")
    with Bystander(usual), Http(usual) as http:
        answer = http.ask("POST", "/v2/models/texts/infer", body)
        assert answer.status == 200, answer.error
        assert answer.json()["outputs"][0]["data"] == [text.decode() for text in texts]


def sum_of(found: Any) -> float:
    if "outputs" in found and isinstance(found["outputs"][0], dict):
        return float(found["outputs"][0]["data"][0])
    return float((found.get("predictions") or found["outputs"])[0][0])


def test_a_client_that_leaves_in_the_middle_of_the_work(usual: Running) -> None:
    """The work is outlasted, its result nobody's, and the next request is answered."""
    workers, _, errors = usual.holds()
    body = infer(b",".join([b"0.5"] * COUNT), b"1,%d" % COUNT)
    with Bystander(usual):
        for _ in range(3):
            with Http(usual) as http:
                head = b"POST /v2/models/sums/infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n"
                http.send(head % len(body) + body)
        with Http(usual) as http:
            answer = http.ask("POST", "/v2/models/sums/infer", body)
    assert answer.json()["outputs"][0]["data"] == [COUNT / 2]
    assert (usual.holds()[0], usual.holds()[2]) == (workers, errors)
