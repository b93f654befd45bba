"""A model as MLflow saves it: a folder with a file `MLmodel`, which says what lies beside it.

    find_mlflow(Path("models/churn/1"))
        MlflowModel(backend="sklearn", file="model.pkl", fields={"parameters": {"outputs": ["predictions"]}})

    flavors.sklearn       its pickle or skops file     what `pyfunc_predict_fn` names: predict, ...
    flavors.xgboost       model.xgb, model.ubj, ...    classes of an XGBClassifier, predictions of others
    flavors.lightgbm      model.lgb of a Booster; other classes are a file of the sklearn backend
    flavors.catboost      model.cb                     predict of the class that was saved
    flavors.onnx          model.onnx

A signature of named columns gives one input for each of them. Nothing but YAML and JSON is read here, and of
a graph of ONNX its head; whether a pickle may be read is said by the operator, never by the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fastserve.errors import ConfigError
from fastserve.repository.triton_config.completion import read_onnx_graph
from fastserve.settings.config_files import read_yaml
from fastserve.settings.confined_file import is_inner_path
from fastserve.settings.fields import fault_text

MLMODEL = "MLmodel"
BOOSTER = "lightgbm.basic.Booster"
SKOPS = ".skops"
_PREDICT = {
    "predict": "predictions",
    "predict_proba": "probabilities",
    "decision_function": "scores",
    "apply": "leaves",
}
_CATBOOST = {
    "CatBoostClassifier": "predictions",
    "CatBoostRegressor": "predictions",
    "CatBoostRanker": "margins",
    "CatBoost": "margins",  # its `predict` gives the raw value
}
_LOAD = "load it by mlflow.pyfunc.load_model in a {folder}/model.py (backend: python)"
_UNSUPPORTED = {
    "pytorch": "a PyTorch model; save it as ONNX (mlflow.onnx.save_model), or serve a torch.export program "
    "as {folder}/model.pt2 (backend: torch)",
    "tensorflow": "a TensorFlow model; serve its SavedModel: {saved}",
    "keras": "a Keras model; export a SavedModel (model.export('saved')) and serve that folder",
    "transformers": "a pipeline of Transformers; serve the folder with its config.json and *.safetensors "
    "(backend: text), or " + _LOAD,
    "python_function": "Python code of its own (mlflow.pyfunc); " + _LOAD,
}


@dataclass(frozen=True, slots=True)
class MlflowModel:
    """The model that a folder of MLflow holds. `fields` are those of a model.yaml."""

    backend: str
    file: str
    """Its place in the folder."""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_pickle(self) -> bool:
        """Whether reading it runs its author's code."""
        return self.backend == "sklearn" and not self.file.endswith(SKOPS)


def holds_mlflow(folder: Path) -> bool:
    """Return whether MLflow has saved a model in a folder."""
    return (folder / MLMODEL).is_file()


def find_mlflow(folder: Path) -> MlflowModel:
    """Return the model that MLflow has saved in a folder. Raises ConfigError for a flavor that no backend
    runs, and for an MLmodel that does not say what it must."""
    written = read_yaml(folder / MLMODEL, MLMODEL)
    flavors = _mapping(written.get("flavors"), "flavors")
    name = next((one for one in _FLAVORS if one in flavors), "")
    if not name:
        raise ConfigError(_unsupported_text(flavors, folder.name))
    found = _FLAVORS[name](_mapping(flavors[name], f"flavors.{name}"), flavors)
    if not is_inner_path(found.file):
        raise ConfigError(fault_text(f"{MLMODEL}: flavors.{name}", found.file, "a path inside its folder"))
    fields = dict(found.fields)
    if found.backend == "onnx":
        graph = read_onnx_graph(folder / found.file) if (folder / found.file).is_file() else None
        if graph is not None and not graph.batched:
            fields["max_batch_size"] = 0
    else:
        columns = _read_columns(written.get("signature"))
        if columns:
            fields["parameters"] = {**fields["parameters"], "columns": columns}
    return MlflowModel(found.backend, found.file, fields)


