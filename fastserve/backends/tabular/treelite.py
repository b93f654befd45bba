"""The treelite backend: forests of trees of several libraries, run by a library of 3 MB (GTIL).

    model.tl                     treelite.Model.serialize: made from XGBoost, LightGBM, scikit-learn, ...
    model.json, model.ubj        of XGBoost
    model.txt                    of LightGBM

    predictions      what treelite.gtil.predict returns, without axes of one     float32 or float64
    margins          the same before the objective's function
    leaves           the leaf that a row falls into, of each tree                float32 or float64

Reading a file runs no code. Rows have the model's own dtype. A NaN is a missing value. Numbers may differ
in the last bit from those of the library that trained a forest, since sums have another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastserve.backends.tabular.base import (
    LEAVES,
    PREDICTIONS,
    OpenedModel,
    TabularBackend,
    number_columns,
    number_names,
)
from fastserve.errors import ConfigError

MARGINS = "margins"
_XGBOOST = {"xgboost_json": "json", "xgboost_ubj": "ubjson"}
"""Treelite's names of XGBoost's formats."""


class TreeliteBackend(TabularBackend):
    """Runs a forest by Treelite."""

    files = ("model.tl", "model.json", "model.ubj", "model.txt")

    def open(self, file: Path) -> OpenedModel:
        """Read the file, by its ending."""
        forest = read_forest(file, self.form_of(file))
        self.dtype = str(forest.input_type)
        threads = self.threads or -1

        def predict(rows: Any, *, margin: bool) -> Any:
            return _squeezed(run_forest(forest, rows, threads, margin=margin))

        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: lambda rows: predict(rows, margin=False),
            MARGINS: lambda rows: predict(rows, margin=True),
            LEAVES: lambda rows: run_leaves(forest, rows, threads),
        }
        return OpenedModel(number_columns(number_names(int(forest.num_feature))), outputs)

    def form_of(self, file: Path) -> str:
        """Return which library's file it is."""
        kinds = {".txt": "lightgbm", ".json": "xgboost_json", ".ubj": "xgboost_ubj"}
        return kinds.get(file.suffix, "treelite_checkpoint")


class FilBackend(TabularBackend):
    """Runs a forest as Triton's backend fil does, by the parameters of its config.

    output_class     classes, which are numbers of float32, and not the forest's own predictions; newer
                     releases of fil call it is_classifier
    predict_proba    the probability of each class; of a binary forest the one of class 1 where the output
                     has one place, as fil gives it, or of both classes
    threshold        of a binary forest's class 1
    """

    input_name = "input__0"
    dtype = "float32"

    def open(self, file: Path) -> OpenedModel:
        """Read the file, as `model_type` says."""
        forest = read_forest(file, self.form_of(file), any_field=self._says("xgboost_allow_unknown_field"))
        name = next(iter(self.outputs), "output__0")
        spec = self.outputs.get(name)
        places = spec.shape[0] if spec is not None and spec.shape else 0
        answer = partial(self._answer, forest, places)
        return OpenedModel(number_columns(number_names(int(forest.num_feature))), {name: answer}, (name,))

    def form_of(self, file: Path) -> str:
        """Return the parameter model_type."""
        return str(self.parameters.get("model_type", "xgboost"))

    def _answer(self, forest: Any, places: int, rows: Any) -> Any:
        found = run_forest(forest, rows, self.threads or -1, margin=False)
        found = found.reshape(len(rows), -1).astype(np.float32, copy=False)
        is_binary = found.shape[1] == 1
        if self._says("predict_proba"):
            return np.hstack((1.0 - found, found)) if is_binary and places == 2 else found
        if not (self._says("output_class") or self._says("is_classifier")):
            return found
        if is_binary or (found.shape[1] == 2 and "threshold" in self.parameters):
            above = found[:, -1:] > np.float32(self.parameters.get("threshold", 0.5))
            return above.astype(np.float32)
        return np.argmax(found, axis=1).astype(np.float32)[:, None]

    def _says(self, name: str) -> bool:
        return str(self.parameters.get(name, "")).lower() == "true"


def read_forest(file: Path, form: str, *, any_field: bool = False) -> Any:
    """Return the forest of a file of a library; `any_field`: fields that nobody knows are passed over. Raises
    ConfigError for a form that Treelite has no more."""
    import treelite
    from treelite import frontend

    if form == "treelite_checkpoint":
        return treelite.Model.deserialize(str(file))
    if form == "lightgbm":
        return frontend.load_lightgbm_model(str(file))
    if form in _XGBOOST:
        return frontend.load_xgboost_model(
            str(file), format_choice=_XGBOOST[form], allow_unknown_field=any_field
        )
    read = getattr(frontend, "load_xgboost_model_legacy_binary", None)
    if read is None:
        raise ConfigError(
            f"{file.name} is XGBoost's old binary format, which this Treelite does not read: write it by "
            "Booster.save_model('xgboost.ubj') of an XGBoost before 3.1, with model_type xgboost_ubj"
        )
    return read(str(file))


def run_forest(forest: Any, rows: Any, threads: int, *, margin: bool) -> Any:
    """Return the predictions of a forest, [rows, targets, classes] or fewer axes."""
    from treelite import gtil

    return gtil.predict(forest, _typed(forest, rows), nthread=threads, pred_margin=margin)


def run_leaves(forest: Any, rows: Any, threads: int) -> Any:
    """Return the leaf that a row falls into, of each tree."""
    from treelite import gtil

    return gtil.predict_leaf(forest, _typed(forest, rows), nthread=threads)


def _typed(forest: Any, rows: Any) -> Any:
    return rows.astype(str(forest.input_type), copy=False)


def _squeezed(found: Any) -> Any:
    """Return predictions without axes of one."""
    found = found[:, 0] if found.ndim == 3 and found.shape[1] == 1 else found
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
