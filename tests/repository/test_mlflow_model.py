"""Folders that MLflow has written: what is read of an MLmodel, and what is said where it cannot be served."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.backends.registry import BackendEntry
from fastserve.errors import ConfigError
from fastserve.repository.check import explain
from fastserve.repository.layout import Layout, ModelFolder
from fastserve.repository.mlflow_model import find_mlflow
from fastserve.repository.single_model import find_single
from fastserve.settings import RepositorySettings

DIGITS = Path(__file__).parents[2] / "examples/onnx/digits"
SKLEARN = """\
flavors:
  python_function:
    env:
      conda: conda.yaml
      virtualenv: python_env.yaml
    loader_module: mlflow.sklearn
    model_path: model.pkl
    predict_fn: predict
    python_version: 3.11.7
  sklearn:
    code: null
    pickled_model: model.pkl
    serialization_format: cloudpickle
    sklearn_version: 1.9.1
    skops_trusted_types: null
is_signature_from_type_hint: false
mlflow_version: 3.17.2
model_id: null
model_size_bytes: 867
model_uuid: e347ac2b8a58438da8af1eaaf77e9fb1
signature:
  inputs: '[{"type": "double", "name": "sepal length (cm)", "required": true}, {"type":
    "double", "name": "petal width (cm)", "required": true}]'
  outputs: '[{"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1]}}]'
  params: null
utc_time_created: '2026-11-25 00:34:13.588682'
"""
TENSOR = '[{"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 4]}}]'
COLUMNS = ["sepal length (cm)", "petal width (cm)"]


@pytest.fixture(autouse=True)
def frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a framework is run here."""
    monkeypatch.setattr(BackendEntry, "installed", property(lambda entry: True))


def write(folder: Path, text: str, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "MLmodel").write_text(text)
    for file in files:
        (folder / file).write_bytes(b"x")
    return folder


def of_flavor(name: str, **fields: object) -> str:
    generic = {"loader_module": f"mlflow.{name}", "python_version": "3.11.7"}
    return yaml.safe_dump({"flavors": {"python_function": generic, name: fields}, "mlflow_version": "3.17.2"})


def scanned(root: Path, **more: Any) -> ModelFolder:
    return Layout(RepositorySettings(repository=str(root), **more)).scan()["m"]


@pytest.mark.parametrize(
    ("flavor", "fields", "backend", "file", "parameters"),
    [
        ("sklearn", {"pickled_model": "model.skops", "serialization_format": "skops"}, "sklearn",
         "model.skops", {"outputs": ["predictions"]}),
        ("xgboost", {"data": "model.ubj", "model_class": "xgboost.sklearn.XGBClassifier"}, "xgboost",
         "model.ubj", {"outputs": ["labels"], "best_iteration": True}),
        ("xgboost", {"data": "model.json", "model_class": "xgboost.sklearn.XGBRegressor"}, "xgboost",
         "model.json", {"outputs": ["predictions"], "best_iteration": True}),
        ("xgboost", {"data": "model.xgb"}, "xgboost", "model.xgb", {"outputs": ["predictions"]}),
        ("lightgbm", {"data": "model.lgb", "model_class": "lightgbm.basic.Booster"}, "lightgbm", "model.lgb",
         {"outputs": ["predictions"]}),
        ("lightgbm", {"data": "model.pkl", "model_class": "lightgbm.sklearn.LGBMClassifier"}, "sklearn",
         "model.pkl", {"outputs": ["predictions"]}),
        ("catboost", {"data": "model.cb", "model_type": "CatBoostClassifier", "save_format": "cbm"},
         "catboost", "model.cb", {"outputs": ["predictions"]}),
        ("catboost", {"data": "model.cb", "model_type": "CatBoost", "save_format": "cbm"},
         "catboost", "model.cb", {"outputs": ["margins"]}),
    ],
)  # fmt: skip
def test_flavors_of_rows(
    tmp_path: Path, flavor: str, fields: dict[str, str], backend: str, file: str, parameters: dict[str, Any]
) -> None:
    found = find_mlflow(write(tmp_path, of_flavor(flavor, **fields)))
    assert (found.backend, found.file, found.fields) == (backend, file, {"parameters": parameters})
    assert found.is_pickle is (file == "model.pkl")


