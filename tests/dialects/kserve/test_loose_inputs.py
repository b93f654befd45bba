"""`loose_inputs`: inputs of any name and type of numbers, columns, nulls; and `default_outputs`."""

from __future__ import annotations

import json
import math
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import yaml

from fastserve.dialects.kserve.http_infer import HttpTemplates
from fastserve.protos import load
from tests.dialects.kserve.test_http_infer import Served
from tests.running import Running
from tests.server.rig import run

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
V2 = load("kserve_v2")
INFER = "/inference.GRPCInferenceService/ModelInfer"
CODE = """
import numpy as np

class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        rows = inputs["rows"] if "rows" in inputs else np.column_stack(list(inputs.values()))
        return {"same": rows} if rows.dtype == np.int64 else {"sum": rows.sum(axis=1), "same": rows}
"""
SAME = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"same": inputs["rows"]}
"""
WIDE = {"dtype": "float64", "shape": [2]}
LONE = {"dtype": "float64", "shape": []}
MATRIX = {"inputs": {"rows": WIDE}, "outputs": {"sum": LONE, "same": WIDE}}
COLUMNS = {"inputs": {"a": LONE, "b": {**LONE, "shape": [1]}}, "outputs": MATRIX["outputs"]}
LOOSE = {"loose_inputs": True, "default_outputs": ["sum"]}
MODELS = {
    "matrix": {**MATRIX, **LOOSE, "labels": {"v0.1.0": 1}},
    "columns": {**COLUMNS, **LOOSE},
    "strict": MATRIX,
    "tight": {**MATRIX, **LOOSE, "max_queue_bytes": 1 << 16},
    "whole": {
        "inputs": {"rows": {**WIDE, "dtype": "int64"}},
        "outputs": {"same": {**WIDE, "dtype": "int64"}},
        "loose_inputs": True,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("loose")
    for name, config in MODELS.items():
        folder = root / "models" / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(CODE)
        written = {"backend": "python", "max_batch_size": 4096, "shared_worker": "all", **config}
        (folder.parent / "model.yaml").write_text(yaml.safe_dump(written))
    with Running(root / "models", root / "log") as running:
        yield running


def tensor(data: Any, shape: list[int], datatype: str = "FP32", name: str = "x") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def ask(server: Running, model: str, *inputs: Any, path: str = "infer", **more: Any) -> tuple[int, Any]:
    body = json.dumps({"inputs": inputs, **more}).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/{model}/{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, {one["name"]: one["data"] for one in json.load(reply)["outputs"]}
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, json.load(fault)["error"]


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        *((kind, [1, 2, 3, 4]) for kind in ("INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64")),
        *((kind, [[1.0, 2.0], [3.0, 4.0]]) for kind in ("FP32", "FP64")),
        ("UINT64", [1, 2, 3, 4]),
    ],
)
def test_numbers_of_any_type(server: Running, datatype: str, data: Any) -> None:
    for _ in range(3):  # later ones may be read by a template
        assert ask(server, "matrix", tensor(data, [2, 2], datatype)) == (200, {"sum": [3.0, 7.0]})


def test_booleans_and_single_precision(server: Running) -> None:
    assert ask(server, "matrix", tensor([True, False], [1, 2], "BOOL")) == (200, {"sum": [1.0]})
    single = struct.unpack("f", struct.pack("f", 0.1))[0]
    outputs = [{"name": "same"}]
    assert ask(server, "matrix", tensor([0.1, 0], [1, 2]), outputs=outputs) == (200, {"same": [single, 0.0]})


def test_single_precision_is_rounded_by_a_template_too(server: Running) -> None:
    """The general path answers the first request, a template those of the same text with other numbers."""
    outputs, random = [{"name": "same"}], Random(0)
    for rows in (2, 2, 2, 3, 40):
        sent = [random.uniform(-1, 1) * 10 ** random.randint(-40, 38) for _ in range(2 * rows)]
        wanted = [struct.unpack("f", struct.pack("f", one))[0] for one in sent]
        for given in (sent, [sent[at : at + 2] for at in range(0, 2 * rows, 2)]):
            found = ask(server, "matrix", tensor(given, [rows, 2]), outputs=outputs)
            assert found == (200, {"same": wanted})
    for _ in range(2):
        found = ask(server, "matrix", tensor([1e300, 0.0], [1, 2]), outputs=outputs)
        assert found == (200, {"same": [math.inf, 0.0]})


@pytest.mark.parametrize(
    ("model", "datatype", "wanted"),
    [
        ("wide", "FP32", True),  # a template reads the one as the other
        ("narrow", "FP64", True),
        ("narrow", "FP32", True),
        ("wide", "INT32", False),  # 1.5 is no INT32, and would be read as FP64
        ("narrow", "INT64", False),
    ],
)
def test_which_numbers_have_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, datatype: str, wanted: bool
) -> None:
    for name, dtype in (("wide", "float64"), ("narrow", "float32")):
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(SAME)
        spec = {"dtype": dtype, "shape": [2]}
        config = {"backend": "python", "inputs": {"rows": spec}, "outputs": {"same": spec}}
        (folder.parent / "model.yaml").write_text(yaml.safe_dump({**config, "loose_inputs": True}))
    taken, start = [], HttpTemplates.start

    def noting(self: HttpTemplates, call: Any, header_bytes: int) -> bool:
        taken.append(start(self, call, header_bytes))
        return taken[-1]

    monkeypatch.setattr(HttpTemplates, "start", noting)

    async def work() -> None:
        async with Served(tmp_path, model) as served:
            for number in (0, 1, 2, 3):
                data = [float(number), 0.1] if datatype.startswith("FP") else [number, 7]
                body = json.dumps({"inputs": [tensor(data, [1, 2], datatype)]}).encode()
                head, said = await served.client.post(f"/v2/models/{model}/infer", body, None)
                assert " 200 " in head, said
                (output,) = json.loads(said)["outputs"]
                assert output["data"] == pytest.approx(data, rel=1e-3)
                if (model, datatype) == ("wide", "FP32"):
                    assert output["data"][1] == struct.unpack("f", struct.pack("f", 0.1))[0]

    run(work())
    assert taken == [False, *[wanted] * 3]


def test_a_strict_model_takes_its_own_inputs_alone(server: Running) -> None:
    status, error = ask(server, "strict", tensor([1, 2], [1, 2], "FP64"))
    assert (status, error) == (400, "unexpected inference input 'x' for model 'strict'")
    status, error = ask(server, "strict", tensor([1, 2], [1, 2], "FP32", "rows"))
    assert status == 400
    assert "data-type is 'FP32'" in error
    assert ask(server, "strict", tensor([None, 2], [1, 2], "FP64", "rows"))[0] == 500
    status, found = ask(server, "strict", tensor([1, 2], [1, 2], "FP64", "rows"))
    assert (status, set(found)) == (200, {"sum", "same"})
    status, error = ask(
        server, "strict", tensor([1, 2], [1, 2], "FP64", "rows"), path="versions/v0.1.0/infer"
    )
    assert (status, error) == (404, "Not Found")


def test_a_tensor_for_each_column(server: Running) -> None:
    table = {"parameters": {"content_type": "pd"}}
    a, b = tensor([1, 2], [2], "INT64", "a"), tensor([10.0, 20.0], [2, 1], "FP64", "b")
    other = tensor(["x", "y"], [2, 1], "BYTES", "other")
    for _ in range(3):
        assert ask(server, "columns", b, a, **table) == (200, {"sum": [11.0, 22.0]})
    assert ask(server, "columns", a, other, b, **table) == (200, {"sum": [11.0, 22.0]})
    assert ask(server, "matrix", a, b, **table) == (200, {"sum": [11.0, 22.0]})
    assert ask(server, "columns", tensor([1, 10, 2, 20], [2, 2], "INT32")) == (200, {"sum": [11.0, 22.0]})


@pytest.mark.parametrize(
    ("model", "inputs", "told"),
    [
        ("matrix", [tensor([1, 2, 3], [1, 3])], "Expected [-1,2], got [1,3]"),
        ("matrix", [tensor(["a", "b"], [1, 2], "BYTES")], "data-type is 'BYTES'"),
        ("matrix", [tensor([1], [1], name="a"), tensor(["x"], [1], "BYTES", "b")], "column 'b' for model"),
        ("matrix", [tensor([1], [1], name="a"), tensor([1, 2], [2], name="b")], "one for each of the rows"),
        ("matrix", [tensor([1], [1], name=name) for name in "abc"], "Expected [-1,2], got [1,3]"),
        ("columns", [tensor([1], [1], name="a")], "missing required input(s) ['b']"),
        ("columns", [tensor([1, 2], [2], name="a"), tensor([1], [1], name="b")], "batch size does not match"),
        ("columns", [tensor(["x"], [1], "BYTES", "a"), tensor([1], [1], name="b")], "data-type is 'BYTES'"),
    ],
)
def test_what_does_not_fit_is_said(server: Running, model: str, inputs: list[Any], told: str) -> None:
    status, error = ask(server, model, *inputs, parameters={"content_type": "pd"})
    assert status == 400
    assert told in error


def test_more_than_the_model_takes_is_not_converted(server: Running) -> None:
    """A byte becomes eight: what counts is what they have as the model's type. 4096 rows are a batch."""
    most = 4096 * 2 * 8
    for values in (most // 8, most // 8 + 2):
        told = ask(server, "tight", tensor([1] * values, [values // 2, 2], "UINT8"))
        if values * 8 <= most:
            assert told == (200, {"sum": [2.0] * (values // 2)})
        else:
            text = f"inputs have {values * 8} bytes as the model's types, model 'tight' takes at most {most}"
            assert told == (400, f"{text} (max_queue_bytes)")


def test_many_rows(server: Running) -> None:
    """More than are converted at a time."""
    count = 40_000
    a, b = list(range(count)), [number % 7 for number in range(count)]
    sums = [float(x + y) for x, y in zip(a, b, strict=True)]
    table = {"parameters": {"content_type": "pd"}}
    columns = tensor(b, [count, 1], "INT64", "b"), tensor(a, [count], "FP32", "a")
    for model in ("columns", "matrix"):
        assert ask(server, model, *columns, **table) == (200, {"sum": sums})
    rows = [number for pair in zip(a, b, strict=True) for number in pair]
    for model, datatype in (("columns", "FP64"), ("columns", "INT32"), ("matrix", "FP32")):
        assert ask(server, model, tensor(rows, [count, 2], datatype)) == (200, {"sum": sums})


def test_numbers_become_no_whole_ones(server: Running) -> None:
    given = tensor([1, 2], [1, 2], "INT64")
    assert ask(server, "whole", given) == (200, {"same": [1, 2]})
    columns = [tensor([1, 2], [2], "INT64", name) for name in "ab"]
    assert ask(server, "whole", *columns, parameters={"content_type": "pd"}) == (200, {"same": [1, 1, 2, 2]})
    for datatype in ("FP32", "INT32"):
        status, error = ask(server, "whole", tensor([1, 2], [1, 2], datatype))
        assert status == 400
        assert f"data-type is '{datatype}'" in error
        column = tensor([1], [1], datatype, "b")
        status, error = ask(server, "whole", columns[0], column, parameters={"content_type": "pd"})
        assert status == 400
        assert "expected numbers" in error


def test_two_matrices_are_no_table(server: Running) -> None:
    status, error = ask(server, "matrix", tensor([1, 2], [1, 2]), tensor([1, 2], [1, 2], name="y"))
    assert status == 400
    assert "expected 1 inputs but got 2" in error


def test_null_is_a_missing_number(server: Running) -> None:
    outputs = [{"name": "same"}]
    for data in ([1.0, None, None, 4.0], [[1.0, None], [None, 4.0]]):
        status, found = ask(server, "matrix", tensor(data, [2, 2], "FP64"), outputs=outputs)
        assert status == 200
        assert [value == value for value in found["same"]] == [True, False, False, True]
    quoted = {"id": 'a, null, "b', "outputs": outputs}
    assert ask(server, "matrix", tensor([None, 4.0], [1, 2], "FP64"), **quoted)[0] == 200
    for body in (b'{"inputs": [{"data": [null, 1', b'{"inputs": [null, "' + b'\\"' * 100_000):
        request = urllib.request.Request(f"http://{server.http}/v2/models/matrix/infer", body)
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=60):
            pass
        with caught.value:
            assert caught.value.code == 500
            assert "failed to parse the request JSON" in json.load(caught.value)["error"]
    status, error = ask(server, "matrix", tensor([1.0, "null"], [1, 2], "FP64"))
    assert status == 500
    assert "non-number" in error


def test_a_version_by_its_label(server: Running) -> None:
    for _ in range(2):
        found = ask(server, "matrix", tensor([1, 2], [1, 2], "FP64"), path="versions/v0.1.0/infer")
        assert found == (200, {"sum": [3.0]})
    assert ask(server, "matrix", tensor([1, 2], [1, 2]), path="versions/v0.2.0/infer")[0] == 404
    with urllib.request.urlopen(
        f"http://{server.http}/v2/models/matrix/versions/v0.1.0/ready", timeout=60
    ) as reply:
        assert reply.status == 200


def test_over_grpc(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(INFER, response_deserializer=V2.ModelInferResponse.FromString)

        def infer(model: str, *inputs: Any, raw: tuple[bytes, ...] = (), **more: Any) -> list[float]:
            request = V2.ModelInferRequest(
                model_name=model, inputs=inputs, raw_input_contents=raw, **more
            ).SerializeToString()
            (output,) = (reply := call(request, timeout=60)).outputs
            (data,) = reply.raw_output_contents
            return [output.name, *struct.unpack(f"<{len(data) // 8}d", data)]

        wide = {"name": "x", "shape": [1, 2]}
        for _ in range(3):
            for number in (1.0, 5.0):
                own = {**wide, "datatype": "FP64", "contents": {"fp64_contents": [number, 2.0]}}
                assert infer("matrix", own) == ["sum", number + 2]
                single = {**wide, "datatype": "FP32", "contents": {"fp32_contents": [number, 2.0]}}
                assert infer("matrix", single, model_version="v0.1.0") == ["sum", number + 2]
                raw = struct.pack("<2d", number, 2.0)
                assert infer("matrix", {**wide, "datatype": "FP64"}, raw=(raw,)) == ["sum", number + 2]
                columns = [
                    {"name": "b", "shape": [1], "datatype": "FP64", "contents": {"fp64_contents": [number]}},
                    {"name": "a", "shape": [1], "datatype": "FP32", "contents": {"fp32_contents": [2.0]}},
                ]
                table = {"content_type": {"string_param": "pd"}}
                assert infer("columns", *columns, parameters=table) == ["sum", number + 2]
                turned = [{"name": name, "shape": [1], "datatype": "FP64"} for name in ("b", "a")]
                raws = (struct.pack("<d", number), struct.pack("<d", 2.0))
                assert infer("columns", *turned, raw=raws) == ["sum", number + 2]


@pytest.mark.parametrize("clients", [4, 64])
def test_many_clients_have_their_own_rows(server: Running, clients: int) -> None:
    """Converted and unconverted requests of many callers share batches."""

    def work(client: int) -> None:
        for turn in range(4):
            number = client * 10 + turn
            kind = ("INT64", "FP64", "FP32")[turn % 3]
            found = ask(server, "matrix", tensor([number, 1], [1, 2], kind))
            assert found == (200, {"sum": [number + 1.0]})

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
