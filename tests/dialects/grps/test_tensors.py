"""Models that take tensors: both paths give the same bytes on both transports, bad input gets words."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fastserve.serving.fast_path import FastPath
from tests.dialects.grps.rig import BYTES, GRPS, PREDICT, Deployed, Reply, deployed, repository_of
from tests.running import until

CODES = {"float32": "f", "float64": "d", "int64": "q", "int32": "i", "uint8": "B", "int8": "b", "int16": "h"}
MODEL = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {name.replace("x", "y"): array for name, array in inputs.items()}
"""


def write_echo(folder: Path, name: str, tensors: dict[str, tuple[str, list[int]]], **more: Any) -> None:
    """A model that gives back what it takes: x0 as y0."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(MODEL)
    inputs = {key: {"dtype": dtype, "shape": shape} for key, (dtype, shape) in tensors.items()}
    outputs = {key.replace("x", "y"): value for key, value in inputs.items()}
    config = {"backend": "python", "inputs": inputs, "outputs": outputs, "max_batch_size": 4, **more}
    (folder / name / "model.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("models")
    for dtype in CODES:
        write_echo(folder, dtype, {"x": (dtype, [2])})
    write_echo(folder, "half", {"x": ("float16", [2])})
    write_echo(folder, "text", {"x": ("bytes", [1])})
    write_echo(folder, "free", {"x": ("float32", [-1])})
    write_echo(folder, "whole", {"x": ("float32", [2])}, max_batch_size=0)
    write_echo(folder, "flags", {"x": ("bool", [1])})
    write_echo(folder, "two", {"x0": ("float32", [2]), "x1": ("int64", [1])})
    with deployed(repository_of(folder)) as opened:
        yield opened


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether the fast path took each request."""
    said: list[bool] = []
    start = FastPath.start

    def noting(self: FastPath, *request: Any) -> bool:
        said.append(start(self, *request))
        return said[-1]

    monkeypatch.setattr(FastPath, "start", noting)
    return said


def tensor(dtype: str, values: list[Any], *shape: int, name: str = "x") -> dict[str, Any]:
    return {"name": name, "dtype": f"DT_{dtype.upper()}", "shape": list(shape), f"flat_{dtype}": values}


def gtensors(*tensors: dict[str, Any], model: str = "") -> dict[str, Any]:
    return {**({"model": model} if model else {}), "gtensors": {"tensors": list(tensors)}}


def both(
    served: Deployed, monkeypatch: pytest.MonkeyPatch, body: Any, query: str, headers: Any = None
) -> tuple[Reply, Reply]:
    """The answer of the fast path where there is one, and of the general one."""
    fast = served.predict(body, query)
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "start", lambda *_: False)
        return fast, served.predict(body, query)


