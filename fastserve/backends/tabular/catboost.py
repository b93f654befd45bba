"""The catboost backend: a model's own file, `model.cbm`. Reading one runs no code.

    predictions      classifiers: the class; others: what predict returns    bytes or numbers
    probabilities    classifiers: of each class                              float64
    margins          predict(prediction_type="RawFormulaVal")                float64
    leaves           the leaf that a row falls into, of each tree            int64
    contributions    SHAP values of each column, and the bias behind         float64

Rows are float32, as CatBoost keeps numbers. A NaN is a missing value. A model of categories or texts takes
one input for each column; those columns are texts, also where the categories were whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastserve.backends.tabular.base import (
    CONTRIBUTIONS,
    LEAVES,
    PREDICTIONS,
    PROBABILITIES,
    Column,
    OpenedModel,
    TabularBackend,
)

MARGINS = "margins"


class CatBoostBackend(TabularBackend):
    """Runs a model of CatBoost."""

    files = ("model.cbm",)
    dtype = "float32"

    def open(self, file: Path) -> OpenedModel:
        """Read the file."""
        import catboost

        model = catboost.CatBoost().load_model(str(file))
        kind = catboost.CatBoostClassifier if len(model.classes_) else catboost.CatBoostRegressor
        model = kind().load_model(str(file))
        names = list(model.feature_names_)
        categories, texts = model.get_cat_feature_indices(), model.get_text_feature_indices()
        worded = {*categories, *texts}
        columns = tuple(
            Column(name, at in worded, "" if at in worded else 0.0) for at, name in enumerate(names)
        )

        def pool(rows: Any) -> Any:
            return catboost.Pool(
                rows, cat_features=categories, text_features=texts, feature_names=names, thread_count=threads
            )

        threads = self.threads or -1
        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: lambda rows: _flat(model.predict(pool(rows), thread_count=threads)),
            MARGINS: lambda rows: model.predict(
                pool(rows), prediction_type="RawFormulaVal", thread_count=threads
            ),
            LEAVES: lambda rows: model.calc_leaf_indexes(pool(rows), thread_count=threads),
            CONTRIBUTIONS: lambda rows: model.get_feature_importance(
                pool(rows), type="ShapValues", thread_count=threads
            ),
        }
        chosen: tuple[str, ...] = (PREDICTIONS,)
        if kind is catboost.CatBoostClassifier:
            outputs[PROBABILITIES] = lambda rows: model.predict_proba(pool(rows), thread_count=threads)
            chosen = (PREDICTIONS, PROBABILITIES)
        return OpenedModel(columns, outputs, chosen, join=_join if worded else None, by_column=bool(worded))


def _join(columns: Sequence[Any]) -> Any:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _flat(found: Any) -> Any:
    """Return classes without the axis of one that CatBoost gives where there are several."""
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
