"""`fastserve bench`: its histogram, its requests, and whole runs against the stand-in."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from fastserve.cli import main
from fastserve.cli.load.histogram import Histogram, bucket_of, floor_of
from fastserve.cli.load.report import duration, text
from fastserve.cli.load.requests import Target, Wish
from fastserve.cli.load.run import Outcome, share
from fastserve.cli.load.tensors import PACKED, Input, packed
from fastserve.cli.load.tfserving import TFServingRaw, TFServingRows, concrete, dtype_of, rows_body
from fastserve.cli.load.v2 import binary_request, json_body, read_input
from fastserve.cli.rest import Server
from tests.cli.standin import serving


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as found:
        yield found


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["bench", *args], prog_name="fastserve")


@given(st.integers(0, 1 << 45))
def test_bucket_holds_its_values_within_a_64th(value: int) -> None:
    low, high = floor_of(bucket_of(value)), floor_of(bucket_of(value) + 1)
    assert low <= value < high
    assert (high - low) * 64 <= max(64, high)


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=200), st.floats(0.1, 100))
def test_percentile_is_right_within_its_bucket(values: list[int], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rank = max(1, -(-len(values) * percent // 100))
    exact = sorted(values)[int(rank) - 1]
    assert histogram.total == len(values)
    assert histogram.percentile(percent) == pytest.approx(exact, rel=1 / 64, abs=1)


def test_merging_counts_everything_once() -> None:
    histogram = Histogram({5: 2})
    histogram.merge({5: 1, 900: 4})
    assert histogram.counts == {5: 3, 900: 4}


def test_share() -> None:
    assert share(10, 3) == [4, 3, 3]
    assert share(2, 8) == [1, 1]


def test_durations_read_well() -> None:
    assert [duration(ns) for ns in (7, 1500, 123456, 2e6, 3.21e9)] == [
        "7 ns",
        "1.5 us",
        "123 us",
        "2 ms",
        "3.21 s",
    ]


def test_shapes_are_filled_in() -> None:
    wish = Wish("m", rows=4, length=7)
    sizes = {"dim": [{"size": "-1"}, {"size": "3"}, {"size": "-1"}]}
    assert concrete(sizes, wish) == (4, 3, 7)
    assert concrete({"dim": [{"size": "5"}]}, wish) == (5,)
    assert concrete({"dim": [], "unknown_rank": True}, wish) == (4,)


def test_rows_of_several_inputs() -> None:
    inputs = [Input("a", "bytes", (2,)), Input("b", "int8", (2, 2))]
    body = json.loads(rows_body(inputs, Wish("m", rows=2, signature="s"), random.Random(1)))
    assert body["signature_name"] == "s"
    assert [sorted(row) for row in body["instances"]] == [["a", "b"], ["a", "b"]]
    assert "b64" in body["instances"][0]["a"]


def test_names_of_dtypes() -> None:
    names = {"DT_FLOAT": "float32", "DT_STRING": "bytes", "DT_UINT8": "uint8", "DT_BFLOAT16": "bfloat16"}
    assert {name: dtype_of(name) for name in names} == names


def test_packed_tensors() -> None:
    rng = random.Random(1)
    for dtype, code in PACKED.items():
        assert len(packed(Input("x", dtype, (2, 3)), rng)) == 6 * struct.calcsize(f"<{code}")
    assert len(packed(Input("x", "bfloat16", (3,)), rng)) == 6
    text = packed(Input("x", "bytes", (2,)), rng)
    assert (struct.unpack("<I", text[:4]), len(text)) == ((12,), 32)


def test_v2_bodies() -> None:
    inputs = [Input("a", "float32", (1, 2)), Input("b", "bytes", (1,))]
    tensors = json.loads(json_body(inputs, random.Random(1)))["inputs"]
    assert [(one["name"], one["shape"], one["datatype"], len(one["data"])) for one in tensors] == [
        ("a", [1, 2], "FP32", 2),
        ("b", [1], "BYTES", 1),
    ]
    request = binary_request("/p", inputs, random.Random(1))
    length = int(request.headers["Inference-Header-Content-Length"])
    header = json.loads(request.body[:length])
    assert [one["parameters"]["binary_data_size"] for one in header["inputs"]] == [8, 16]
    assert len(request.body) == length + 24
    assert b"Inference-Header-Content-Length: %d\r\n" % length in request.encode("h:1")


def test_open_dimensions_of_v2() -> None:
    wish = Wish("m", rows=4, length=7)
    described = {"name": "x", "datatype": "INT64", "shape": ["-1", "-1", "3"]}
    assert read_input(described, wish, batching=True) == Input("x", "int64", (4, 7, 3))
    assert read_input(described, wish, batching=False) == Input("x", "int64", (7, 7, 3))


def test_requests_of_both_protocols(url: str) -> None:
    rows = TFServingRows().requests(Target(Server(url)), Wish("double", rows=2))
    assert len({request.body for request in rows}) == len(rows) == 16
    assert [len(row) for row in json.loads(rows[0].body)["instances"]] == [3, 3]
    raw = TFServingRaw().requests(Target(Server(url)), Wish("double", rows=2))
    assert len(struct.unpack("<6f", raw[0].body)) == 6
    assert raw[0].encode("h:1").startswith(b"POST /v1/models/double:predict HTTP/1.1\r\nHost: h:1\r\n")


@pytest.mark.parametrize("protocol", ["tfserving", "tfserving-raw"])
def test_whole_run(url: str, protocol: str) -> None:
    options = ["-c", "3", "--processes", "2", "-d", "0.6", "--warm-up", "0", "--protocol", protocol, "--json"]
    result = run("double", "--url", url, *options)
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert report["statuses"] == {"200": report["requests"]}
    assert report["requests"] > 10
    assert 0 < report["p50_us"] <= report["p99_us"] <= report["p99.9_us"]
    assert report["faults"] == {}


def test_failures_are_counted_and_tell_in_the_exit_code(url: str) -> None:
    result = run("broken", "--url", url, "-c", "2", "-d", "0.6", "--warm-up", "0")
    assert result.exit_code == 1
    assert "status 500  " in result.stdout


def test_unknown_signature(url: str) -> None:
    result = run("double", "--url", url, "--signature", "other")
    assert result.exit_code == 1
    assert "double has no signature other; it has serving_default" in result.output


def test_text_report() -> None:
    histogram = Histogram()
    for value in (100_000, 100_000, 400_000):
        histogram.add(value)
    lines = list(text(Outcome(histogram, {"200": 3}, {"timed out": 1}, 30, 2.0)))
    assert lines[0] == "requests   3 in 2.0 s: 1.5/s"
    assert "FAILED  timed out: 1" in lines
    assert sum("#" in line for line in lines) == 2
