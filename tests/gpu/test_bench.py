"""The GPU benchmark's parts that need no GPU: what is missing, its requests, models and clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from bench.gpu import host, models, place
from tests.backends.frameworks.torch_models import CONFIG, net, save_script
from tests.running import Running

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "measures a CUDA device, and cannot here:" in done.stdout
    assert "CUDA" in done.stdout.splitlines()[1]
    assert "GB/s" not in done.stdout


@pytest.mark.parametrize(
    ("said", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
            "550.54.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build", "570.86.10"),
        ("something else", "unknown"),
    ],
)
def test_the_drivers_version(said: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(said)
    assert place.driver_version(tmp_path / "version") == version
    assert place.driver_version(tmp_path / "none") == "unknown"


@pytest.mark.torture
def test_the_whole_script_runs_over_a_simulated_device() -> None:
    """Every line of the table, and above it that none is a number of a GPU."""
    command = [sys.executable, "-m", "bench.gpu", "--simulated", "--seconds", "0.2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("SIMULATED: ")
    assert "None of these is a number of a GPU" in lines[0]
    whats = [line.split("|")[1].strip().rstrip("0123456789 xKB,") for line in lines[3:]]
    assert whats == [
        *["host to device from a slot"] * 3,
        "Tiny, 64 connections",
        "Tiny, device idle between batches",
        "Tiny, added p50 at one connection",
        "CUDA shared memory, a request of 6 KB and",
    ]
    assert all(line.count("|") == 5 for line in lines[1:])


def test_rows_say_whether_the_target_was_reached() -> None:
    assert host.row("a", "1", "2", True) == "| a | 1 | 2 | yes |"
    assert host.row("a", "1", "2", False).endswith("| NO |")
    assert host.middle([3, 1, 2]) == 2


def test_its_clients_ask_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_script(tmp_path / "models", net(), "net")
    (tmp_path / "models" / "net" / "model.yaml").write_text(yaml.safe_dump(CONFIG))
    data = np.zeros((1, 4), np.float32).tobytes()
    request = host.request_bytes("net", "x", "FP32", (1, 4), data, "y")
    monkeypatch.setattr(host, "START_S", 2.0)  # its clients' processes start slowly on a busy machine
    with Running(tmp_path / "models", tmp_path / "log") as served:
        assert len(host.load(served.http, request, 2, 0.3)) > 2
        monkeypatch.setattr(host, "_processes", lambda clients: 3)
        assert len(host.load(served.http, request, 7, 0.3)) > 7, "of three processes"
        wrong = host.request_bytes("other", "x", "FP32", (1, 4), data, "y")
        with pytest.raises(host.Missing, match=r"the server answered HTTP/1.1 4"):
            host.load(served.http, wrong, 1, 0.3)


def test_its_models_have_the_shapes_and_sizes() -> None:
    made = {name: kind() for name, (kind, _, _, _) in models.SHAPES.items()}
    millions = {name: sum(p.numel() for p in one.parameters()) / 1e6 for name, one in made.items()}
    assert 25 < millions["ResNet"] < 26.5
    assert 105 < millions["Bert"] < 112
    with torch.inference_mode():
        assert made["ResNet"].eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
        assert made["Bert"].eval()(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 768)
