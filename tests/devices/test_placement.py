"""Which worker computes on which GPU: what configs ask for, what machines have, and what workers are told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastserve.backends.registry import BACKENDS, find_backend
from fastserve.devices.inventory import DeviceInventory, VisibleDevice, find_devices
from fastserve.engine.loader import DeviceBudget
from fastserve.errors import ConfigError, ServeError
from fastserve.repository import placement
from fastserve.repository.check import describe_places
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.placement import Placement, place_on, why_no_gpu
from fastserve.repository.triton_config import completion, validation
from fastserve.repository.triton_config.reading import parse_triton_text as parse_config
from fastserve.repository.triton_config.reading import to_model_config
from tests.devices.simulated import FakeGpus
from tests.dialects.kserve import client_models
from tests.faults.rig import Http, tensor
from tests.running import Running

WHERE = """
import os

class Model:
    def __init__(self, config):
        self.told = f"{config['device']} {os.environ.get('CUDA_VISIBLE_DEVICES')}".encode()
    def run(self, inputs):
        import numpy as np
        return {"OUT": np.array([self.told], dtype=object)}
"""
TRITON_WHERE = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        names = ("model_instance_kind", "model_instance_device_id", "model_instance_name")
        self.told = " ".join([*(args[n] for n in names), os.environ.get("CUDA_VISIBLE_DEVICES", "-")])
    def execute(self, requests):
        told = np.array([self.told.encode()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", told)]) for _ in requests]
"""
TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
TRITON_CONFIG = 'backend: "python"' + TENSORS
UUID = "GPU-fa4ecada-0000-4000-8000-000000000001"
GIB = 1 << 30


def machine(*gib: int) -> DeviceInventory:
    """One with GPUs of so much memory."""
    made = DeviceInventory()
    made._devices = [VisibleDevice(n, f"u{n}", "Test", size * GIB, f"GPU-u{n}") for n, size in enumerate(gib)]
    return made


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> DeviceInventory:
    """A machine with two GPUs, for whoever reads configs here."""
    made = machine(8, 16)
    for module in ("fastserve.repository.model_config", completion, validation):
        target = sys.modules[module] if isinstance(module, str) else module
        monkeypatch.setattr(target, "MACHINE", made)
    monkeypatch.setattr("fastserve.repository.triton_config.reading.MACHINE", made)
    return made


def gpus_of(places: Sequence[Placement]) -> list[int]:
    return [place.gpu for place in places]


# --- what a machine has -----------------------------------------------------------------------------------


def test_devices_are_found_without_becoming_one_of_cudas_processes(gpus: FakeGpus) -> None:
    found = find_devices({**os.environ, **gpus.environment})
    assert [(one.number, one.name, one.memory_bytes) for one in found] == [
        (0, "Fake GPU 0", 8 * GIB),
        (1, "Fake GPU 1", 9 * GIB),
    ]
    assert [one.select for one in found] == [f"GPU-fa4ecada-0000-4000-8000-{n:012d}" for n in (0, 1)]
    assert found[1].title == "GPU 1 (Fake GPU 1, 9.0 GiB)"
    assert "libcuda" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("visible", "names", "selects"),
    [
        ("1", ["Fake GPU 1"], ["1"]),
        ("1,0", ["Fake GPU 1", "Fake GPU 0"], ["1", "0"]),
        (
            "GPU-fa4ecada-0000-4000-8000-000000000001",
            ["Fake GPU 1"],
            ["GPU-fa4ecada-0000-4000-8000-000000000001"],
        ),
        ("0,9,1", ["Fake GPU 0"], ["0"]),
        ("", [], []),
        ("-1", [], []),
    ],
)
def test_what_the_server_is_shown_is_what_there_is(
    gpus: FakeGpus, visible: str, names: list[str], selects: list[str]
) -> None:
    """Workers are shown devices by the names that the server was shown them by, as MIG instances have no
    other."""
    found = find_devices({**os.environ, **gpus.environment, "CUDA_VISIBLE_DEVICES": visible})
    assert ([one.name for one in found], [one.select for one in found]) == (names, selects)


