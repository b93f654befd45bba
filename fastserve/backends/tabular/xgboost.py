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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastserve._ext.forest import BOUNDED_SIGMOID, EXPONENTIAL, IDENTITY, SOFTMAX, Forest
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
from fastserve.backends.tabular.trees import (
    Compute,
    Evaluator,
    Unfit,
    add_tree,
    after,
    make_probes,
    most_rows,
    settle,
    swap,
    try_trees,
)

MARGINS = "margins"
_LINKS = {
    **dict.fromkeys(("binary:logistic", "reg:logistic"), BOUNDED_SIGMOID),
    **dict.fromkeys(("multi:softprob", "multi:softmax"), SOFTMAX),
    **dict.fromkeys(("count:poisson", "reg:gamma", "reg:tweedie"), EXPONENTIAL),
    **dict.fromkeys(("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror"), IDENTITY),
    **dict.fromkeys(("binary:logitraw", "rank:ndcg", "rank:pairwise", "rank:map"), IDENTITY),
}
_INTEGERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8"}
_NUMBERS = {**_INTEGERS, "d": ">f4", "D": ">f8"}


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
        is_linear = learner["gradient_booster"]["name"] == "gblinear"
        rounds = (0, 0)  # all
        stopped = self.parameters.get("best_iteration") and booster.attr("best_iteration") is not None
        if stopped and not is_linear:  # that has no rounds to choose from
            rounds = (0, int(booster.best_iteration) + 1)

        def predict_linear(rows: Any, predict_type: str = "value") -> Any:
            return booster.predict(matrix(rows), output_margin=predict_type == "margin")

        predict: Any = partial(booster.inplace_predict, validate_features=False, iteration_range=rounds)
        if is_linear:  # it knows no inplace_predict
            predict = predict_linear

        library: dict[str, Compute] = {MARGINS: partial(predict, predict_type="margin"), PREDICTIONS: predict}
        quick = try_trees(file.name, lambda: quicken(booster, library, rounds[1], self.threads))
        predict = quick.get(PREDICTIONS, predict)
        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: predict,
            MARGINS: quick.get(MARGINS, library[MARGINS]),
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


# ---- trees


def quicken(booster: Any, library: Mapping[str, Compute], rounds: int, threads: int) -> dict[str, Compute]:
    """Return a Booster's predictions and margins by compiled trees, where they are its own. Raises Unfit."""
    learner = _read_ubjson(bytes(booster.save_raw("ubj")))["learner"]
    kind = learner["gradient_booster"]
    if kind["name"] != "gbtree":
        raise Unfit(f"it is a {kind['name']}")
    model, told = kind["model"], learner["learner_model_param"]
    groups = model["tree_info"]
    trees = list(map(_arrays, model["trees"]))
    if rounds:
        trees = trees[: int(model["iteration_indptr"][rounds])]
    width = int(told["num_feature"])
    outputs = max(int(told["num_class"]), int(told.get("num_target", 1)), 1)
    probes = make_probes(trees, width, "float32")
    most = most_rows(threads, len(trees))
    base = np.array(told["base_score"].strip("[]").split(","), np.float32)
    for first in _first_margins(np.resize(base, outputs)):
        forest = Forest(width, first.tolist(), narrow=True, narrow_sums=True, strict=True)
        for arrays, group in zip(trees, groups, strict=False):
            add_tree(forest, arrays, arrays["values"], int(group))
        settle(forest, library[MARGINS], probes)
        margins: Compute = Evaluator(forest, IDENTITY, outputs == 1)
        found = swap("XGBoost's margins", library[MARGINS], margins, probes, most)
        if found is not library[MARGINS]:
            break
    else:
        raise Unfit("margins differ in a bit")
    objective = learner["objective"]["name"]
    if objective not in _LINKS:
        return {MARGINS: found}
    answers: Compute = Evaluator(forest, _LINKS[objective], outputs == 1)
    if objective == "multi:softmax":
        answers = after(margins, lambda rows: np.argmax(rows, axis=1).astype(np.float32))
    named = f"XGBoost's predictions, {objective}"
    return {MARGINS: found, PREDICTIONS: swap(named, library[PREDICTIONS], answers, probes, most)}


def _first_margins(base: Any) -> Iterator[Any]:
    """Yield what margins may begin with: the base score, its logit or its logarithm, by the objective. The
    logarithm of another library may be the float beside it."""
    yield base
    with np.errstate(all="ignore"):
        found = (-np.log(np.float32(1) / base - np.float32(1)), np.log(base))
    for near in found:
        if np.isfinite(near).all():
            yield near
            yield from (np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf))


def _arrays(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a tree of the file. Raises Unfit for categories and leaves of several values."""
    if int(tree["tree_param"]["size_leaf_vector"]) > 1 or np.any(tree.get("split_type", 0)):
        raise Unfit("categories, or leaves of several values")
    conditions = np.asarray(tree["split_conditions"])
    return {
        "feature": tree["split_indices"],
        "threshold": conditions,
        "left": tree["left_children"],
        "right": tree["right_children"],
        "missing_left": tree["default_left"],
        "values": conditions[:, None],
    }


def _read_ubjson(data: bytes) -> Any:
    """Return what XGBoost has written as UBJSON. Arrays of numbers are numpy's, with the model's own bits."""
    at = 0

    def number(kind: str) -> Any:
        nonlocal at
        (found,) = np.frombuffer(data, _NUMBERS[kind], 1, at)
        at += found.itemsize
        return found.item()

    def mark() -> str:
        nonlocal at
        at += 1
        return chr(data[at - 1])

    def text() -> str:
        nonlocal at
        size = number(mark())
        at += size
        return data[at - size : at].decode()

    def array() -> Any:
        nonlocal at
        kind = ""
        if data[at : at + 1] == b"$":
            at, kind = at + 2, chr(data[at + 1])
        if data[at : at + 1] != b"#":
            found = []
            while data[at : at + 1] != b"]":
                found.append(value())
            at += 1
            return found
        at += 1
        size = number(mark())
        if not kind:
            return [value() for _ in range(size)]
        numbers = np.frombuffer(data, _NUMBERS[kind], size, at)
        at += numbers.nbytes
        return numbers.astype(numbers.dtype.newbyteorder("="))

    def table() -> dict[str, Any]:
        nonlocal at
        found = {}
        while data[at : at + 1] != b"}":
            name = text()
            found[name] = value()
        at += 1
        return found

    def value() -> Any:
        kind = mark()
        if kind in "{[S":
            return {"{": table, "[": array, "S": text}[kind]()
        if kind in "TFZ":
            return {"T": True, "F": False, "Z": None}[kind]
        return number(kind)

    return value()
