"""MLflow's scoring protocol: each form of a request, replies, errors, and whose paths are whose."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from fastserve._ext.flatten import unpack_bytes
from fastserve.dialects import mlflow
from fastserve.dialects.mlflow import MOST_CELLS, MOST_VALUES, InputReader, write_predictions
from fastserve.errors import ServeError
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import Version
from fastserve.request import InferResponse
from fastserve.settings import Listener
from fastserve.tensor import DTYPES, Tensor
from tests.server.rig import KILL, Served, run, serving, write_model

HERE = (Listener("127.0.0.1:0", ("mlflow", "tfserving")),)
ROWS = [[1.0, 2.0], [3.0, 4.5]]
DOUBLED = {"predictions": [[2.0, 4.0], [6.0, 9.0]]}
NUMBERS = {"a": ("float64", []), "b": ("float64", [])}
MIXED = {"age": ("float64", []), "city": ("bytes", []), "n": ("int64", [1])}


def version_of(inputs: dict[str, tuple[str, list[int]]], backend: str = "python") -> Version:
    tensors = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in inputs.items()}
    outputs = {"y": {"dtype": "float64", "shape": []}}
    config = {"backend": backend, "inputs": tensors, "outputs": outputs, "max_batch_size": 8}
    return Version("m", 1, Path(), parse_model_config(config))


def values(tensor: Tensor) -> list[Any]:
    if tensor.dtype.name == "bytes":
        return unpack_bytes(tensor.data, math.prod(tensor.shape))
    codes = {"float32": "f", "float64": "d", "int64": "q"}
    return memoryview(tensor.data).cast("B").cast(codes[tensor.dtype.name]).tolist()


def read(version: Version, body: object) -> tuple[dict[str, tuple[tuple[int, ...], list[Any]]], bool]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    tensors, is_table = InputReader(version).read_json(raw)
    return {name: (one.shape, values(one)) for name, one in tensors.items()}, is_table


def refused(version: Version, body: object) -> str:
    with pytest.raises(ServeError) as fault:
        read(version, body)
    return fault.value.message


RECORDS = [{"a": 1.5, "b": 2}, {"a": 3.5, "b": 4}]
SPLIT = {"index": [0, 1], "columns": ["b", "a"], "data": [[2, 1.5], [4, 3.5]]}
BY_COLUMN = {"a": ((2,), [1.5, 3.5]), "b": ((2,), [2.0, 4.0])}


@pytest.mark.parametrize(
    ("body", "is_table"),
    [
        ({"dataframe_split": SPLIT}, True),
        ({"dataframe_split": {"columns": SPLIT["columns"], "data": SPLIT["data"]}}, True),
        ({"dataframe_records": RECORDS}, True),
        ({"instances": RECORDS}, False),
        ({"inputs": {"a": [1.5, 3.5], "b": [2, 4]}}, False),
    ],
)
def test_each_form_is_read_by_the_compiled_reader(
    body: object, is_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "parse", lambda *_, **__: pytest.fail("read value by value"))
    assert read(version_of(NUMBERS), body) == (BY_COLUMN, is_table)


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_split": {**SPLIT, "index": ["r1", "r2"]}},
        {"dataframe_split": {**SPLIT, "columns": ["b", "a", "c"], "data": [[2, 1.5, "x"], [4, 3.5, None]]}},
        {"dataframe_records": [{**one, "other": "text"} for one in RECORDS]},
        {"dataframe_records": RECORDS, "params": {}},
        {"params": None, "dataframe_split": SPLIT},
        {"inputs": RECORDS},
    ],
)
def test_other_bodies_give_the_same(body: object) -> None:
    assert read(version_of(NUMBERS), body)[0] == BY_COLUMN


def test_columns_of_several_types_and_missing_values() -> None:
    version = version_of(MIXED)
    wanted = {"age": ((2,), [31.0, math.nan]), "city": ((2,), [b"Linz", b""]), "n": ((2, 1), [5, -(2**60)])}
    rows = [{"age": 31, "city": "Linz", "n": 5}, {"age": None, "city": None, "n": -(2**60)}]
    split = {"columns": ["n", "age", "city"], "data": [[r["n"], r["age"], r["city"]] for r in rows]}
    inputs = {"age": [31, math.nan], "city": ["Linz", ""], "n": [5, -(2**60)]}
    for body in (
        {"dataframe_records": rows},
        {"dataframe_split": split},
        {"instances": rows},
        {"inputs": inputs},
    ):
        assert str(read(version, body)[0]) == str(wanted)  # a NaN is no other NaN's equal
    table = b"n,city,age\n5,Linz,31\n-1152921504606846976,,NA\n"
    tensors, _ = InputReader(version).read_csv(table)
    assert str({name: (one.shape, values(one)) for name, one in tensors.items()}) == str(wanted)


def test_a_matrix_has_its_columns_in_the_order_sent() -> None:
    version = version_of({"input": ("float32", [2])})
    wanted = {"input": ((2, 2), [1.0, 2.0, 3.0, 4.5])}
    for body in (
        {"dataframe_split": {"columns": ["p", "q"], "data": ROWS}},
        {"dataframe_split": {"columns": [0, 1], "data": ROWS}},
        {"dataframe_records": [{"p": 1, "q": 2}, {"q": 4.5, "p": 3}]},
        {"instances": ROWS},
        {"inputs": ROWS},
        {"inputs": {"input": ROWS}},
    ):
        assert read(version, body)[0] == wanted
    tensors, is_table = InputReader(version).read_csv(b'"p","q, r"\r\n1,2\r\n3,4.5\r\n')
    assert {name: (one.shape, values(one)) for name, one in tensors.items()} == wanted
    assert is_table


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([1], "the body is no object"),
        ({}, "the body has none of the forms; allowed: an object with one of dataframe_split,"),
        ({"inputs": {}, "instances": []}, "the body has instances, inputs; allowed"),
        ({"inputs": {"a": [1], "b": [1]}, "params": {"k": 1}}, "params: given values, allowed: none"),
        ({"inputs": [[1, 2]]}, "inputs: given values without names, wanted: a, b"),
        ({"dataframe_split": {"columns": ["a"], "data": [[1]]}}, "columns: missing b; wanted: a, b"),
        ({"dataframe_split": {"columns": ["a", "a"], "data": [[1, 1]]}}, "columns: a name is given twice"),
        ({"dataframe_split": {"columns": ["a", "b"], "data": [[1]]}}, "rows of another length than columns"),
        ({"dataframe_split": {"columns": ["a", "b"], "data": [[1, 2], ["x"]]}}, "data[1]: allowed: a list"),
        ({"dataframe_split": [1]}, "dataframe_split: allowed: an object with columns"),
        ({"dataframe_records": {"a": [1]}}, "dataframe_records: allowed: a list of objects"),
        ({"dataframe_records": [{"a": 1, "b": 1}, {"a": 1}]}, "dataframe_records[1]: allowed: an object"),
        ({"dataframe_records": [{"a": 1, "b": "x"}]}, "dataframe_records: b: "),
        (b'{"inputs": ', "the body cannot be read: "),
        (b'{"dataframe_split": {}', "the body cannot be read: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: object, told: str) -> None:
    assert told in refused(version_of(NUMBERS), body)


def test_names_of_columns_are_made_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB hold millions of them: none for a table that is refused by its width, or that is one input."""

    def unpack(data: object, count: int) -> list[bytes]:
        raise AssertionError(f"{count} names")

    monkeypatch.setattr(mlflow, "unpack_bytes", unpack)
    table = {"dataframe_split": {"columns": ["a", "b"], "data": [[1], [2]]}}
    assert "rows of another length than columns, 2" in refused(version_of(NUMBERS), table)
    table["dataframe_split"]["data"] = [[1, 2]]
    matrix = version_of({"x": ("float64", [-1])})
    assert read(matrix, table) == ({"x": ((1, 2), [1.0, 2.0])}, True)
    with pytest.raises(AssertionError, match="2 names"):
        read(version_of(NUMBERS), table)


