"""`fastserve bench` against a real server, over every protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from click.testing import CliRunner, Result

from fastserve.cli import main
from fastserve.cli.bench import PROTOCOLS
from tests.dialects.kserve.client_models import write_kinds, write_sums
from tests.running import Running

uvloop.run(asyncio.sleep(0))  # libuv opens its pipe with the process's first loop, for good

TENSORS = [name for name in PROTOCOLS if name != "tfserving-raw"]
V2 = [name for name in PROTOCOLS if name.startswith("v2")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("bench") / "models"
    folder.mkdir()
    write_sums(folder)
    write_kinds(folder)
    with Running(folder, folder.parent / "log") as running:
        yield running


def bench(served: Running, model: str, protocol: str, *options: str) -> Result:
    where = ["--url", served.http, "--grpc", served.grpc, "--protocol", protocol]
    given = ["bench", model, *where, "-c", "3", "-d", "0.2", "--warm-up", "0.1", "--json", *options]
    return CliRunner().invoke(main, given)


@pytest.mark.parametrize("protocol", TENSORS)
def test_every_protocol(served: Running, protocol: str) -> None:
    result = bench(served, "simple", protocol, "--rows", "2")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["statuses"] == {"OK" if "grpc" in protocol else "200": report["requests"]}
    assert report["requests"] > 10
    assert report["faults"] == {}
    assert 0 < report["p50_us"] <= report["p99_us"] <= report["p99.9_us"]
    assert served.alive


@pytest.mark.parametrize("protocol", [name for name in V2 if name != "v2"])
def test_every_datatype(served: Running, protocol: str) -> None:
    result = bench(served, "types", protocol, "--length", "5")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] > 5


@pytest.mark.parametrize("protocol", V2)
def test_what_cannot_be_asked_is_said_before_the_load(served: Running, protocol: str) -> None:
    result = bench(served, "nope", protocol)
    assert result.exit_code == 1
    assert "unknown model: 'nope' is not found" in result.output


def test_what_has_no_json_form(served: Running) -> None:
    result = bench(served, "types", "v2")
    assert result.exit_code == 1
    assert "IN_FP16 has no JSON form; use --protocol v2-binary" in result.output


@pytest.mark.parametrize("protocol", ["v2", "v2-binary", "v2-grpc"])
def test_refused_requests_are_counted(served: Running, protocol: str) -> None:
    """More rows than a Triton model's max_batch_size."""
    result = bench(served, "simple", protocol, "--rows", "9")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert list(report["statuses"]) == ["INVALID_ARGUMENT" if "grpc" in protocol else "400"]


def test_a_body_of_ones_own(served: Running, tmp_path: Path) -> None:
    row = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"inputs": [{"name": f"INPUT{n}", **row} for n in (0, 1)]}))
    assert bench(served, "sums", "v2", "--data", str(file)).exit_code == 0
    assert "--data" in bench(served, "sums", "v2-binary", "--data", str(file)).output


def test_nobody_at_the_grpc_address(served: Running) -> None:
    result = bench(served, "simple", "v2-grpc", "--grpc", "127.0.0.1:1")
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)["statuses"]) == ["UNAVAILABLE"]
