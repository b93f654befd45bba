"""The sklearn backend: a fitted estimator or pipeline of scikit-learn.

    model.skops                 skops.io.dump: reading one makes objects of known types, and of those in the
                                parameter `trusted_types`
    model.joblib, model.pkl     a pickle: reading one runs its author's code, so `trust_pickle: true` must
                                allow it (`allow_pickle` is the same)

    predictions      what `predict` returns, labels that are texts too     of the model
    probabilities    `predict_proba`; of several outputs probabilities_0, _1, ...
    scores           `decision_function`
    leaves           `apply`
    transformed      `transform`

Rows are float64, and a NaN is a missing value. An estimator that was fitted to a table keeps the names of its
columns; where an encoder has learned texts of a column, the model takes one input for each column. An empty
text is a missing value where the encoder knows one, and no empty text.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastserve._ext.forest import Forest
from fastserve.backends.tabular.base import (
    LEAVES,
    PREDICTIONS,
    PROBABILITIES,
    SCORES,
    Column,
    Derivation,
    Join,
    OpenedModel,
    TabularBackend,
    make_frame,
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
from fastserve.errors import ConfigError, install_text

log = logging.getLogger(__name__)
NOT_ALLOWED = (
    "{} is a pickle: reading it runs whatever code its author put there; parameters: {{trust_pickle: true}} "
    "reads it, and skops.io.dump(model, 'model.skops') writes a file that runs none"
)
UNTRUSTED = (
    "{} holds types that skops does not trust by itself: {}; parameters: {{trusted_types: [...]}} with these "
    "names reads it, where you trust the author"
)
_METHODS = (("decision_function", SCORES), ("apply", LEAVES))
TRANSFORMED = "transformed"
# Classifiers whose `predict` is the largest of `predict_proba`, by their own code.
_LARGEST = (
    *("BaggingClassifier", "DecisionTreeClassifier", "ExtraTreeClassifier", "ExtraTreesClassifier"),
    *("RandomForestClassifier", "VotingClassifier"),
)


class SklearnBackend(TabularBackend):
    """Runs a fitted model of scikit-learn."""

    files = ("model.skops", "model.joblib", "model.pkl")

    def open(self, file: Path) -> OpenedModel:
        """Read the file, where that is allowed. Raises ConfigError where it is not."""
        model = self._read(file)
        width = getattr(model, "n_features_in_", None)
        works = any(callable(getattr(model, method, None)) for method in ("predict", "transform"))
        if not works or width is None:
            raise ConfigError(
                f"{file.name} holds a {type(model).__name__}: wanted is a fitted model of scikit-learn with "
                "predict or transform, and n_features_in_ numbers a row"
            )
        if self.threads:
            _set_threads(model, self.threads)
        outputs: dict[str, Callable[[Any], Any]] = {}
        if hasattr(model, "predict"):
            outputs[PREDICTIONS] = model.predict
        if hasattr(model, "transform"):
            outputs[TRANSFORMED] = partial(_transform, model)
        names: Any = getattr(model, "feature_names_in_", None)
        named = names is not None
        columns = _columns(model, list(names) if named else [str(number) for number in range(int(width))])
        by_column = any(column.is_text for column in columns)
        join: Join | None = _join_objects if by_column else None
        if named and (by_column or self.wants_columns):
            join = make_frame(names)
        chosen = [PREDICTIONS if PREDICTIONS in outputs else TRANSFORMED]
        if hasattr(model, "predict_proba"):
            many = isinstance(getattr(model, "classes_", None), list)
            found = {PROBABILITIES: model.predict_proba} if not many else _by_output(model)
            outputs.update(found)
            chosen += found
        for method, output in _METHODS:
            if hasattr(model, method):
                outputs[output] = getattr(model, method)
        # A matrix has its columns in the model's order, and needs no names.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        outputs.update(quicken(model, self.threads))
        return OpenedModel(columns, outputs, tuple(chosen), join, by_column, _derive(model))

    @property
    def _trusts_author(self) -> bool:
        return True in (self.parameters.get("trust_pickle"), self.parameters.get("allow_pickle"))

    def _read(self, file: Path) -> Any:
        from sklearn.exceptions import InconsistentVersionWarning

        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", InconsistentVersionWarning)
            model = self._read_skops(file) if file.suffix == ".skops" else self._read_pickle(file)
        messages = (one.message for one in noted)
        told: Any = next((one for one in messages if isinstance(one, InconsistentVersionWarning)), None)
        if told is not None:
            log.warning(
                "%s was written by scikit-learn %s and is read by %s: predictions may differ; install that "
                "version or train the model again",
                file.name,
                told.original_sklearn_version,
                told.current_sklearn_version,
            )
        return model

    def _read_skops(self, file: Path) -> Any:
        try:
            from skops import io
        except ImportError:
            raise ConfigError(f"{file.name} needs skops: {install_text('skops', 'sklearn')}") from None
        found = io.get_untrusted_types(file=file)
        trusted = found if self._trusts_author else self.parameters.get("trusted_types") or []
        others = [name for name in found if name not in trusted]
        if others:
            raise ConfigError(UNTRUSTED.format(file.name, ", ".join(others)))
        return io.load(file, trusted=trusted)

    def _read_pickle(self, file: Path) -> Any:
        if not self._trusts_author:
            raise ConfigError(NOT_ALLOWED.format(file.name))
        if file.suffix == ".joblib":
            import joblib

            return joblib.load(file)
        with file.open("rb") as stream:
            return pickle.load(stream)


def _derive(model: Any) -> dict[str, Derivation]:
    """Return how labels follow from probabilities, for a classifier that finds them so itself."""
    last = model.steps[-1][1] if type(model).__name__ == "Pipeline" else model
    kind = type(last)
    if not kind.__module__.startswith("sklearn.") or kind.__name__ not in _LARGEST:
        return {}
    classes = getattr(last, "classes_", None)
    if not isinstance(classes, np.ndarray) or classes.ndim != 1 or getattr(last, "voting", "soft") != "soft":
        return {}
    return {PREDICTIONS: Derivation(PROBABILITIES, lambda found: classes.take(np.argmax(found, axis=1)))}


def _transform(model: Any, rows: Any) -> Any:
    found = model.transform(rows)
    return found.toarray() if hasattr(found, "toarray") else np.asarray(found)  # one may be sparse


def _by_output(model: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the probabilities of each output of a model that has several."""

    def of_output(at: int) -> Callable[[Any], Any]:
        return lambda rows: model.predict_proba(rows)[at]

    return {f"{PROBABILITIES}_{at}": of_output(at) for at in range(len(model.classes_))}