@pytest.mark.parametrize("dtype", CODES)
def test_json_on_both_paths(
    served: Deployed, monkeypatch: pytest.MonkeyPatch, taken: list[bool], dtype: str
) -> None:
    draw = random.Random(dtype)
    for rows in (1, 2, 4, 3):
        values: list[Any] = [draw.randrange(-100, 100) for _ in range(2 * rows)]
        if dtype.startswith("float"):
            values = [value * 1.1e-7 for value in values]
        values = [abs(value) for value in values] if dtype == "uint8" else values
        body = gtensors(tensor(dtype, values, rows, 2))
        fast, slow = both(served, monkeypatch, body, f"?model={dtype}-1")
        assert (fast.status, fast.body) == (200, slow.body)
        (answer,) = fast.json["gtensors"]["tensors"]
        assert (answer["name"], answer["shape"]) == ("y", [rows, 2])
        given = struct.unpack(
            f"<{2 * rows}{CODES[dtype]}", struct.pack(f"<{2 * rows}{CODES[dtype]}", *values)
        )
        assert list(map(float, answer[f"flat_{dtype}"])) == pytest.approx(given, rel=1e-6)
    # Of the first request a frame is made, which the others fit; the same bytes come from the general path.
    assert taken == ([True] * 3 if dtype in ("float32", "float64", "int64") else [])


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number(served: Deployed, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    raw = b'{"gtensors":{"tensors":[{"dtype":7,"shape":[1,2],"flat_float32":[%s,1]}]}}'
    for given in (text.encode(), b'"%b"' % text.encode()):
        fast, slow = both(served, monkeypatch, raw % given, "?model=float32-1")
        assert fast.body == slow.body
        assert fast.json["gtensors"]["tensors"][0]["flat_float32"] == [text, 1.0]


def test_several_tensors_in_any_order(
    served: Deployed, monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    first, second = tensor("float32", [1, 2], 1, 2, name="x0"), tensor("int64", [7], 1, 1, name="x1")
    for tensors in ((first, second), (second, first)) * 2:
        fast, slow = both(served, monkeypatch, gtensors(*tensors), "?model=two-1")
        assert (fast.status, fast.body) == (200, slow.body)
    assert taken == [True, True]
    unnamed = [{k: v for k, v in t.items() if k != "name"} for t in (first, second)]
    assert served.predict(gtensors(*unnamed), "?model=two-1").body == fast.body
    message = GRPS.GrpsMessage(model="two-1")
    for t in unnamed:
        message.gtensors.tensors.add(**t)
    told = GRPS.GrpsMessage.FromString(served.send("Predict", message.SerializeToString()))
    assert list(told.gtensors.tensors[1].flat_int64) == [7]


def test_a_frame_is_of_the_model_it_was_learned_for(served: Deployed, taken: list[bool]) -> None:
    values = [0.5, 0.25]
    for model in ("float32-1", "free-1", "whole-1") * 3:
        shape = (2,) if model == "whole-1" else (1, 2)
        reply = served.predict(gtensors(tensor("float32", values, *shape), model=model))
        assert reply.json["gtensors"]["tensors"][0]["shape"] == list(shape)
    assert taken.count(True) == 6


def test_texts_with_array_names_inside(served: Deployed) -> None:
    said = 'a "flat_float32":[1,2] and \\ and "shape":[3]'
    assert served.predict({"str_data": said}, "?model=text-1").json["str_data"] == said
    hidden = {"junk": {"flat_float32": [9, 9]}, **gtensors(tensor("float32", [1, 2], 1, 2))}
    text = json.dumps(hidden).replace('"flat_float32": [1', '"flat\\u005ffloat32": [1').encode()
    for _ in range(3):
        answer = served.predict(text, "?model=float32-1").json["gtensors"]["tensors"][0]
        assert answer["flat_float32"] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "int16"])
def test_grpc_on_both_paths(
    served: Deployed, monkeypatch: pytest.MonkeyPatch, taken: list[bool], dtype: str
) -> None:
    for turn, rows in enumerate((2, 2, 1, 4)):
        values = [turn, 1, 2, 3, 300, -1, 7, 8][: 2 * rows]
        message = GRPS.GrpsMessage(model=f"{dtype}-1")
        message.gtensors.tensors.add(**tensor(dtype, values, rows, 2))
        data = message.SerializeToString()
        fast = served.send("Predict", data)
        with monkeypatch.context() as patch:
            patch.setattr(FastPath, "start", lambda *_: False)
            assert served.send("Predict", data) == fast
        answer = GRPS.GrpsMessage.FromString(fast)
        assert answer.status.code == 200
        assert list(getattr(answer.gtensors.tensors[0], f"flat_{dtype}")) == values
    assert taken == ([] if dtype == "int16" else [True] * 3)


def test_a_message_as_long_as_a_known_one(served: Deployed) -> None:
    """Other literals are another request: another name, another model, another shape."""
    good = GRPS.GrpsMessage(model="float32-1")
    good.gtensors.tensors.add(**X)
    for _ in range(2):
        assert (
            GRPS.GrpsMessage.FromString(served.send("Predict", good.SerializeToString())).status.code == 200
        )
    for change in ({"name": "z"}, {"shape": [2, 1]}, {"dtype": "DT_INT32"}):
        other = GRPS.GrpsMessage(model="float32-1")
        other.gtensors.tensors.add(**{**X, **change})
        assert len(other.SerializeToString()) == len(good.SerializeToString())
        told = GRPS.GrpsMessage.FromString(served.send("Predict", other.SerializeToString()))
        assert told.status.code == 400, change