def test_mixed_tables_are_bounded_and_columns_are_not() -> None:
    many = MOST_VALUES // 3
    records = {"dataframe_records": [{"age": 1, "city": "x", "n": 1}] * many}
    records["dataframe_records"].append({"age": None, "city": "x", "n": 1})
    assert f"up to {MOST_VALUES} values are read" in refused(version_of(MIXED), records)
    by_column = {"inputs": {"age": [1] * many, "city": ["x"] * many, "n": [1] * many}}
    assert read(version_of(MIXED), by_column)[0]["city"] == ((many,), [b"x"] * many)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"a\n1\n", "columns: missing b; wanted: a, b"),
        (b"a,b\n1,2\n3\n", "line 3: given 1 cells, allowed: 2"),
        (b"a,b\n1,x\n", "b, lines 2 to 2: given what is no float64"),
        (b"", "columns: missing a, b"),
        (b"a,b\n\xff,1\n", "the body is not UTF-8"),
    ],
)
def test_what_is_wrong_with_csv_is_named(text: bytes, told: str) -> None:
    with pytest.raises(ServeError) as fault:
        InputReader(version_of(NUMBERS)).read_csv(text)
    assert told in fault.value.message


def test_a_table_in_csv_is_bounded() -> None:
    reader = InputReader(version_of({"input": ("float64", [4])}))
    rows = MOST_CELLS // 4
    tensors, _ = reader.read_csv(b"a,b,c,d\n" + b"1,,3,4\n" * rows)
    assert tensors["input"].shape == (rows, 4)
    with pytest.raises(ServeError, match="text/csv: allowed: 1048576 cells"):
        reader.read_csv(b"a,b,c,d\n" + b"1,,3,4\n" * (rows + 1))