def _set_threads(model: Any, threads: int) -> None:
    """Have each part of a model compute with so many threads."""
    if found := _threads_of(model):
        model.set_params(**dict.fromkeys(found, threads))


def _threads_of(model: Any) -> dict[str, Any]:
    """Return the settings of threads, by the names of parameters."""
    found = model.get_params() if hasattr(model, "get_params") else {}
    return {name: value for name, value in found.items() if name.rpartition("__")[2] == "n_jobs"}


def _join_objects(columns: Sequence[Any]) -> Any:
    rows = np.empty((len(columns[0]), len(columns)), object)
    for at, column in enumerate(columns):
        rows[:, at] = column
    return rows


# ---- trees

_METHOD_OF = {PREDICTIONS: "predict", PROBABILITIES: "predict_proba", SCORES: "decision_function"}


def quicken(model: Any, threads: int) -> dict[str, Compute]:
    """Return the outputs that compiled trees give to the last bit, of a model or of a pipeline's end."""
    is_pipeline = type(model).__name__ == "Pipeline" and len(model.steps) > 1
    last: Any = model.steps[-1][1] if is_pipeline else model
    name = type(last).__name__
    if not type(last).__module__.startswith("sklearn.") or name not in _TREES:
        return {}
    kept = {} if threads == 1 else _threads_of(last)
    if kept:  # several threads add up as they come: what is compared is the order of one
        last.set_params(**dict.fromkeys(kept, 1))
    swapped = {
        output: compute
        for output, compute in try_trees(name, partial(_swap_trees, last, threads)).items()
        if compute != getattr(last, _METHOD_OF[output])
    }
    if kept:
        last.set_params(**kept)
    if not is_pipeline:
        return swapped
    head = model[:-1]
    return {output: _behind(head, compute) for output, compute in swapped.items()}


def _behind(head: Any, compute: Compute) -> Compute:
    return lambda rows: compute(head.transform(rows))