def test_what_is_known_is_of_the_version_it_was_learned_for(tmp_path: Path) -> None:
    """A name without its version means the latest: a new one takes over what the one before was asked."""
    write_echo(tmp_path, "net", {"x": ("float32", [2])}, version_policy="all")
    settings = repository_of(tmp_path, bare_names=True)
    with deployed(msgspec.structs.replace(settings, poll_s=0.05)) as opened:
        message = GRPS.GrpsMessage(model="net")
        message.gtensors.tensors.add(**X)
        asks = (
            lambda: opened.predict(gtensors(X, model="net")).json["gtensors"]["tensors"][0]["flat_float32"],
            lambda: list(
                GRPS.GrpsMessage.FromString(opened.send("Predict", message.SerializeToString()))
                .gtensors.tensors[0]
                .flat_float32
            ),
        )
        assert [ask() for ask in asks * 2] == [[1, 2]] * 4
        (tmp_path / "net" / "new").mkdir()
        (tmp_path / "net" / "new" / "model.py").write_text(MODEL.replace(": array for", ": 2 * array for"))
        (tmp_path / "net" / "new").rename(tmp_path / "net" / "2")
        until(lambda: opened.server.catalog.available("net", 2), "the new version serves")
        assert [ask() for ask in asks] == [[2, 4]] * 2


