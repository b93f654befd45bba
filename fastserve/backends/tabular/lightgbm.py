"""The lightgbm backend: a Booster's own file, `model.txt`. Reading one runs no code.

    predictions      what Booster.predict returns                        float64
    margins          the same with raw_score=True                        float64
    labels           the class: of class_labels, else its number         bytes or int64
    leaves           the leaf that a row falls into, of each tree        int64
    contributions    SHAP values of each column, and the bias behind     float64

Rows are float64. A NaN is a missing value. A model that was trained on a pandas table with columns of texts
(dtype `category`) takes one input for each column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastserve.backends.tabular.base import (
    CONTRIBUTIONS,
    LABELS,
    LEAVES,
    PREDICTIONS,
    Column,
    Derivation,
    OpenedModel,
    TabularBackend,
    make_frame,
)
from fastserve.errors import ConfigError

MARGINS = "margins"
_HEAD_BYTES = 1 << 20
_INFOS = re.compile(rb"^feature_infos=(.*)$", re.MULTILINE)
_OBJECTIVE = re.compile(rb"^objective=(\S+)(?:.*?num_class:(\d+))?", re.MULTILINE)


class LightGBMBackend(TabularBackend):
    """Runs a Booster of LightGBM."""

    files = ("model.txt",)

    def open(self, file: Path) -> OpenedModel:
        """Read the file."""
        import lightgbm

        booster = lightgbm.Booster(model_file=str(file))
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        threads: dict[str, Any] = {"num_threads": self.threads} if self.threads else {}

        def predict(rows: Any, **options: Any) -> Any:
            return booster.predict(rows, **threads, **options)

        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: predict,
            MARGINS: lambda rows: predict(rows, raw_score=True),
            LEAVES: lambda rows: predict(rows, pred_leaf=True),
            CONTRIBUTIONS: lambda rows: predict(rows, pred_contrib=True),
        }
        derived: dict[str, Derivation] = {}
        told = _OBJECTIVE.search(head)
        objective = told[1].decode() if told else ""
        if objective in ("binary", "multiclass", "multiclassova"):
            labels = self.find_labels(2 if objective == "binary" else int(told[2] or 2))  # type: ignore[index]
            outputs[LABELS] = lambda rows: labels[_number(predict(rows))]
            derived[LABELS] = Derivation(PREDICTIONS, lambda found: labels[_number(found)])
        names = booster.feature_name()
        categories = _categories(names, booster.pandas_categorical or (), head)
        columns = tuple(_column(name, categories.get(name)) for name in names)
        if not categories:
            return OpenedModel(columns, outputs, derived=derived)
        join = _make_join(names, categories)
        return OpenedModel(columns, outputs, join=join, by_column=True, derived=derived)


def _number(found: Any) -> Any:
    return (found > 0.5).astype(int) if found.ndim == 1 else np.argmax(found, axis=1)


def _categories(names: Sequence[str], kept: Sequence[Any], head: bytes) -> dict[str, Sequence[Any]]:
    """Return the categories of pandas' columns by name. The file has them in the order of the columns, which
    are those whose infos are values, and not the bounds of numbers. Raises ConfigError where they are not as
    many: LightGBM says nothing of columns that no tree uses."""
    if not kept:
        return {}
    infos = _INFOS.search(head)
    told = infos[1].split() if infos else []
    found = [name for name, info in zip(names, told, strict=False) if info != b"none" and info[:1] != b"["]
    if len(found) != len(kept):
        raise ConfigError(
            f"the file has the categories of {len(kept)} columns and uses {len(found)}, so nobody can "
            "say which: train the model without columns of one value"
        )
    return dict(zip(found, kept, strict=True))


def _column(name: str, categories: Sequence[Any] | None) -> Column:
    if not categories:
        return Column(name)
    return Column(name, isinstance(categories[0], str), categories[0])


def _make_join(names: Sequence[str], categories: Mapping[str, Sequence[Any]]) -> Callable[[Any], Any]:
    import pandas

    return make_frame(names, {name: pandas.CategoricalDtype(values) for name, values in categories.items()})