def _unsupported_text(flavors: Mapping[str, Any], folder: str) -> str:
    name = next((one for one in _UNSUPPORTED if one in flavors), "")
    if not name:
        held = ", ".join(map(str, flavors)) or "none"
        return f"{MLMODEL}: flavors: given {held}, allowed: {', '.join(_FLAVORS)}; others: " + _LOAD.format(
            folder=folder
        )
    told = flavors[name] if isinstance(flavors[name], Mapping) else {}
    saved = str(told.get("saved_model_dir") or "model.export('saved') writes one")
    return f"{MLMODEL}: it is {_UNSUPPORTED[name].format(folder=folder, saved=saved)}"


# ---- flavors


def _sklearn(told: Mapping[str, Any], flavors: Mapping[str, Any]) -> MlflowModel:
    generic = _mapping(flavors.get("python_function", {}), "flavors.python_function")
    function = str(generic.get("predict_fn") or "predict")
    if function not in _PREDICT:
        where = f"{MLMODEL}: flavors.python_function.predict_fn"
        raise ConfigError(fault_text(where, function, ", ".join(_PREDICT)))
    return _of_rows("sklearn", _text(told, "sklearn", "pickled_model"), _PREDICT[function])


def _xgboost(told: Mapping[str, Any], flavors: Mapping[str, Any]) -> MlflowModel:
    kind = str(told.get("model_class") or "xgboost.core.Booster")
    if not kind.startswith("xgboost."):
        where = f"{MLMODEL}: flavors.xgboost.model_class"
        raise ConfigError(fault_text(where, kind, "xgboost.core.Booster or a class of xgboost.sklearn"))
    found = _of_rows(
        "xgboost", _text(told, "xgboost", "data"), "labels" if kind.endswith("Classifier") else "predictions"
    )
    if kind.startswith("xgboost.sklearn."):  # its `predict` stops at the best round, Booster.predict does not
        found.fields["parameters"]["best_iteration"] = True
    return found


def _lightgbm(told: Mapping[str, Any], flavors: Mapping[str, Any]) -> MlflowModel:
    kind = str(told.get("model_class") or BOOSTER)
    return _of_rows(
        "lightgbm" if kind == BOOSTER else "sklearn", _text(told, "lightgbm", "data"), "predictions"
    )


def _catboost(told: Mapping[str, Any], flavors: Mapping[str, Any]) -> MlflowModel:
    saved, kind = str(told.get("save_format") or "cbm"), str(told.get("model_type") or "CatBoost")
    for name, given, allowed in (("save_format", saved, ("cbm",)), ("model_type", kind, tuple(_CATBOOST))):
        if given not in allowed:
            where = f"{MLMODEL}: flavors.catboost.{name}"
            raise ConfigError(fault_text(where, given, ", ".join(allowed)))
    return _of_rows("catboost", _text(told, "catboost", "data"), _CATBOOST[kind])


def _onnx(told: Mapping[str, Any], flavors: Mapping[str, Any]) -> MlflowModel:
    return MlflowModel("onnx", _text(told, "onnx", "data"))


_FLAVORS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], MlflowModel]] = {
    "sklearn": _sklearn,
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "catboost": _catboost,
    "onnx": _onnx,
}


def _of_rows(backend: str, file: str, output: str) -> MlflowModel:
    return MlflowModel(backend, file, {"parameters": {"outputs": [output]}})


def _text(told: Mapping[str, Any], flavor: str, name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(fault_text(f"{MLMODEL}: flavors.{flavor}.{name}", value, "the name of a file"))
    return value


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{MLMODEL}: {where}: given {type(value).__name__}, allowed: a mapping")
    return value


# ---- signatures


def _read_columns(signature: object) -> list[str]:
    """Return the names of a signature's columns; none for tensors, and where a column has no name."""
    if signature is None:
        return []
    text = _mapping(signature, "signature").get("inputs")
    if text is None:
        return []
    try:
        columns = msgspec.json.decode(str(text), type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as fault:
        raise ConfigError(f"{MLMODEL}: signature.inputs: {fault}") from None
    names = [column.get("name") for column in columns if column.get("type") != "tensor"]
    words = [name for name in names if isinstance(name, str) and name]
    return words if len(words) == len(columns) else []
