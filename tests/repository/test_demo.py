"""The demo repository: it checks out, its models give right answers, its signatures are what they say."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from fastserve.demo import demo_repository
from fastserve.metrics import ModelReadiness, Readiness
from fastserve.repository.check import explain
from fastserve.repository.layout import Layout
from fastserve.repository.version import Version
from fastserve.server.banner import banner_text
from fastserve.settings import Listener, RepositorySettings, Settings

DEMO_BYTES = 100_000
TEXT_MODEL = "scribe"
TEXT_MODEL_BYTES = 8_000_000
TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"


def demo_version(name: str) -> Version:
    folder = Layout(RepositorySettings(repository="demo")).scan()[name]
    assert folder.config is not None
    (found,) = folder.versions.values()
    return Version(name, found.number, found.folder, folder.config)


def import_model(version: Version) -> Any:
    spec = importlib.util.spec_from_file_location(version.model, version.folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_checks_out_and_is_small() -> None:
    report = explain(RepositorySettings(repository="demo"))
    assert report.ok, report.text()
    models = [("digits", [1]), ("half_plus_two", [123]), ("scribe", [1])]
    assert [(m.name, m.versions) for m in report.models] == models
    files = [file for file in demo_repository().rglob("*") if file.is_file()]
    small = [file for file in files if TEXT_MODEL not in file.parts]
    assert sum(file.stat().st_size for file in small) < DEMO_BYTES
    assert sum(file.stat().st_size for file in files) < DEMO_BYTES + TEXT_MODEL_BYTES


def test_a_machine_without_torch_serves_all_and_says_what_cannot_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    report = explain(RepositorySettings(repository="demo"))
    assert report.ok, report.text()
    ready = Readiness(True, models={TEXT_MODEL: ModelReadiness(True)})
    told = banner_text(Settings(repository="demo"), (Listener("127.0.0.1:1"),), (), ready)
    assert "curl -N http://127.0.0.1:1/infer" in told
    assert "digits" not in told
    shutil.copytree(demo_repository() / TEXT_MODEL, tmp_path / TEXT_MODEL)
    config = tmp_path / TEXT_MODEL / "1" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    (tmp_path / TEXT_MODEL / "model.yaml").write_text("backend: text")
    text = explain(RepositorySettings(repository=str(tmp_path))).text()
    packages = "torch transformers safetensors, as fastserve's extra llm does"
    needs = f"the text backend needs torch: pip install {packages}"
    assert f"PROBLEM: version 1: hidden_act gelu does not run in numpy: {needs}" in text


def held_out() -> tuple[np.ndarray, np.ndarray]:
    found = json.loads((TESTS / "vectors/digits_test.json").read_text())
    return np.array(found["images"], np.float32), np.array(found["digits"])


def run_digits(images: np.ndarray) -> dict[str, np.ndarray]:
    """The demo's own model.py."""
    version = demo_version("digits")
    module = import_model(version)
    images.setflags(write=False)
    answers: dict[str, np.ndarray] = module.Model({"version_dir": str(version.folder)}).run({"image": images})
    return answers


def test_digits_on_held_out_images() -> None:
    images, digits = held_out()
    answers = run_digits(images)
    assert (answers["digit"] == digits).mean() >= 0.97
    assert (answers["scores"].argmax(1) == answers["digit"]).all()
    np.testing.assert_allclose(answers["scores"].sum(1), 1, rtol=1e-5)
    assert {name: one.dtype.name for name, one in answers.items()} == {"scores": "float32", "digit": "int64"}


def test_the_demo_needs_nothing_that_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("onnxruntime", "onnx", "sklearn", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, extra, None)  # importing it fails
    images, digits = held_out()
    assert (run_digits(images[:9])["digit"] == digits[:9]).mean() > 0.8
    model = import_model(demo_version("half_plus_two")).Model({})
    assert model.run({"x": np.float32([2])})["y"].tolist() == [3]


def test_the_onnx_example_is_the_same_network() -> None:
    images, _ = held_out()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(EXAMPLES / "onnx/digits/1/model.onnx", options)
    scores, digits = session.run(["scores", "digit"], {"image": images})
    answers = run_digits(images)
    assert (digits == answers["digit"]).all()
    np.testing.assert_allclose(scores, answers["scores"], rtol=1e-3, atol=1e-6)


def test_the_onnx_example_checks_out() -> None:
    report = explain(RepositorySettings(repository=str(EXAMPLES / "onnx")))
    assert report.ok, report.text()


def test_digits_signatures() -> None:
    version = demo_version("digits")
    predict, classify = version.signatures["serving_default"], version.signatures["classify"]
    assert (predict.method, classify.method) == ("predict", "classify")
    assert predict.inputs["image"].row_bytes == 256
    assert list(predict.outputs) == ["scores", "digit"]
    assert version.outputs["digit"].shape == ()
    assert classify.input_names == {"inputs": "image"}
    assert classify.features == {"image": "inputs"}
    assert classify.class_labels == tuple("0123456789")
    assert predict.class_labels == ()


def test_half_plus_two_takes_any_shape() -> None:
    version = demo_version("half_plus_two")
    model = import_model(version).Model({})
    for x in (np.float32([[1, 2], [3, 4]]), np.array(3, np.float32), np.zeros((0, 2), np.float32)):
        x.setflags(write=False)
        y = model.run({"x": x})["y"]
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, x / 2 + 2)
    assert not version.batching
    assert version.inputs["x"].shape is None
    assert {name: s.method for name, s in version.signatures.items()} == {
        "regress_x_to_y": "regress",
        "classify_x_to_y": "classify",
        "serving_default": "predict",
    }
    assert version.signatures["classify_x_to_y"].output_names == {"scores": "y"}
    assert version.signatures["regress_x_to_y"].output_names == {"outputs": "y"}
    assert version.config.labels["latest"] == 123
