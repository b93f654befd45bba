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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastserve._ext.forest import EXPONENTIAL, IDENTITY, SIGMOID, SOFTMAX, Forest
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
from fastserve.backends.tabular.trees import (
    Compute,
    Evaluator,
    Unfit,
    add_tree,
    make_probes,
    most_rows,
    settle,
    swap,
    try_trees,
)
from fastserve.errors import ConfigError

MARGINS = "margins"
_HEAD_BYTES = 1 << 20
_INFOS = re.compile(rb"^feature_infos=(.*)$", re.MULTILINE)
_OBJECTIVE = re.compile(rb"^objective=(\S+)(?:.*?num_class:(\d+))?", re.MULTILINE)
_LINKS = {
    **dict.fromkeys(("binary", "multiclassova", "cross_entropy"), SIGMOID),
    **dict.fromkeys(("poisson", "gamma", "tweedie"), EXPONENTIAL),
    **dict.fromkeys(("regression", "regression_l1", "huber", "fair", "quantile", "mape"), IDENTITY),
    **dict.fromkeys(("lambdarank", "rank_xendcg"), IDENTITY),
    "multiclass": SOFTMAX,
}
_TINY = float(np.float32(1e-35))
"""Values of at most this size are zero to LightGBM."""
_ZERO, _NAN = 1, 2
"""Its types of missing values: zeros, too, or NaN alone; of others a NaN is a zero."""


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

        of_booster: Any = partial(booster.predict, **threads)
        library: dict[str, Compute] = {MARGINS: partial(of_booster, raw_score=True), PREDICTIONS: of_booster}
        quick = try_trees(file.name, lambda: quicken(booster, library, self.threads))
        predict = quick.get(PREDICTIONS, of_booster)
        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: predict,
            MARGINS: quick.get(MARGINS, library[MARGINS]),
            LEAVES: partial(of_booster, pred_leaf=True),
            CONTRIBUTIONS: partial(of_booster, pred_contrib=True),
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


# ---- trees


def quicken(booster: Any, library: Mapping[str, Compute], threads: int) -> dict[str, Compute]:
    """Return a Booster's predictions and margins by compiled trees, where they are its own. Raises Unfit."""
    head, *blocks = booster.model_to_string().split("\nTree=")
    told = _fields(head)
    trees = [_arrays(_fields(block)) for block in blocks]
    if not trees:
        raise Unfit("no trees")
    kinds = {int(kind) for tree in trees for kind in np.unique(tree["missing"])}
    if _ZERO in kinds and len(kinds) > 1:
        raise Unfit("zeros are missing values of some features")
    width, outputs = int(told["max_feature_idx"]) + 1, int(told["num_tree_per_iteration"])
    words = told.get("objective", "").split()
    options = dict(word.split(":") for word in words[1:] if ":" in word)
    forest = Forest(
        width,
        [0.0] * outputs,
        divisor=len(trees) // outputs if "average_output" in told else 0,
        scale=float(options.get("sigmoid", 1.0)),
        tiny=_TINY,
        tiny_is_missing=_ZERO in kinds,
    )
    for at, tree in enumerate(trees):
        add_tree(forest, tree, tree["values"], at % outputs)
    probes = make_probes(trees, width, "float64")
    settle(forest, library[MARGINS], probes)
    flat, most = outputs == 1, most_rows(threads, len(trees))
    quick = {MARGINS: Evaluator(forest, IDENTITY, flat)}
    if words and words[0] in _LINKS and "sqrt" not in words:
        quick[PREDICTIONS] = Evaluator(forest, _LINKS[words[0]], flat)
    return {
        name: swap(f"LightGBM's {name}, {' '.join(words)}", library[name], compute, probes, most)
        for name, compute in quick.items()
    }


def _fields(block: str) -> dict[str, str]:
    """Return the lines of a block by what is before their sign."""
    lines = (line.partition("=") for line in block.partition("\n\n")[0].splitlines())
    return {name: text for name, _, text in lines}


def _arrays(told: Mapping[str, str]) -> dict[str, Any]:
    """Return the arrays of a tree: its splits, and behind them its leaves. Raises Unfit for categories, and
    for leaves with coefficients."""
    if int(told["num_cat"]) or int(told.get("is_linear", 0)):
        raise Unfit("categories, or leaves with coefficients")
    leaves = int(told["num_leaves"])
    values = np.array(told["leaf_value"].split(), np.float64)

    def of_splits(name: str, kind: Any, rest: Any) -> Any:
        own = np.array(told[name].split() if leaves > 1 else [], kind)
        return np.concatenate((own, np.full(leaves, rest, kind)))

    threshold, decision = of_splits("threshold", np.float64, 0.0), of_splits("decision_type", np.int64, 0)
    children = [of_splits(name, np.int64, 0) for name in ("left_child", "right_child")]
    left, right = (np.where(one < 0, leaves - 2 - one, one) for one in children)
    left[leaves - 1 :] = -1
    missing = decision >> 2 & 3
    return {
        "feature": of_splits("split_feature", np.int64, 0),
        "threshold": threshold,
        "left": left,
        "right": right,
        "missing_left": np.where(np.isin(missing, (_ZERO, _NAN)), decision & 2, threshold >= 0) != 0,
        "values": np.concatenate((np.zeros(leaves - 1), values))[:, None],
        "missing": missing[: leaves - 1],
    }
