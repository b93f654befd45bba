"""Folders of Triton's form, as the layout finds them and as they fail to load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fastserve.repository.check import explain
from fastserve.repository.layout import Layout, ModelFolder
from fastserve.repository.version import VersionState
from fastserve.settings import PolicyChoice, RepositorySettings
from tests.repository.folders import Stage, write_config, write_version

TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
MODEL = "class TritonPythonModel: pass\n"


def write_pbtxt(root: Path, name: str, text: str) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(text)


def scan(root: Path, name: str = "m") -> ModelFolder:
    return Layout(RepositorySettings(repository=str(root))).scan()[name]


def test_a_python_model(tmp_path: Path) -> None:
    policy = "version_policy { specific { versions: [1, 3] } }"
    write_pbtxt(tmp_path, "m", 'backend: "python"' + TENSORS + policy)
    for number in (1, 2, 3):
        write_version(tmp_path, "m", number, MODEL)
    found = scan(tmp_path)
    assert found.error == ""
    assert sorted(found.versions) == [1, 2, 3]
    assert found.config is not None
    assert found.config.backend == "triton_python"
    assert found.config.version_policy == PolicyChoice(specific=[1, 3])


def test_the_model_file_may_have_another_name(tmp_path: Path) -> None:
    text = 'default_model_filename: "net.py"' + TENSORS
    write_pbtxt(tmp_path, "m", text)
    write_version(tmp_path, "m", 1, MODEL)
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "net.py").write_text(MODEL)
    found = scan(tmp_path)
    assert sorted(found.versions) == [2]
    assert found.notes == ["version 1: no net.py"]
    assert found.config is not None
    assert found.config.triton is not None
    assert found.config.triton["backend"] == "python"  # by the file's name, since no backend is given


def test_model_defaults_say_how_it_is_run_and_nothing_else(tmp_path: Path) -> None:
    write_pbtxt(tmp_path, "m", 'backend: "python" max_batch_size: 64' + TENSORS)
    write_version(tmp_path, "m", 1, MODEL)
    (tmp_path / "bare" / "1").mkdir(parents=True)
    (tmp_path / "bare" / "1" / "model.py").write_text(MODEL)
    defaults = {"run_timeout_ms": 250, "max_queue_rows": 7, "max_batch_size": 3, "env": {"A": "b"}}
    defaults["isolate_failures"] = False
    found = Layout(RepositorySettings(repository=str(tmp_path), model_defaults=defaults)).scan()
    for name, rows in (("m", 64), ("bare", 0)):
        config = found[name].config
        assert config is not None
        assert (config.run_timeout_ms, config.env, config.max_batch_size) == (250, {"A": "b"}, rows)
        assert not config.isolate_failures
    assert found["m"].config is not None
    assert found["m"].config.max_queue_rows == 1024  # seven rows could not hold a batch
    wrong = RepositorySettings(repository=str(tmp_path), model_defaults={"run_timeout_ms": -1})
    assert "model_defaults: run_timeout_ms: given -1" in Layout(wrong).scan()["m"].error


def test_a_file_name_cannot_lead_out(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(MODEL)
    root = tmp_path / "root"
    write_pbtxt(root, "m", 'backend: "python" default_model_filename: "../../../outside.py"' + TENSORS)
    (root / "m" / "1").mkdir()
    assert scan(root).error == (
        'config.pbtxt: default_model_filename: given "../../../outside.py", '
        "allowed: a path inside the version's folder"
    )


def test_an_ensemble_needs_no_file(tmp_path: Path) -> None:
    write_pbtxt(
        tmp_path,
        "m",
        'platform: "ensemble" ' + TENSORS + "ensemble_scheduling { step { model_name: 'a' model_version: -1"
        " input_map { key: 'X' value: 'IN' } output_map { key: 'Y' value: 'OUT' } } }",
    )
    (tmp_path / "m" / "1").mkdir()
    found = scan(tmp_path)
    assert found.error == ""
    assert sorted(found.versions) == [1]


def test_without_any_config(tmp_path: Path) -> None:
    write_version(tmp_path, "m", 1, "import x\n" + MODEL)
    found = scan(tmp_path)
    assert found.config is not None
    assert (found.config.backend, found.config.inputs) == ("triton_python", {})


def test_model_yaml_wins(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_pbtxt(tmp_path, "m", "nonsense")
    write_version(tmp_path, "m", 1)
    found = scan(tmp_path)
    assert found.config is not None
    assert (found.config.backend, found.config.triton) == ("python", None)


def test_faults_are_told(tmp_path: Path) -> None:
    write_pbtxt(tmp_path, "m", 'backend: "python" colour: 3')
    write_version(tmp_path, "m", 1, MODEL)
    assert scan(tmp_path).error.startswith("config.pbtxt: line 1, column 19: unknown field 'colour', allowed")


def test_a_config_is_read_again_when_it_changes(tmp_path: Path) -> None:
    write_pbtxt(tmp_path, "m", 'backend: "python"' + TENSORS)
    write_version(tmp_path, "m", 1, MODEL)
    layout = Layout(RepositorySettings(repository=str(tmp_path)))
    first = layout.scan()["m"].config
    assert layout.scan()["m"].config is first
    write_pbtxt(tmp_path, "m", 'backend: "python" max_batch_size: 2' + TENSORS)
    second = layout.scan()["m"].config
    assert second is not None
    assert second.max_batch_size == 2


def test_what_cannot_run_fails_as_a_version(tmp_path: Path) -> None:
    write_pbtxt(tmp_path, "m", 'backend: "nosuchbackend"' + TENSORS)
    write_version(tmp_path, "m", 1)
    stage = Stage(tmp_path, keep_going=True)

    async def run() -> None:
        await stage.repository.open()
        await stage.repository.close()

    asyncio.run(run())
    version = stage.catalog.models["m"].versions[1]
    assert version.state is VersionState.END
    assert version.error is not None
    assert version.error.message == (
        "Invalid argument: unable to find backend library for backend 'nosuchbackend', "
        "try specifying runtime on the model configuration."
    )
    assert stage.hooks.events == []


def test_check_explains(tmp_path: Path) -> None:
    write_pbtxt(tmp_path, "m", 'backend: "python" max_batch_size: 4 dynamic_batching { }' + TENSORS)
    write_version(tmp_path, "m", 1, "class Model: pass\n")
    write_pbtxt(tmp_path, "bad", 'backend: "python" instance_group { kind: KIND_GPU }' + TENSORS)
    write_version(tmp_path, "bad", 1, MODEL)
    text = explain(RepositorySettings(repository=str(tmp_path))).text()
    assert "  scheduling: dynamic batching, up to 0 microseconds\n" in text
    assert "  PROBLEM: version 1: model.py has no class 'TritonPythonModel'\n" in text
    assert '  PROBLEM: Invalid argument: instance_group[0].kind: given "KIND_GPU", allowed: ' in text


@pytest.mark.parametrize("given", ["", 'backend: "onnxruntime"', 'platform: "onnxruntime_onnx"'])
def test_an_onnx_model_tells_its_tensors(tmp_path: Path, given: str) -> None:
    pytest.importorskip("onnx")
    from tests.repository.triton_config.test_onnx_graph import write_model

    write_pbtxt(tmp_path, "m", given)
    write_model(
        tmp_path / "m" / "1" / "model.onnx", {"x": (1, ["N", 4])}, {"y": (8, ["N", "K"]), "z": (7, ["N"])}
    )
    config = scan(tmp_path).config
    assert config is not None
    assert (config.backend, config.fault) == ("onnx", "")
    assert config.max_batch_size == 4
    assert config.inputs["x"].shape == [4]
    assert config.outputs["y"].shape == [-1]
    assert config.outputs["z"].shape == [1]
    assert config.triton is not None
    assert config.triton["input"][0]["data_type"] == "TYPE_FP32"
    assert config.triton["output"][1]["reshape"] == {"shape": []}
    assert config.triton["instance_group"] == [
        config.triton["instance_group"][0] | {"name": "m", "kind": "KIND_CPU", "count": 2}
    ]
