"""Folders that hold models of other frameworks: what they are called, and what is said to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.backends.registry import BackendEntry
from fastserve.repository.check import explain
from fastserve.repository.folder_config import foreign_text
from fastserve.repository.layout import Layout, ModelFolder
from fastserve.settings import RepositorySettings


def without_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackendEntry, "installed", property(lambda entry: not entry.framework))


@pytest.mark.parametrize(
    ("path", "what", "to_do"),
    [
        ("saved_model.pb", "m/1 is a TensorFlow SavedModel",
         "python -m tf2onnx.convert --saved-model m/1 --output m/1/model.onnx"),
        ("model.savedmodel/saved_model.pb", "m/1/model.savedmodel is a TensorFlow SavedModel",
         "python -m tf2onnx.convert --saved-model m/1/model.savedmodel --output m/1/model.onnx"),
        ("net.h5", "m/1/net.h5 is a Keras model",
         "python -m tf2onnx.convert --keras m/1/net.h5 --output m/1/model.onnx"),
        ("net.keras", "a Keras model", "--saved-model saved --output m/1/model.onnx"),
        ("model.pt", "a PyTorch model", "torch.onnx.export(model, (x,), 'm/1/model.onnx'"),
        ("model.pth", "a PyTorch model", "dynamic_axes={'x': {0: 'rows'}}"),
        ("net.joblib", "a pickled Python object", "parameters: {trust_pickle: true}"),
        ("model.plan", "a TensorRT engine", "the ONNX model it was built from"),
        ("net.lgb", "m/1/net.lgb is a LightGBM model", "rename it to m/1/model.txt"),
        ("net.cbm", "a CatBoost model", "rename it to m/1/model.cbm"),
        ("xgboost.json", "m/1/xgboost.json is an XGBoost model", "to m/1/model.json or model.ubj"),
        ("net.ubj", "an XGBoost model", "(model_file='m/1/net.ubj').save_model('m/1/model.ubj')"),
        ("resnet.onnx", "an ONNX model of another name", "rename it to m/1/model.onnx"),
    ],
)  # fmt: skip
def test_each_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, what: str, to_do: str
) -> None:
    without_frameworks(monkeypatch)
    file = tmp_path / "m" / "1" / path
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    told = foreign_text("m", tmp_path / "m" / "1")
    assert what in told
    assert to_do in told
    assert str(tmp_path) not in told
    assert Layout(RepositorySettings(repository=str(tmp_path))).scan()["m"].error == told


def test_beside_a_config_it_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "model.yaml").write_text("backend: onnx\n")
    (tmp_path / "m" / "1" / "saved_model.pb").write_bytes(b"x")
    (note,) = Layout(RepositorySettings(repository=str(tmp_path))).scan()["m"].notes
    assert note.startswith("version 1: no model.onnx; m/1 is a TensorFlow SavedModel")


def test_a_saved_model_without_tensorflow_says_what_to_install_and_how_to_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_frameworks(monkeypatch)
    saved = write_saved_model(tmp_path)
    assert saved.error == (
        "m/1 is a TensorFlow SavedModel, which needs TensorFlow to run: "
        "pip install tensorflow, as fastserve's extra tensorflow does, or convert it: "
        "python -m tf2onnx.convert --saved-model m/1 --output m/1/model.onnx"
    )
    (tmp_path / "m" / "model.yaml").write_text("backend: tensorflow\n")
    report = explain(RepositorySettings(repository=str(tmp_path)))
    assert report.models[0].problems == [
        "the tensorflow backend needs tensorflow: "
        "pip install tensorflow, as fastserve's extra tensorflow does, or convert the model: "
        "python -m tf2onnx.convert --saved-model N --output N/model.onnx"
    ]


@pytest.mark.parametrize("file", ["saved_model.pb", "saved_model.pbtxt"])
def test_a_saved_model_with_tensorflow_needs_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(BackendEntry, "installed", property(lambda entry: True))
    saved = write_saved_model(tmp_path, file)
    assert (saved.error, saved.notes, list(saved.versions)) == ("", [], [1])
    assert saved.config is not None
    assert saved.config.backend == "tensorflow"


def test_new_variables_are_a_new_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackendEntry, "installed", property(lambda entry: True))
    before = write_saved_model(tmp_path).versions[1].stamp
    (tmp_path / "m" / "1" / "variables").mkdir()
    (tmp_path / "m" / "1" / "variables" / "variables.index").write_bytes(b"x")
    assert Layout(RepositorySettings(repository=str(tmp_path))).scan()["m"].versions[1].stamp != before


def write_saved_model(root: Path, file: str = "saved_model.pb") -> ModelFolder:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / file).write_bytes(b"x")
    return Layout(RepositorySettings(repository=str(root))).scan()["m"]


def test_nothing_is_made_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert foreign_text("m", tmp_path) == ""