def test_long_csv_is_the_same_numbers() -> None:
    numbers = [(random.Random(1).uniform(-9, 9), float(n)) for n in range(5000)]
    text = "b,skipped,a\n" + "".join(f"{b!r},text,{a!r}\n" for a, b in numbers)
    tensors, _ = InputReader(version_of(NUMBERS)).read_csv(text.encode())
    assert list(zip(values(tensors["a"]), values(tensors["b"]), strict=True)) == numbers


def test_predictions_are_mlflows() -> None:
    single = Tensor(DTYPES["float32"], (2,), memoryview(b"\xcd\xcc\xcc=\x00\x00\x80?"))
    labels = Tensor(DTYPES["bytes"], (2,), b'\x02\x00\x00\x00no\x04\x00\x00\x00\xc3\xa4"x')
    response = InferResponse({"p": single, "kind": labels})

    def written(names: list[str], **how: bool) -> Any:
        return json.loads(write_predictions(response, names, **how))["predictions"]

    assert written(["p"], named=False, by_row=True) == [0.10000000149011612, 1.0]
    assert written(["kind"], named=False, by_row=False) == ["no", 'ä"x']
    assert written(["p", "kind"], named=True, by_row=False) == {
        "p": [0.10000000149011612, 1],
        "kind": ["no", 'ä"x'],
    }
    assert written(["p", "kind"], named=True, by_row=True) == [
        {"p": 0.10000000149011612, "kind": "no"}, {"p": 1, "kind": 'ä"x'}
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, mlflow.PIECE - 1, mlflow.PIECE, 2 * mlflow.PIECE + 1])
def test_predictions_of_many_float32_are_all_there(count: int) -> None:
    rng = random.Random(count)
    numbers = array("f", [rng.random() for _ in range(count)])
    response = InferResponse({"y": Tensor(DTYPES["float32"], (count,), memoryview(numbers).cast("B"))})
    written = write_predictions(response, ["y"], named=False, by_row=False)
    assert json.loads(written) == {"predictions": numbers.tolist()}


