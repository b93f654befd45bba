"""The reported place of each instance and its reason, and the types of instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastserve.devices.inventory import DeviceInventory, VisibleDevice
from fastserve.errors import ConfigError
from fastserve.repository.check import describe_places
from fastserve.repository.model_config import config_json, parse_model_config
from fastserve.repository.triton_config.reading import parse_triton_text as parse_config
from fastserve.repository.triton_config.reading import to_model_config
from fastserve.workers.group import place_worker
from tests.devices.test_placement import GIB, TRITON_CONFIG, two

__all__ = ["two"]


# --- why ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({}, ["instance 0 on the CPU (devices: cpu, the default)"]),
        ({"instances": 2}, ["instances 0, 1 on the CPU (devices: cpu, the default)"]),
        (
            {"devices": "auto"},
            [
                "instance 0 on GPU 0 (Test, 8.0 GiB) (devices: auto, and it can use a GPU)",
                "instance 1 on GPU 1 (Test, 16.0 GiB) (devices: auto, and it can use a GPU)",
            ],
        ),
        (
            {"devices": ["cuda:1", "cpu"], "instances": 2},
            [
                "instances 0, 2 on GPU 1 (Test, 16.0 GiB) (devices: cuda:1)",
                "instances 1, 3 on the CPU (devices: cpu)",
            ],
        ),
        (
            {"devices": ["cuda:0=bfloat16", "cpu=float32"], "backend": "torch"},
            [
                "instance 0 on GPU 0 (Test, 8.0 GiB), in bfloat16 (devices: cuda:0=bfloat16)",
                "instance 1 on the CPU, in float32 (devices: cpu=float32)",
            ],
        ),
    ],
)
def test_why_of_a_model_yaml(two: DeviceInventory, config: dict[str, Any], lines: list[str]) -> None:
    sides = {side: {"x": {"dtype": "int32", "shape": [1]}} for side in ("inputs", "outputs")}
    made = parse_model_config({"backend": "python", **sides, **config})
    assert describe_places(made, Path("nowhere"), two) == lines


@pytest.mark.parametrize(
    ("groups", "lines"),
    [
        (
            "instance_group [ { kind: KIND_CPU count: 2 }, { gpus: [ 1 ] } ]",
            [
                "instances 0, 1 on the CPU (instance_group[0]: KIND_CPU)",
                "instance 2 on GPU 1 (Test, 16.0 GiB) "
                "(instance_group[1]: KIND_AUTO, gpus [1], and it can use a GPU)",
            ],
        ),
        (
            "instance_group { kind: KIND_GPU count: 2 gpus: [ 0, 1 ] }",
            [
                "instances 0, 2 on GPU 0 (Test, 8.0 GiB) (instance_group[0]: KIND_GPU, gpus [0, 1])",
                "instances 1, 3 on GPU 1 (Test, 16.0 GiB) (instance_group[0]: KIND_GPU, gpus [0, 1])",
            ],
        ),
    ],
)
def test_why_of_a_config_pbtxt(two: DeviceInventory, tmp_path: Path, groups: str, lines: list[str]) -> None:
    (tmp_path / "config.pbtxt").write_text(TRITON_CONFIG + groups)
    config = to_model_config(parse_config(TRITON_CONFIG + groups, "m"))
    assert describe_places(config, tmp_path, two) == lines
    assert describe_places(config, tmp_path / "nowhere", two)[0].endswith("and it can use a GPU)")


def test_why_nothing_is_on_a_gpu(two: DeviceInventory, tmp_path: Path) -> None:
    two._devices = []
    config = to_model_config(parse_config(TRITON_CONFIG + "instance_group { count: 1 }", "m"))
    (tmp_path / "config.pbtxt").write_text(TRITON_CONFIG + "instance_group { count: 1 }")
    told = describe_places(config, tmp_path, two)
    assert told == ["instance 0 on the CPU (instance_group[0]: KIND_AUTO, and there is no GPU)"]


def test_names_of_the_environment_are_told(
    two: DeviceInventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77,3")
    two._devices = [VisibleDevice(0, "u", "Test", GIB, "MIG-77"), VisibleDevice(1, "v", "Test", GIB, "3")]
    sides = {side: {"x": {"dtype": "int32", "shape": [1]}} for side in ("inputs", "outputs")}
    made = parse_model_config({"backend": "python", **sides, "devices": "cuda"})
    of = ", of CUDA_VISIBLE_DEVICES=MIG-77,3"
    assert describe_places(made, tmp_path, two) == [
        f"instance 0 on GPU 0 (Test, 1.0 GiB), the MIG instance MIG-77{of} (devices: cuda)",
        f"instance 1 on GPU 1 (Test, 1.0 GiB){of} (devices: cuda)",
    ]


# --- types ------------------------------------------------------------------------------------------------


def test_each_instance_has_a_type_of_its_own(two: DeviceInventory) -> None:
    sides = {side: {"x": {"dtype": "float32", "shape": [1]}} for side in ("inputs", "outputs")}
    written = {"backend": "torch", **sides, "devices": ["cuda:0=bfloat16", "cpu=float16", "cpu"]}
    config = config_json(parse_model_config({**written, "torch": {"dtype": "float32", "file": "a.pt"}}))
    told = [place_worker(config, number, {})[0].get("torch") for number in range(3)]
    assert told == [{**config["torch"], "dtype": "bfloat16"}, {**config["torch"], "dtype": "float16"}, None]
    assert config["torch"]["file"] == "a.pt"


@pytest.mark.parametrize(
    ("backend", "devices", "words"),
    [
        ("torch", "cpu=int8", 'devices: given "int8", allowed: float32, bfloat16, float16'),
        ("python", "cpu=float32", "only torch has types"),
        ("torch", ["cpu="], 'devices: given "", allowed: float32'),
    ],
)
def test_types_that_are_none(two: DeviceInventory, backend: str, devices: Any, words: str) -> None:
    sides = {side: {"x": {"dtype": "float32", "shape": [1]}} for side in ("inputs", "outputs")}
    with pytest.raises(ConfigError, match=words):
        parse_model_config({"backend": backend, **sides, "devices": devices})


TORCH_CONFIG = """
backend: "pytorch" max_batch_size: 4
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
instance_group [ { name: "fast" kind: KIND_GPU gpus: [ 1 ] }, { name: "plain" kind: KIND_CPU } ]
"""


@pytest.mark.parametrize(
    ("parameters", "dtypes"),
    [
        ({}, ["", ""]),
        ({"dtype": "bfloat16"}, ["bfloat16", "bfloat16"]),
        ({"dtype.fast": "float16"}, ["float16", ""]),
        ({"dtype": "bfloat16", "dtype.plain": "float32"}, ["bfloat16", "float32"]),
    ],
)
def test_types_of_a_config_pbtxt(two: DeviceInventory, parameters: dict[str, str], dtypes: list[str]) -> None:
    lines = [f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
    config = to_model_config(parse_config(TORCH_CONFIG + "\n".join(lines), "m"))
    assert (config.fault, [place.dtype for place in config.places]) == ("", dtypes)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("dtype.slow", "float16", 'given "slow", allowed: a group\'s name: fast, plain'),
        ("dtype", "int8", 'given "int8", allowed: float32, bfloat16, float16'),
    ],
)
def test_types_of_a_config_pbtxt_that_are_none(
    two: DeviceInventory, key: str, value: str, words: str
) -> None:
    line = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    assert words in to_model_config(parse_config(TORCH_CONFIG + line, "m")).fault
    plain = to_model_config(parse_config(TRITON_CONFIG + line, "m"))
    assert plain.fault == "", "a Python model's parameters are its own"