def test_bytes_are_rows_both_ways(
    served: Deployed, monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    data = struct.pack("<4f", 1, 2, 3, 4)
    fast = served.ask("POST", PREDICT + "?model=float32-1", data, BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "start", lambda *_: False)
        slow = served.ask("POST", PREDICT + "?model=float32-1", data, BYTES)
    assert (fast.status, fast.body, fast.headers["content-type"]) == (200, data, "application/octet-stream")
    assert slow.body == data
    assert taken == [True]
    assert served.call("Predict", model="float32-1", bin_data=data).bin_data == data
    assert served.ask("POST", PREDICT + "?model=text-1", b"\xff\x00", BYTES).body == b"\xff\x00"
    refused = served.ask("POST", PREDICT + "?model=float32-1", data[:-1], BYTES)
    assert (refused.status, refused.code) == (400, 400)
    assert "takes no bin_data of 15 bytes" in refused.message


def test_ndarray_there_and_back(served: Deployed) -> None:
    reply = served.predict({"ndarray": [[0.1, 2], [3, 1e30]]}, "?model=float32-1&return-ndarray=TRUE")
    assert reply.json["ndarray"] == [[0.1, 2.0], [3.0, 1e30]]
    assert served.predict({"ndarray": [1, 2]}, "?model=whole-1&return-ndarray=true").json["ndarray"] == [
        1.0,
        2.0,
    ]
    assert "gtensors" in served.predict({"ndarray": [[1, 2]]}, "?model=float32-1&return-ndarray=1").json


def test_a_large_ndarray(served: Deployed) -> None:
    """More values than become objects each; what is wrong with it is told all the same."""
    rows = [[0.5, n] for n in range(4)]
    assert served.predict({"ndarray": rows}, "?model=float32-1&return-ndarray=true").json["ndarray"] == rows
    text = b'{"ndarray":[[' + b"1," * 600_000 + b"1]]}"
    answer = served.predict(text, "?model=free-1").json["gtensors"]["tensors"][0]
    assert answer["shape"] == [1, 600_001]
    assert "Parse NDArray failed" in served.predict(b'{"ndarray":[[1,2],[3]]}', "?model=float32-1").message


def test_halves_and_strings(served: Deployed) -> None:
    answer = served.predict(gtensors(tensor("float16", [0.5, 65504], 1, 2)), "?model=half-1").json
    assert answer["gtensors"]["tensors"][0]["flat_float16"] == [0.5, 65504.0]
    answer = served.predict(gtensors(tensor("string", ["a", "中"], 2, 1)), "?model=text-1").json
    assert answer["gtensors"]["tensors"][0]["flat_string"] == ["a", "中"]


X = tensor("float32", [1, 2], 1, 2)
WRONG: dict[str, tuple[Any, str, str]] = {
    "no-data": ({**X, "flat_float32": []}, "float32-1", "flat_float32 is empty"),
    "other-field": ({**X, "flat_float32": None, "flat_int32": [1, 2]}, "float32-1", "flat_float32 is empty"),
    "shape": ({**X, "shape": [1, 3]}, "float32-1", "has 3 elements, flat_float32 has 2"),
    "shape-negative": ({**X, "shape": [-1, 2]}, "float32-1", "shape: given -1"),
    "shape-huge": ({**X, "shape": [4294967295] * 8}, "float32-1", "shape"),
    "dtype-unknown": ({**X, "dtype": 99}, "float32-1", "dtype: given 99"),
    "dtype-missing": ({**X, "dtype": None}, "float32-1", "dtype: given 0"),
    "dtype-other": (tensor("int32", [1, 2], 1, 2), "float32-1", "x"),
    "name": ({**X, "name": "z"}, "float32-1", "z"),
    "uint8-300": (tensor("uint8", [300, 1], 1, 2), "uint8-1", "values beyond uint8"),
    "int8-200": (tensor("int8", [200, 1], 1, 2), "int8-1", "values beyond int8"),
    "half-1e6": (tensor("float16", [1e6, 1], 1, 2), "half-1", "values beyond float16"),
    "text-in-numbers": ({**X, "flat_float32": ["one", 2]}, "float32-1", "flat_float32: given 'one'"),
    "true-in-numbers": ({**X, "flat_float32": [True, 2]}, "float32-1", "flat_float32: given a boolean"),
    "fraction": (tensor("int32", [1.5, 1], 1, 2), "int32-1", "flat_int32: given a number"),
    "beyond-int32": (tensor("int32", [2**31, 1], 1, 2), "int32-1", "allowed: -2147483648 to 2147483647"),
    "number-in-strings": (tensor("string", [1], 1, 1), "text-1", "flat_string: given a number"),
    "not-a-list": ({**X, "flat_float32": 5}, "float32-1", "flat_float32: given a number, allowed: a list"),
    "not-an-object": (5, "float32-1", "gtensors.tensors[0]: given a number"),
    "cut-forged": ({**X, "flat_float32": None, "=flat_float32": 7}, "float32-1", "is empty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors(served: Deployed, case: str) -> None:
    given, model, words = WRONG[case]
    served.predict(gtensors(X), "?model=float32-1")
    for _ in range(2):
        reply = served.predict(gtensors(given), f"?model={model}")
        assert (reply.status, reply.code, reply.json["status"]["status"]) == (400, 400, "FAILURE"), reply
        assert words in reply.message


def test_names_all_or_none(served: Deployed) -> None:
    bare = {k: v for k, v in tensor("float32", [1, 2], 1, 2).items() if k != "name"}
    for tensors, words in (
        ((X, bare), "either all tensors have names"),
        ((X, X), "same name"),
        ((bare, bare), "2 tensors without names"),
        ((), "0 tensors without names"),
    ):
        assert words in served.predict(gtensors(*tensors), "?model=float32-1").message


def test_models_without_words_for_it(served: Deployed) -> None:
    assert (
        "gmap is for customized models"
        in served.predict({"gmap": {"s_s": {"a": "b"}}}, "?model=text-1").message
    )
    assert "takes no str_data" in served.predict({"str_data": "x"}, "?model=float32-1").message
    reply = served.predict(gtensors(tensor("uint8", [1], 1, 1)), "?model=flags-1")
    assert reply.code == 400
    assert served.predict({"str_data": "x"}).message.startswith("No model is named")
    assert (
        "return-ndarray" not in served.predict({"str_data": "x"}, "?model=text-1&return-ndarray=true").message
    )


@pytest.mark.parametrize(
    "name", ["../float32-1", "float32-01x", "float32-", "-1", "float32", "float32-1/..", "a" * 5000]
)
def test_names_that_are_none(served: Deployed, name: str) -> None:
    reply = served.predict(gtensors(X, model=name))
    assert (reply.status, reply.message[:200]) == (500, f"Model {name} not found."[:200])
    assert served.call("Predict", model=name, str_data="x").status.code == 500