def _swap_trees(model: Any, threads: int) -> dict[str, Compute]:
    quick, probes, trees = _TREES[type(model).__name__](model)
    most = most_rows(threads, trees)
    what = type(model).__name__
    return {
        output: swap(f"{what}, {output}", getattr(model, _METHOD_OF[output]), compute, probes, most)
        for output, compute in quick.items()
    }


Quick = tuple[dict[str, Compute], list[Any], int]
"""Outputs by compiled trees, the rows to try them with, and how many trees there are."""


def _arrays(tree: Any) -> dict[str, Any]:
    """Return the public arrays of a `tree_`."""
    return {
        "feature": tree.feature,
        "threshold": tree.threshold,
        "left": tree.children_left,
        "right": tree.children_right,
        "missing_left": tree.missing_go_to_left,
    }


def _average(model: Any) -> Quick:
    """Trees whose values are averaged, or one tree."""
    if model.n_outputs_ != 1:
        raise Unfit("several outputs")
    parts = getattr(model, "estimators_", None)
    trees = [part.tree_ for part in parts] if parts is not None else [model.tree_]
    labels = getattr(model, "classes_", None)
    wide = 1 if labels is None else len(labels)
    first = 0.0 if parts is not None else -0.0  # to which a value is added without a trace
    divisor = len(trees) if parts is not None else 0.0
    forest = Forest(model.n_features_in_, [first] * wide, narrow=True, divisor=divisor)
    arrays = [_arrays(tree) for tree in trees]
    for one, tree in zip(arrays, trees, strict=True):
        add_tree(forest, one, tree.value[:, 0, :wide])
    probes = make_probes(arrays, forest.width, "float64")
    quick = Evaluator(forest, flat=labels is None)
    settle(forest, model.predict, probes)
    if labels is None:
        return {PREDICTIONS: quick}, probes, len(arrays)
    return {PROBABILITIES: quick, PREDICTIONS: after(quick, partial(_largest, labels))}, probes, len(arrays)


def _boosting(model: Any) -> Quick:
    """Trees whose values are added to those of a first model, which has to be constant."""
    if getattr(model, "init_", None) != "zero" and not type(model.init_).__name__.startswith("Dummy"):
        raise Unfit(f"it begins with a {type(model.init_).__name__}")
    stages = model.estimators_
    origin = np.zeros((1, model.n_features_in_), np.float32)
    forest = Forest(model.n_features_in_, model._raw_predict_init(origin)[0].tolist(), narrow=True)
    arrays = []
    for stage in stages:
        for output, part in enumerate(stage):
            arrays.append(_arrays(part.tree_) | {"missing_left": np.zeros(part.tree_.node_count)})
            add_tree(forest, arrays[-1], model.learning_rate * part.tree_.value[:, 0, :1], output)
    return _boosted(model, forest, arrays)


def _histograms(model: Any) -> Quick:
    """Trees of histograms, which compare float64; their nodes have no public name."""
    if np.any(getattr(model, "is_categorical_", False)):
        raise Unfit("categories")
    base = np.ravel(model._baseline_prediction).tolist()
    forest = Forest(model.n_features_in_, base)
    arrays = []
    for stage in model._predictors:
        for output, part in enumerate(stage):
            nodes = part.nodes
            inner = nodes["is_leaf"] == 0
            arrays.append(
                {
                    "feature": nodes["feature_idx"],
                    "threshold": np.where(inner, nodes["num_threshold"], 0.0),
                    "left": np.where(inner, nodes["left"].astype(np.int64), -1),
                    "right": np.where(inner, nodes["right"].astype(np.int64), -1),
                    "missing_left": nodes["missing_go_to_left"],
                }
            )
            add_tree(forest, arrays[-1], nodes["value"][:, None], output)
    return _boosted(model, forest, arrays)


def _boosted(model: Any, forest: Forest, arrays: list[Any]) -> Quick:
    """The outputs that follow from sums; those of a loss with another link are found to differ."""
    probes = make_probes(arrays, forest.width, "float64")
    settle(forest, model.predict, probes)
    flat = forest.outputs == 1
    quick = Evaluator(forest, flat=flat)
    labels = getattr(model, "classes_", None)
    if labels is None:
        return {PREDICTIONS: quick}, probes, len(arrays)
    chances = after(quick, _chances)
    if type(model).__name__.startswith("Hist"):
        return (
            {
                SCORES: quick,
                PROBABILITIES: chances,
                PREDICTIONS: after(chances, partial(_largest, labels)),
            },
            probes,
            len(arrays),
        )
    decide = partial(_above, labels) if flat else partial(_largest, labels)
    return {SCORES: quick, PROBABILITIES: chances, PREDICTIONS: after(quick, decide)}, probes, len(arrays)


