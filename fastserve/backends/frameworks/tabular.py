"""The xgboost and sklearn backends: models of rows of numbers, whose files tell their tensors.

    model.json, model.ubj     xgboost.Booster.save_model      input: float32, output: what predict returns
    model.pkl, .joblib        a fitted scikit-learn model     input: float64, output, and probabilities

A pickle runs its author's code when it is read: the sklearn backend does so only with the parameter
`allow_pickle: true`. With `probabilities: false` it answers what `predict` returns and nothing else. Declared
tensors rename the model's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import read_specs
from fastserve.backends.model_errors import clean
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import read_options
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

INPUT, OUTPUT, PROBABILITIES = "input", "output", "probabilities"
NOT_ALLOWED = (
    "{} is a pickle: reading it runs whatever code its author put there; parameters: {{allow_pickle: true}} "
    "reads it"
)
_KINDS = {"f": "float64", "i": "int64", "u": "int64", "b": "bool", "U": "bytes", "O": "bytes", "S": "bytes"}
Predict = Callable[[Any], Mapping[str, Any]]


class TabularBackend:
    """Common part: one input of rows of numbers, outputs as the model's first run shows them."""

    files: tuple[str, ...] = ()
    dtype = "float32"

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self._config, self._folder = config, version_dir
        named = read_options(config).model_file
        self._names = (named,) if named else self.files
        self._predict: Predict | None = None
        self._input = INPUT

    def load(self) -> None:
        """Open the model's file, and run it once. Raises ConfigError, ServeError."""
        if not int(self._config.get("max_batch_size", 0)):
            raise ConfigError("max_batch_size: given 0, allowed: from 1 for a model of rows")
        file = next((self._folder / name for name in self._names if (self._folder / name).is_file()), None)
        if file is None:
            raise ConfigError(f"the version's folder has no file {' or '.join(self._names)}")
        try:
            self._predict, width = self.open(file)
        except (ConfigError, ImportError):
            raise
        except Exception as error:
            words = clean(f"{file.name} cannot be opened: {error}", str(self._folder))
            raise ServeError(Kind.FAILED_PRECONDITION, words) from error
        self._input = next(iter(self.inputs), INPUT)
        found = self._predict(np.zeros((1, width), self.dtype))
        given = {self._input: TensorSpec(self._input, DTYPES[self.dtype], (width,))}
        made = {name: _spec_of(name, np.asarray(array)) for name, array in found.items()}
        self.inputs = _agreed("inputs", self.inputs, given)
        self.outputs = _agreed("outputs", self.outputs, made)

    def open(self, file: Path) -> tuple[Predict, int]:
        """Return how the model is run, and the numbers of a row. Raises what the library raises."""
        raise NotImplementedError

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run."""
        assert self._predict is not None
        found = self._predict(inputs[self._input])
        return {name: _as_declared(found[name], spec) for name, spec in self.outputs.items()}

    def close(self) -> None:
        """Let go of the model."""
        self._predict = None


class XGBoostBackend(TabularBackend):
    """Runs a Booster. A NaN is a missing value."""

    files = ("model.json", "model.ubj")

    def open(self, file: Path) -> tuple[Predict, int]:
        """Read the file, which runs no code of anybody's."""
        import xgboost

        booster = xgboost.Booster(model_file=str(file))
        threads = int(self._config.get("threads", 1))
        if threads:
            booster.set_param({"nthread": threads})
        return lambda rows: {OUTPUT: booster.inplace_predict(rows)}, int(booster.num_features())


class SklearnBackend(TabularBackend):
    """Runs `predict` of a fitted estimator or pipeline, and `predict_proba` where it has one."""

    files = ("model.pkl", "model.joblib")
    dtype = "float64"

    def open(self, file: Path) -> tuple[Predict, int]:
        """Read the pickle, where that is allowed. Raises ConfigError where it is not."""
        parameters = self._config.get("parameters") or {}
        if parameters.get("allow_pickle") is not True:
            raise ConfigError(NOT_ALLOWED.format(file.name))
        if file.suffix == ".joblib":
            import joblib

            model = joblib.load(file)
        else:
            with file.open("rb") as stream:
                model = pickle.load(stream)
        width = getattr(model, "n_features_in_", None)
        if not callable(getattr(model, "predict", None)) or width is None:
            raise ConfigError(
                f"{file.name} holds a {type(model).__name__}: wanted is a fitted model of scikit-learn with "
                "predict, and n_features_in_ numbers a row"
            )

        wanted = parameters.get("probabilities") is not False

        def predict(rows: Any) -> Mapping[str, Any]:
            found = {OUTPUT: model.predict(rows)}
            if wanted and hasattr(model, "predict_proba"):
                found[PROBABILITIES] = model.predict_proba(rows)
            return found

        return predict, int(width)


def _spec_of(name: str, array: Any) -> TensorSpec:
    dtype = "float32" if array.dtype == np.float32 else _KINDS.get(array.dtype.kind, "")
    if not dtype:
        raise ConfigError(f"output {name!r} of the model has the dtype {array.dtype}")
    return TensorSpec(name, DTYPES[dtype], array.shape[1:])


def _agreed(
    side: str, declared: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return the tensors that a config declares, where the model has them; all of the model's where it
    declares none. Raises ConfigError."""
    for name, spec in declared.items():
        if found.get(name) != spec:
            had = ", ".join(f"{one.name}: {one.dtype.name} {list(one.shape or ())}" for one in found.values())
            raise ConfigError(f"{side}: given {name}, allowed: what the model has, {had}")
    return dict(declared or found)


def _as_declared(array: Any, spec: TensorSpec) -> Any:
    array = np.asarray(array)
    if spec.dtype.name == "bytes":
        return array.astype(object)
    return np.ascontiguousarray(array, spec.dtype.name)
