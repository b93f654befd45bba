"""GPUs as NVML tells of them: on the metrics page, on the operator's page, and when it stops telling."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fastserve.devices.inventory import Gpus
from tests.devices.simulated import FakeGpus
from tests.faults.rig import Http
from tests.running import Running, until

UUID = "GPU-fa4ecada-0000-4000-8000-00000000000"


@pytest.fixture
def library(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.setenv("FAKE_CUDA", str(gpus.memory))
    monkeypatch.setattr("fastserve.devices.inventory._FRESH_S", 0.0)
    return Gpus(str(gpus.libraries / "libnvidia-ml.so.1"))


def test_what_is_told(library: Gpus) -> None:
    first, second = library.read()
    assert (first.uuid, first.name) == (f"{UUID}0", "Fake GPU 0")
    assert (first.utilization, first.memory_used_bytes, first.memory_total_bytes) == (0.25, 1 << 30, 8 << 30)
    assert (first.power_w, first.power_limit_w, first.energy_j) == (70.5, 700.0, 123.456)
    assert (second.utilization, second.power_w, second.energy_j) == (None, None, None)


def test_a_driver_that_stops_telling(library: Gpus, gpus: FakeGpus) -> None:
    """A GPU that is lost, as NVML says it: nothing is shown, and shown again when it is back."""
    assert len(library.read()) == 2
    (gpus.memory / "nvml").write_text("15")
    try:
        assert library.read() == []
    finally:
        (gpus.memory / "nvml").unlink()
    assert len(library.read()) == 2


def test_one_that_is_lost_hides_no_other(library: Gpus, gpus: FakeGpus) -> None:
    """It has fallen off the bus, or a container may not look at it."""
    for code in ("15", "4"):
        (gpus.memory / "nvml-second").write_text(code)
        try:
            assert [one.name for one in library.read()] == ["Fake GPU 0"]
        finally:
            (gpus.memory / "nvml-second").unlink()
    assert len(library.read()) == 2


def test_nobody_waits_for_the_latest(library: Gpus) -> None:
    assert library.latest() == []
    until(lambda: len(library.latest()) == 2, "somebody has looked")
    until(lambda: "gpus" not in {thread.name for thread in threading.enumerate()}, "the look is over")


def test_without_the_library() -> None:
    none = Gpus("libnothing-of-that-name.so.1")
    assert none.read() == []
    assert none.latest() == []
    assert "gpus" not in {thread.name for thread in threading.enumerate()}


def test_on_both_pages(served: Running, http: Http) -> None:
    page = http.ask("GET", "/metrics").body.decode()
    assert f'nv_gpu_utilization{{gpu_uuid="{UUID}0"}} 0.25' in page
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="{UUID}1"}} {9 << 30}' in page
    assert f'nv_gpu_memory_used_bytes{{gpu_uuid="{UUID}0"}} {1 << 30}' in page
    assert f'nv_gpu_power_usage{{gpu_uuid="{UUID}0"}} 70.5' in page
    assert f'nv_gpu_power_limit{{gpu_uuid="{UUID}0"}} 700' in page
    assert f'nv_energy_consumption{{gpu_uuid="{UUID}0"}} 123.456' in page
    assert f'nv_gpu_utilization{{gpu_uuid="{UUID}1"}}' not in page, "it does not tell"
    until(lambda: len(http.ask("GET", "/console/numbers").json()["devices"]) == 3, "the page has them too")
    devices = http.ask("GET", "/console/numbers").json()["devices"]
    assert [(one["name"], one["utilization"]) for one in devices[1:]] == [
        ("Fake GPU 0 GPU-fa4ecada", 0.25),
        ("Fake GPU 1 GPU-fa4ecada", None),
    ]


def test_stages(served: Running, http: Http) -> None:
    body = {
        "inputs": [
            {"name": f"INPUT{n}", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for n in (0, 1)
        ]
    }
    assert http.post("/v2/models/sums/infer", body).status == 200
    page = http.ask("GET", "/metrics").body.decode()
    for stage in ("queue", "copy_in", "compute", "copy_out"):
        assert f'fastserve_{stage}_duration_seconds_count{{model="sums",version="1"}}' in page
    model = next(
        one for one in http.ask("GET", "/console/numbers").json()["models"] if one["model"] == "sums"
    )
    assert [one["stage"] for one in model["stages"]] == [
        "decode", "queue", "copy-in", "compute", "copy-out", "encode",
    ]  # fmt: skip


def test_without_a_gpu_nothing_is_shown(models: Path, tmp_path: Path) -> None:
    with Running(models, tmp_path / "log") as running, Http(running) as http:
        assert b"nv_gpu" not in http.ask("GET", "/metrics").body
        assert [one["name"] for one in http.ask("GET", "/console/numbers").json()["devices"]] == ["cpu"]