# ---- over HTTP


async def invoke(served: Served, body: object, path: str = "/invocations", **headers: str) -> tuple[int, Any]:
    client = await served.client()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "x", "Content-Length": str(len(raw)), "Content-Type": "application/json", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    client.writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw)
    status, reply = await client.page()
    client.writer.close()
    return status, json.loads(reply)


def test_the_only_model_answers_invocations(tmp_path: Path) -> None:
    write_model(tmp_path)
    csv = b"p,q\n1,2\n3,4.5\n"

    async def work() -> None:
        async with serving(tmp_path, http=HERE) as served:
            for path in ("/invocations", "/endpoints/twice/invocations"):
                split = {"dataframe_split": {"columns": ["p", "q"], "data": ROWS}}
                assert await invoke(served, split, path) == (200, DOUBLED)
            assert await invoke(served, {"inputs": ROWS}) == (200, DOUBLED)
            assert await invoke(served, csv, **{"Content-Type": "text/csv; charset=utf-8"}) == (200, DOUBLED)
            packed = gzip.compress(b'{"instances": [[1, 2], [3, 4.5]]}')
            assert await invoke(served, packed, **{"Content-Encoding": "gzip"}) == (200, DOUBLED)
            status, said = await invoke(served, {"inputs": [[1.0]]})
            assert (status, said["error_code"]) == (400, "BAD_REQUEST")
            assert "x" in said["message"]
            status, said = await invoke(served, b"{}", **{"Content-Type": "image/png"})
            assert (status, said["message"]) == (400, "content-type: allowed: application/json, text/csv")
            status, said = await invoke(served, {"inputs": ROWS}, "/endpoints/none/invocations")
            assert (status, said["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")

    run(work())


def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_model(tmp_path, "thrice", parameters={"add": 1})

    async def work() -> None:
        async with serving(tmp_path, http=HERE) as served:
            status, said = await invoke(served, {"inputs": ROWS})
            assert (status, said["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
            assert "dialect_options.mlflow.model" in said["message"]
            assert await invoke(served, {"inputs": ROWS}, "/endpoints/twice/invocations") == (200, DOUBLED)
        options = {"mlflow": {"model": "twice"}}
        async with serving(tmp_path, http=HERE, dialect_options=options) as served:
            assert await invoke(served, {"inputs": ROWS}) == (200, DOUBLED)

    run(work())


def test_a_worker_that_dies_and_64_clients(tmp_path: Path) -> None:
    write_model(tmp_path, max_queue_rows=256)

    async def work() -> None:
        async with serving(tmp_path, http=HERE) as served:
            status, said = await invoke(served, {"inputs": [[KILL, 0.0]]})
            assert (status, said["error_code"]) == (503, "TEMPORARILY_UNAVAILABLE")

            async def ask(number: int) -> None:
                body = {"dataframe_split": {"columns": ["p", "q"], "data": [[number, 0.5]] * 3}}
                for _ in range(600):
                    status, said = await invoke(served, body)
                    if status == 200:
                        break
                    assert status == 503, said
                    await asyncio.sleep(0.05)
                assert said == {"predictions": [[2.0 * number, 1.0]] * 3}

            await asyncio.gather(*(ask(number) for number in range(1, 65)))

    run(work())


@pytest.mark.parametrize("other", ["textgen", "tfserving"])
def test_probes(tmp_path: Path, other: str) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, http=(Listener("127.0.0.1:0", ("mlflow", other)),)) as served:
            client = await served.client()
            for path in ("/ping", "/health"):
                status, body = await client.get(path)
                assert status == 200
                if other == "textgen":
                    assert body != b"\n"  # these paths are its own
                else:
                    assert body == b"\n"
            if other == "tfserving":
                status, body = await client.get("/version")
                assert (status, body) == (200, mlflow.__version__.encode())

    run(work())
