"""The xgboost backend: a Booster's own file, `model.json` or `model.ubj`. Reading one runs no code.

    predictions      what Booster.predict returns                        float32
    margins          the same before the objective's function            float32
    labels           the class: of class_labels, else its number         bytes or int64
    probabilities    of each class, of binary:logistic, multi:softprob   float32
    leaves           the leaf that a row falls into, of each tree        float32
    contributions    SHAP values of each column, and the bias behind     float32

Rows are float32, as XGBoost keeps them. A NaN is a missing value. `parameters: {best_iteration: true}` stops
at the round that early stopping found best, as the classes of xgboost.sklearn do. With `as_estimator: true` a
file that XGBClassifier has saved has its `predict` as predictions, and probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastserve.backends.tabular.base import (
    CONTRIBUTIONS,
    LABELS,
    LEAVES,
    PREDICTIONS,
    PROBABILITIES,
    Derivation,
    OpenedModel,
    TabularBackend,
    number_columns,
)

MARGINS = "margins"


class XGBoostBackend(TabularBackend):
    """Runs a Booster of XGBoost."""

    files = ("model.json", "model.ubj")
    dtype = "float32"

    def open(self, file: Path) -> OpenedModel:
        """Read the file."""
        import xgboost

        known = file.suffix in (".json", ".ubj")  # of others XGBoost looks at the bytes
        booster = xgboost.Booster(model_file=str(file) if known else bytearray(file.read_bytes()))
        if self.threads:
            booster.set_param({"nthread": self.threads})
        width = int(booster.num_features())
        names = booster.feature_names or [str(number) for number in range(width)]

        def matrix(rows: Any) -> Any:
            return xgboost.DMatrix(rows, feature_names=booster.feature_names)

        learner = json.loads(booster.save_config())["learner"]
        rounds = (0, 0)  # all
        stopped = self.parameters.get("best_iteration") and booster.attr("best_iteration") is not None
        if stopped and learner["gradient_booster"]["name"] != "gblinear":  # that has no rounds to choose from
            rounds = (0, int(booster.best_iteration) + 1)

        def predict(rows: Any, **options: Any) -> Any:
            return booster.inplace_predict(rows, validate_features=False, iteration_range=rounds, **options)

        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: predict,
            MARGINS: lambda rows: predict(rows, predict_type="margin"),
            LEAVES: lambda rows: booster.predict(matrix(rows), pred_leaf=True, iteration_range=rounds),
            CONTRIBUTIONS: lambda rows: booster.predict(
                matrix(rows), pred_contribs=True, iteration_range=rounds
            ),
        }
        objective = str(learner["objective"]["name"])
        estimates = self.parameters.get("as_estimator") and _is_classifier(booster)
        chosen: tuple[str, ...] = (PREDICTIONS,)
        derived: dict[str, Derivation] = {}
        if objective.startswith(("binary:", "multi:")):
            classes = max(2, int(learner["learner_model_param"]["num_class"]))
            label = self._label(objective, self.find_labels(classes))
            outputs[LABELS] = lambda rows: label(predict(rows))
            derived[LABELS] = Derivation(PREDICTIONS, label)
            if objective in ("binary:logistic", "multi:softprob"):
                outputs[PROBABILITIES] = lambda rows: _by_class(predict(rows))
                derived[PROBABILITIES] = Derivation(PREDICTIONS, _by_class)
            if estimates and PROBABILITIES in outputs:
                outputs[PREDICTIONS] = outputs[LABELS]
                chosen = (PREDICTIONS, PROBABILITIES)
                of_class = Derivation(PROBABILITIES, partial(_label_of_class, label, objective))
                derived = {PREDICTIONS: of_class, LABELS: of_class}
        return OpenedModel(number_columns(names), outputs, chosen, derived=derived)

    @staticmethod
    def _label(objective: str, labels: Any) -> Callable[[Any], Any]:
        def label(found: Any) -> Any:
            if objective == "binary:logitraw":
                return labels[(found > 0).astype(int)]
            if objective.startswith("binary:"):
                return labels[(found > 0.5).astype(int)]
            return labels[found.astype(int) if found.ndim == 1 else np.argmax(found, axis=1)]

        return label


def _is_classifier(booster: Any) -> bool:
    """Return whether a class of xgboost.sklearn that classifies has saved the file."""
    told = booster.attr("scikit_learn")
    return told is not None and json.loads(told).get("_estimator_type") == "classifier"


def _by_class(found: Any) -> Any:
    """Return the probability of each class, as XGBClassifier.predict_proba does."""
    return found if found.ndim == 2 else np.vstack((1.0 - found, found)).T


def _label_of_class(label: Callable[[Any], Any], objective: str, found: Any) -> Any:
    return label(found[:, 1] if objective == "binary:logistic" else found)