@pytest.mark.parametrize(
    ("function", "output"), [("predict_proba", "probabilities"), ("decision_function", "scores")]
)
def test_the_function_that_mlflow_calls(tmp_path: Path, function: str, output: str) -> None:
    found = find_mlflow(write(tmp_path, SKLEARN.replace("predict_fn: predict", f"predict_fn: {function}")))
    assert found.fields["parameters"]["outputs"] == [output]


def test_columns_are_those_of_a_signature_with_names(tmp_path: Path) -> None:
    assert find_mlflow(write(tmp_path, SKLEARN)).fields["parameters"]["columns"] == COLUMNS
    written = yaml.safe_load(SKLEARN)
    for inputs in (TENSOR, '[{"type": "double"}]', None):
        written["signature"]["inputs"] = inputs
        assert "columns" not in find_mlflow(write(tmp_path, yaml.safe_dump(written))).fields["parameters"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (of_flavor("pytorch", model_data="data"), "it is a PyTorch model; save it as ONNX"),
        (of_flavor("tensorflow", saved_model_dir="tf2model"), "model; serve its SavedModel: tf2model"),
        (of_flavor("python_function"), "mlflow.pyfunc.load_model in a 1/model.py (backend: python)"),
        (yaml.safe_dump({"flavors": {"prophet": {}}}),
         "flavors: given prophet, allowed: sklearn, xgboost, lightgbm, catboost, onnx"),
        ("mlflow_version: 3\n", "flavors: given NoneType, allowed: a mapping"),
        (of_flavor("onnx"), "flavors.onnx.data: given null, allowed: the name of a file"),
        (of_flavor("onnx", data="../model.onnx"), "onnx: given \"../model.onnx\", allowed: a path inside"),
        (of_flavor("catboost", data="model.cb", save_format="json"), "save_format: given \"json\""),
        (of_flavor("xgboost", data="model.pkl", model_class="mine.Trees"), "given \"mine.Trees\""),
        (SKLEARN.replace("predict_fn: predict", "predict_fn: score"), "given \"score\", allowed: predict,"),
        (SKLEARN.replace("inputs: '[", "inputs: '"), "signature.inputs: "),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_said(tmp_path: Path, text: str, told: str) -> None:
    write(tmp_path / "m/1", text)
    with pytest.raises(ConfigError) as refused:
        find_mlflow(tmp_path / "m/1")
    assert str(refused.value).startswith("MLmodel: ")
    assert told in str(refused.value)
    assert scanned(tmp_path).error == f"1/{refused.value}"
    with pytest.raises(ConfigError) as single:
        find_single(tmp_path / "m/1", "m", trust_pickle=True)
    assert str(single.value) == str(refused.value)


def test_one_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "flowers", SKLEARN, "model.pkl")
    with pytest.raises(ConfigError, match=r"model\.pkl is a pickle: .* --trust-pickle reads it"):
        find_single(folder)
    found = find_single(folder, trust_pickle=True)
    assert found is not None
    assert (found.name, found.base_path, found.file) == ("flowers", str(folder), "model.pkl")
    parameters = {"outputs": ["predictions"], "columns": COLUMNS, "trust_pickle": True}
    assert found.fields == {"backend": "sklearn", "parameters": parameters}
    model = Layout(RepositorySettings(models=(found,))).scan()["flowers"]
    assert model.config is not None
    assert (model.config.backend, model.config.parameters, model.error) == ("sklearn", parameters, "")


