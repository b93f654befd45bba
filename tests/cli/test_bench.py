"""`fastserve bench`: its figures, its requests, and whole runs against the stand-in."""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import uvloop
from click import ClickException
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from fastserve.cli import main
from fastserve.cli.bench import (
    PROTOCOLS,
    LoadInput,
    LoadOptions,
    LoadProtocol,
    LoadResult,
    fill_shape,
    read_input,
    report,
    show_duration,
)
from fastserve.cli.client import ServerClient
from fastserve.tensor import DTYPES
from tests.cli.standin import serving

uvloop.run(asyncio.sleep(0))  # libuv opens its pipe with the process's first loop, for good


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as found:
        yield found


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["bench", *args], prog_name="fastserve")


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=200), st.floats(0.1, 100))
def test_a_percentile_is_the_latency_at_its_rank(values: list[int], percent: float) -> None:
    result = LoadResult(array("q", values))
    rank = sum(n * 100 < percent * len(values) for n in range(1, len(values)))
    assert result.percentile(percent) == pytest.approx(sorted(values)[rank], abs=1)
    assert result.mean() == pytest.approx(sum(values) / len(values))


def test_nothing_counted_has_no_latency() -> None:
    assert (LoadResult().percentile(99), LoadResult().mean(), LoadResult().rate) == (0, 0, 0)


def test_durations_read_well() -> None:
    assert [show_duration(ns) for ns in (7, 1500, 123456, 2e6, 3.21e9)] == [
        "7 ns",
        "1.5 us",
        "123 us",
        "2 ms",
        "3.21 s",
    ]


def options(**more: Any) -> LoadOptions:
    return LoadOptions(ServerClient("http://127.0.0.1:1"), "m", **{"rows": 4, "length": 7, **more})


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_shapes_are_filled_in() -> None:
    sizes = {"dim": [{"size": "-1"}, {"size": "3"}, {"size": "-1"}]}
    assert fill_shape(sizes, options()) == (4, 3, 7)
    assert fill_shape({"dim": [{"size": "5"}]}, options()) == (5,)
    assert fill_shape({"dim": [], "unknown_rank": True}, options()) == (4,)


def described(protocol: str, *inputs: LoadInput) -> LoadProtocol:
    return PROTOCOLS[protocol]._replace(describe=lambda options: list(inputs))


def test_rows_of_several_inputs() -> None:
    inputs = LoadInput("a", "bytes", (2,)), LoadInput("b", "int8", (2, 2))
    body = json.loads(described("tfserving", *inputs).bodies(options(signature="s"))[0][0])
    assert body["signature_name"] == "s"
    assert [sorted(row) for row in body["instances"]] == [["a", "b"], ["a", "b"]]
    assert "b64" in body["instances"][0]["a"]


def test_packed_tensors_have_their_dtypes_size() -> None:
    for dtype in DTYPES.values():
        if dtype.item_bytes and not dtype.name.startswith("complex"):
            assert len(LoadInput("x", dtype.name, (2, 3)).pack(rng())) == 6 * dtype.item_bytes
    text = LoadInput("x", "bytes", (2,)).pack(rng())
    assert (struct.unpack("<I", text[:4]), len(text)) == ((12,), 32)
    with pytest.raises(ClickException):
        LoadInput("x", "complex64", (1,)).pack(rng())


def test_v2_bodies() -> None:
    inputs = LoadInput("a", "float32", (1, 2)), LoadInput("b", "bytes", (1,))
    tensors = json.loads(described("v2", *inputs).bodies(options())[0][0])["inputs"]
    assert [(one["name"], one["shape"], one["datatype"], len(one["data"])) for one in tensors] == [
        ("a", [1, 2], "FP32", 2),
        ("b", [1], "BYTES", 1),
    ]
    binary = described("v2-binary", *inputs)
    body, length = binary.bodies(options())[0]
    header = json.loads(body[:length])
    assert [one["parameters"]["binary_data_size"] for one in header["inputs"]] == [8, 16]
    assert len(body) == length + 24
    sent = binary.encode(options(), "h:1", body, length)
    assert b"Inference-Header-Content-Length: %d\r\n" % length in sent


def test_open_dimensions_of_v2() -> None:
    tensor = {"name": "x", "datatype": "INT64", "shape": ["-1", "-1", "3"]}
    assert read_input(tensor, options(), batching=True) == LoadInput("x", "int64", (4, 7, 3))
    assert read_input(tensor, options(), batching=False) == LoadInput("x", "int64", (7, 7, 3))


def test_requests_of_tensorflow_serving(url: str) -> None:
    asked = LoadOptions(ServerClient(url), "double", rows=2)
    rows = [body for body, _ in PROTOCOLS["tfserving"].bodies(asked)]
    assert len(set(rows)) == len(rows) == 16
    assert [len(row) for row in json.loads(rows[0])["instances"]] == [3, 3]
    raw = PROTOCOLS["tfserving-raw"]
    body = raw.bodies(asked)[0]
    assert len(struct.unpack("<6f", body[0])) == 6
    head = b"POST /v1/models/double:predict HTTP/1.1\r\nHost: h:1\r\n"
    assert raw.encode(asked, "h:1", *body).startswith(head)


@pytest.mark.parametrize("protocol", ["tfserving", "tfserving-raw"])
def test_whole_run(url: str, protocol: str) -> None:
    flags = ["-c", "3", "-d", "0.3", "--warm-up", "0", "--protocol", protocol, "--json"]
    result = run("double", "--url", url, *flags)
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert report["statuses"] == {"200": report["requests"]}
    assert report["requests"] > 10
    assert 0 < report["p50_us"] <= report["p99_us"] <= report["p99.9_us"]
    assert report["faults"] == {}


def test_failures_are_counted_and_tell_in_the_exit_code(url: str) -> None:
    result = run("broken", "--url", url, "-c", "2", "-d", "0.3", "--warm-up", "0")
    assert result.exit_code == 1
    assert "status 500  " in result.stdout


def test_unknown_signature(url: str) -> None:
    result = run("double", "--url", url, "--signature", "other")
    assert result.exit_code == 1
    assert "double has no signature other; it has serving_default" in result.output


def test_text_report() -> None:
    result = LoadResult(
        array("q", (100_000, 100_000, 400_000)), Counter({"200": 3}), Counter({"timed out": 1})
    )
    result.body_bytes, result.seconds = 30, 2.0
    lines = list(report(result))
    assert lines[0] == "requests   3 in 2.0 s: 1.5/s"
    assert "FAILED  timed out: 1" in lines
    assert sum("#" in line for line in lines) == 2
