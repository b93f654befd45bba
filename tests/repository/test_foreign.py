"""Folders that hold models of other frameworks: what they are called, and what is said to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.config import RepositorySettings
from fastserve.repository.foreign import foreign_text
from fastserve.repository.layout import Layout


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
        ("model.joblib", "a pickled Python object", "options={'zipmap': False}"),
        ("model.plan", "a TensorRT engine", "the ONNX model it was built from"),
        ("resnet.onnx", "an ONNX model of another name", "rename it to m/1/model.onnx"),
    ],
)  # fmt: skip
def test_each_is_named_with_what_to_do(tmp_path: Path, path: str, what: str, to_do: str) -> None:
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


def test_nothing_is_made_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert foreign_text("m", tmp_path) == ""