def test_versions_of_a_repository_have_their_own_flavors(tmp_path: Path) -> None:
    write(tmp_path / "m/1", SKLEARN, "model.pkl")
    shutil.copy(
        DIGITS / "1/model.onnx", write(tmp_path / "m/2", of_flavor("onnx", data="net.onnx")) / "net.onnx"
    )
    write(tmp_path / "m/3", of_flavor("pytorch"))
    write(tmp_path / "m/4", of_flavor("catboost", data="model.cb"))
    model = scanned(tmp_path, model_defaults={"parameters": {"trust_pickle": True}})
    assert model.error == ""
    first, second, third = (model.config_of(number) for number in (1, 2, 3))
    assert (first.backend, first.options.model_file) == ("sklearn", "model.pkl")
    assert first.parameters == {"outputs": ["predictions"], "columns": COLUMNS, "trust_pickle": True}
    assert (first.max_batch_size, second.max_batch_size) == (1024, 32)
    assert (second.backend, second.options.model_file) == ("onnx", "net.onnx")
    assert "it is a PyTorch model" in third.fault
    assert model.notes == ["version 4: no model.cb"]


def test_model_yaml_adds_and_wins(tmp_path: Path) -> None:
    write(tmp_path / "m/1", SKLEARN, "model.pkl")
    config = {
        "backend": "sklearn",
        "max_batch_size": 8,
        "parameters": {"trust_pickle": True, "columns": False},
    }
    (tmp_path / "m/model.yaml").write_text(yaml.safe_dump(config))
    found = scanned(tmp_path).config_of(1)
    assert found.options.model_file == "model.pkl"
    assert (found.max_batch_size, found.parameters) == (
        8, {"outputs": ["predictions"], "columns": False, "trust_pickle": True}
    )  # fmt: skip
    tensors = {"inputs": {"x": {"dtype": "float64", "shape": [2]}},
               "outputs": {"probabilities": {"dtype": "float64", "shape": [3]}}}  # fmt: skip
    (tmp_path / "m/model.yaml").write_text(yaml.safe_dump({"backend": "sklearn", **tensors}))
    assert scanned(tmp_path).config_of(1).parameters == {}
    own = {"backend": "python", **tensors}
    (tmp_path / "m/model.yaml").write_text(yaml.safe_dump(own))
    assert scanned(tmp_path).notes[0].startswith("version 1: no model.py")


def test_a_changed_mlmodel_is_read_anew(tmp_path: Path) -> None:
    folder = write(tmp_path / "m/1", SKLEARN, "model.pkl")
    layout = Layout(RepositorySettings(repository=str(tmp_path)))
    assert layout.scan()["m"].config_of(1).parameters["outputs"] == ["predictions"]
    write(folder, SKLEARN.replace("predict_fn: predict", "predict_fn: predict_proba"))
    assert layout.scan()["m"].config_of(1).parameters["outputs"] == ["probabilities"]


def test_links_stay_inside(tmp_path: Path) -> None:
    away = write(tmp_path / "away", SKLEARN, "model.pkl")
    root = tmp_path / "models"
    write(root / "m/1", SKLEARN)
    (root / "m/1/model.pkl").symlink_to(away / "model.pkl")
    assert scanned(root).notes == ["version 1: a link leads out of the repository"]
    (root / "m/1/MLmodel").unlink()
    (root / "m/1/MLmodel").symlink_to(away / "MLmodel")
    assert scanned(root).error == "1/MLmodel is a link that leads out of the repository"


def test_a_folder_given_as_repository_is_named(tmp_path: Path) -> None:
    write(tmp_path / "m/1", SKLEARN.replace("model.pkl", "flowers.pkl"), "flowers.pkl")
    with pytest.raises(ConfigError, match=r"is one model .it holds 1/MLmodel.; give the folder above it"):
        Layout(RepositorySettings(repository=str(tmp_path / "m"))).check()


def test_check_looks_at_the_file_of_each_version(tmp_path: Path) -> None:
    write(tmp_path / "m/1", SKLEARN, "model.pkl")
    write(tmp_path / "m/2", of_flavor("catboost", data="model.cb"), "model.cb")
    (tmp_path / "m/1/model.pkl").write_bytes(b"")
    everything = {"model_defaults": {"version_policy": "all"}}
    (model,) = explain(RepositorySettings(repository=str(tmp_path), **everything)).models
    assert (model.versions, model.problems) == ([1, 2], ["version 1: model.pkl is empty"])