def _chances(scores: Any) -> Any:
    from scipy.special import expit
    from sklearn.utils.extmath import softmax

    if scores.ndim == 2:
        return softmax(scores, copy=True)
    found = np.empty((len(scores), 2))
    found[:, 1] = expit(scores)
    found[:, 0] = 1 - found[:, 1]
    return found


def _largest(labels: Any, found: Any) -> Any:
    return labels.take(np.argmax(found, axis=1), axis=0)


def _above(labels: Any, scores: Any) -> Any:
    return labels.take((scores >= 0).astype(int), axis=0)


_TREES: dict[str, Callable[[Any], Quick]] = {
    **dict.fromkeys(("DecisionTreeClassifier", "ExtraTreeClassifier", "DecisionTreeRegressor"), _average),
    **dict.fromkeys(("RandomForestClassifier", "ExtraTreesClassifier", "ExtraTreeRegressor"), _average),
    **dict.fromkeys(("RandomForestRegressor", "ExtraTreesRegressor"), _average),
    **dict.fromkeys(("GradientBoostingClassifier", "GradientBoostingRegressor"), _boosting),
    **dict.fromkeys(("HistGradientBoostingClassifier", "HistGradientBoostingRegressor"), _histograms),
}


# ---- columns


def _columns(model: Any, names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns of a model, with what its encoders have learned of them."""
    learned: dict[str, Any] = {}
    for column, categories in _learned(model, names):
        learned.setdefault(column, categories)
    return tuple(_column(name, learned.get(name)) for name in names)


def _column(name: str, categories: Any) -> Column:
    if categories is None or not len(categories):
        return Column(name)
    known = [value for value in categories if value is not None and value == value]
    if not known:
        return Column(name)
    if not isinstance(known[0], str):
        return Column(name, example=known[0])
    missing = [value for value in categories if value is None or value != value]
    return Column(name, True, known[0], missing[0] if missing and "" not in known else "")


def _learned(model: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield columns with the categories that an encoder of a model, or of a part of it, has learned."""
    steps = getattr(model, "steps", None)
    if steps is not None:  # a pipeline: its first steps see the columns, as long as they keep them
        for _, step in steps:
            found = list(_learned(step, names))
            yield from found
            if found or not hasattr(step, "n_features_in_") or not _keeps_columns(step):
                return
        return
    parts = getattr(model, "transformers_", None)
    if parts is not None:
        for _, part, chosen in parts:
            if not isinstance(part, str):
                yield from _learned(part, _chosen_names(chosen, names))
        return
    categories = getattr(model, "categories_", None)
    if categories is not None and len(categories) == len(names):
        yield from zip(names, categories, strict=True)
    inner = getattr(model, "estimator_", None) or getattr(model, "best_estimator_", None)
    if inner is not None:
        yield from _learned(inner, names)


def _keeps_columns(step: Any) -> bool:
    """Return whether a step gives each column on in its place, as imputers and scalers do."""
    return type(step).__module__.startswith(("sklearn.impute", "sklearn.preprocessing._data"))


def _chosen_names(chosen: Any, names: Sequence[str]) -> list[str]:
    """Return the names of the columns that a part of a ColumnTransformer takes."""
    if isinstance(chosen, str):
        return [chosen]
    if isinstance(chosen, slice):
        if isinstance(chosen.start, str) or isinstance(chosen.stop, str):
            first = names.index(chosen.start) if chosen.start is not None else 0
            last = names.index(chosen.stop) if chosen.stop is not None else len(names) - 1
            return list(names[first : last + 1])
        return list(names[chosen])
    if isinstance(chosen, int | np.integer):
        return [names[int(chosen)]]
    taken = list(chosen)
    if taken and isinstance(taken[0], bool | np.bool_):
        return [name for name, wanted in zip(names, taken, strict=True) if wanted]
    return [one if isinstance(one, str) else names[int(one)] for one in taken]