def test_a_driver_that_breaks_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that ends the process that asks it."""
    source = tmp_path / "broken.c"
    source.write_text("#include <stdlib.h>\nint cuInit(unsigned flags) { abort(); }\n")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-o", library, source], check=True
    )
    full = tmp_path / "full"
    full.mkdir()
    assert find_devices({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) == []  # lacks what it needs
    assert find_devices({**os.environ, "LD_LIBRARY_PATH": str(full)}) == []


# --- what a model.yaml asks for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "count", "gpus"),
    [
        ("cuda", 1, [0, 1]),
        ("cuda", 2, [0, 1, 0, 1]),
        ("cuda:1", 2, [1, 1]),
        (["cuda:1", "cpu"], 1, [1, -1]),
        (["cuda:0", "cuda:0"], 1, [0, 0]),
        ("auto", 1, [0, 1]),
        ("cpu", 2, [-1, -1]),
    ],
)
def test_devices_of_a_model_yaml(devices: Any, count: int, gpus: list[int]) -> None:
    found = place_on(devices, count, BACKENDS["python"], machine(8, 8))
    assert gpus_of(found) == gpus
    for place in found:
        on_gpu = place.gpu >= 0
        assert (place.device, place.visible) == (
            ("cuda:0", "GPU-u0,GPU-u1" if place.gpu == 0 else "GPU-u1,GPU-u0") if on_gpu else ("cpu", "")
        )


@pytest.mark.parametrize(
    ("devices", "have", "words"),
    [
        ("cuda", [], 'devices: given "cuda", allowed: cpu, auto: there is no GPU'),
        ("cuda:0", [], 'devices: given "cuda:0", allowed: cpu, auto: there is no GPU'),
        ("cuda:2", [8, 8], 'devices: given "cuda:2", allowed: cpu, auto, cuda, cuda:0, cuda:1'),
        ("tpu", [8], 'devices: given "tpu", allowed: cpu, cuda, cuda:N, or auto by itself, each with =dtype'),
        (
            "simulated",
            [8],
            'devices: given "simulated", allowed: cpu, cuda, cuda:N, or auto by itself, each with =dtype',
        ),
        (
            ["auto", "cpu"],
            [8],
            'devices: given "auto", allowed: cpu, cuda, cuda:N, or auto by itself, each with =dtype',
        ),
        ([], [8], "devices: given [], allowed: at least one device"),
    ],
)
def test_devices_that_are_not_there(devices: Any, have: list[int], words: str) -> None:
    with pytest.raises(ValueError, match="devices: given") as caught:
        place_on(devices, 1, BACKENDS["python"], machine(*have))
    assert str(caught.value) == words


def test_auto_goes_where_the_framework_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_gpu(BACKENDS["python"], machine()) == "there is no GPU"
    assert why_no_gpu(BACKENDS["python"], machine(8)) == ""
    assert why_no_gpu(find_backend("mine.fast:Net"), machine(8)) == ""
    assert "grps backend computes on the CPU" in why_no_gpu(BACKENDS["grps"], machine(8))
    for name in ("torch", "onnx"):
        monkeypatch.setattr(placement, "_is_for_cuda", lambda *args: False)
        assert "CUDA" in why_no_gpu(BACKENDS[name], machine(8))
        monkeypatch.setattr(placement, "_is_for_cuda", lambda *args: True)
        assert why_no_gpu(BACKENDS[name], machine(8)) == ""
    assert gpus_of(place_on("auto", 2, BACKENDS["grps"], machine(8))) == [-1, -1]


def test_the_whole_config(two: DeviceInventory) -> None:
    written = {"backend": "python", "inputs": {"x": {"dtype": "int32", "shape": [1]}}}
    written |= {"outputs": written["inputs"], "devices": "cuda", "instances": 3, "device_memory_mb": 512}
    config = parse_model_config(written)
    assert (config.instances, gpus_of(config.places)) == (6, [0, 1, 0, 1, 0, 1])
    assert {place.bytes for place in config.places} == {512 << 20}
    assert describe_places(config, Path("nowhere"), two) == [
        "instances 0, 2, 4 on GPU 0 (Test, 8.0 GiB) (devices: cuda)",
        "instances 1, 3, 5 on GPU 1 (Test, 16.0 GiB) (devices: cuda)",
    ]
    with pytest.raises(ConfigError, match="instances: given 66, allowed: up to 64 on all of its devices"):
        parse_model_config({**written, "instances": 33})
    with pytest.raises(ConfigError, match=r"model.yaml: devices: given \"cuda:2\""):
        parse_model_config({**written, "devices": "cuda:2"})


# --- what a config.pbtxt asks for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "gpus", "shown"),
    [
        ("", [0, 1], [("KIND_GPU", 1, [0, 1])]),
        ("instance_group { kind: KIND_AUTO count: 2 }", [0, 1, 0, 1], [("KIND_GPU", 2, [0, 1])]),
        ("instance_group { kind: KIND_GPU gpus: [ 1 ] count: 2 }", [1, 1], [("KIND_GPU", 2, [1])]),
        ("instance_group { gpus: [ 1 ] }", [1], [("KIND_GPU", 1, [1])]),
        (
            "instance_group [ { kind: KIND_CPU count: 2 }, { kind: KIND_GPU } ]",
            [-1, -1, 0, 1],
            [("KIND_CPU", 2, []), ("KIND_GPU", 1, [0, 1])],
        ),
        ("instance_group { kind: KIND_MODEL count: 2 }", [], [("KIND_MODEL", 2, [])]),
        ("instance_group { kind: KIND_CPU }", [], [("KIND_CPU", 1, [])]),
    ],
)
def test_instance_groups(
    two: DeviceInventory, groups: str, gpus: list[int], shown: list[tuple[str, int, list[int]]]
) -> None:
    config = to_model_config(parse_config(TRITON_CONFIG + groups, "m"))
    assert (config.fault, gpus_of(config.places)) == ("", gpus)
    assert config.triton is not None
    told = [(g["kind"], g["count"], g.get("gpus", [])) for g in config.triton["instance_group"]]
    assert told == shown
    assert config.instances == (len(gpus) or shown[0][1])


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("instance_group { kind: KIND_GPU gpus: [ 2 ] }", "instance_group[0].gpus: given 2, allowed: 0 or 1"),
        (
            "instance_group { gpus: [ 0, 7 ] }",
            "instance_group[0].gpus: given 0, allowed: nothing: there is no GPU",
        ),
    ],
)
def test_groups_on_gpus_that_are_not_there(two: DeviceInventory, groups: str, words: str) -> None:
    if "7" in groups:
        two._devices = []
    assert words in to_model_config(parse_config(TRITON_CONFIG + groups, "m")).fault


def test_kind_gpu_without_a_gpu(two: DeviceInventory) -> None:
    two._devices = []
    config = to_model_config(parse_config(TRITON_CONFIG + "instance_group { kind: KIND_GPU }", "m"))
    assert "instance_group[0].kind" in config.fault
    assert "there is no GPU" in config.fault
    config = to_model_config(parse_config(TRITON_CONFIG, "m"))
    assert (config.fault, config.places, config.instances) == ("", [], 1)


# --- budgets ----------------------------------------------------------------------------------------------


def test_two_models_compete_for_a_device() -> None:
    budget = DeviceBudget(machine(8, 8).devices, 0.5)
    first, second = Placement("cuda:0", 0, "", 3 * GIB), Placement("cuda:0", 1, "", 3 * GIB)
    budget.take([first, second])
    with pytest.raises(ServeError) as caught:
        budget.take([Placement("cuda:0", 1, "", 2 * GIB), Placement()])
    assert caught.value.message == (
        "its workers claim 2048 MB of GPU 1 (Test, 8.0 GiB) (device_memory_mb), of whose 4096 MB for models "
        "3072 are claimed already (device_memory_share)"
    )
    budget.take([Placement("cuda:0", 1, "", GIB)])
    budget.give_back([second])
    budget.take([second])
    budget.take([Placement("cuda:0", 1), Placement()])  # these claim nothing


# --- through a server -------------------------------------------------------------------------------------


def write_where(folder: Path, name: str, **config: Any) -> None:
    sides = {
        "inputs": {"IN": {"dtype": "int32", "shape": [1]}},
        "outputs": {"OUT": {"dtype": "bytes", "shape": [1]}},
    }
    client_models.write_native(folder, name, WHERE, max_batch_size=0, **sides, **config)


def told(http: Http, model: str) -> set[str]:
    """Return the answers of all workers of a model, which is asked often enough."""
    body = {"inputs": [tensor("IN", [1], [1])]}
    answers = [http.post(f"/v2/models/{model}/infer", body) for _ in range(60)]
    assert {answer.error for answer in answers} == {""}
    return {answer.json()["outputs"][0]["data"][0] for answer in answers}


def test_workers_see_their_own_device_first(gpus: FakeGpus, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    names = [f"GPU-fa4ecada-0000-4000-8000-{n:012d}" for n in (0, 1)]
    write_where(models, "second", devices="cuda:1")
    write_where(models, "own", devices="cuda:1", env={"CUDA_VISIBLE_DEVICES": "7"})
    write_where(models, "plain")
    write_where(models, "claims", devices="cuda:0", device_memory_mb=5000)
    write_where(models, "claims_more", devices="cuda:0", device_memory_mb=5000)
    group = "instance_group { kind: KIND_GPU gpus: [ 1 ] }"
    client_models.write_triton(models, "groups", TRITON_WHERE, TENSORS + group)
    client_models.write_triton(models, "auto", TRITON_WHERE, TENSORS)
    with gpus.here():
        checked = subprocess.run(
            [sys.executable, "-m", "fastserve.cli", "check", str(models), "--no-load"],
            capture_output=True,
            check=False,
        )
        report = checked.stdout.decode()
        with Running(models, tmp_path / "log", "--keep-going") as running, Http(running) as http:
            assert told(http, "second") == {f"cuda:0 {names[1]},{names[0]}"}
            assert told(http, "own") == {"cuda:0 7"}
            assert told(http, "plain") == {"cpu None"}
            assert told(http, "groups") == {f"GPU 0 groups_0_0 {names[1]},{names[0]}"}
            shown = http.ask("GET", "/v2/models/auto/config").json()["instance_group"][0]
            assert (shown["kind"], shown["gpus"]) == ("KIND_GPU", [0, 1])
            index = {one["name"]: one for one in http.post("/v2/repository/index", {}).json()}
            states = sorted(index[name]["state"] for name in ("claims", "claims_more"))
            assert states == ["READY", "UNAVAILABLE"]
            reason = next(one["reason"] for one in index.values() if "reason" in one)
            assert "claim 5000 MB of GPU 0 (Fake GPU 0, 8.0 GiB)" in reason
    first, second = "GPU 0 (Fake GPU 0, 8.0 GiB)", "GPU 1 (Fake GPU 1, 9.0 GiB)"
    for line in (
        f"instance 0 on {second} (devices: cuda:1)",
        "but CUDA_VISIBLE_DEVICES=7 in env is what the workers see",
        "instance 0 on the CPU (devices: cpu, the default)",
        f"instance 0 on {second} (instance_group[0]: KIND_GPU, gpus [1])",
        f"instance 0 on {first} (no instance_group: KIND_AUTO, every GPU, and it can use a GPU)",
        f"instance 1 on {second} (no instance_group: KIND_AUTO, every GPU, and it can use a GPU)",
    ):
        assert line in report


def test_check_says_why_not(tmp_path: Path) -> None:
    write_where(tmp_path, "auto", devices="auto")
    write_where(tmp_path, "gpu", devices="cuda")
    checked = subprocess.run(
        [sys.executable, "-m", "fastserve.cli", "check", str(tmp_path), "--no-load"],
        capture_output=True,
        check=False,
    )
    report = checked.stdout.decode()
    assert "instance 0 on the CPU (devices: auto, and there is no GPU)" in report
    assert 'devices: given "cuda", allowed: cpu, auto: there is no GPU' in report
    assert checked.returncode == 1
