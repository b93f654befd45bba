"""The treelite backend: forests of trees of several libraries, run by a library of 3 MB (GTIL).

    model.tl                     treelite.Model.serialize: made from XGBoost, LightGBM, scikit-learn, ...
    model.json, model.ubj        of XGBoost
    model.txt                    of LightGBM

    predictions      what treelite.gtil.predict returns, without axes of one     float32 or float64
    margins          the same before the objective's function
    leaves           the leaf that a row falls into, of each tree                float32 or float64

Reading a file runs no code. Rows have the model's own dtype. A NaN is a missing value. Numbers may differ
in the last bit from those of the library that trained a forest, since sums have another order. Compiled trees
give the bits of Treelite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastserve._ext.forest import EXPONENTIAL, IDENTITY, SIGMOID, SOFTMAX, Forest
from fastserve.backends.tabular.base import (
    LEAVES,
    PREDICTIONS,
    OpenedModel,
    TabularBackend,
    number_columns,
    number_names,
)
from fastserve.backends.tabular.trees import (
    Compute,
    Evaluator,
    Unfit,
    add_tree,
    after,
    make_probes,
    most_rows,
    swap,
    try_trees,
)
from fastserve.errors import ConfigError

MARGINS = "margins"
_XGBOOST = {"xgboost_json": "json", "xgboost_ubj": "ubjson"}
"""Treelite's names of XGBoost's formats."""
_LINKS = {
    **dict.fromkeys(("sigmoid", "multiclass_ova"), SIGMOID),
    **dict.fromkeys(("identity", "identity_multiclass"), IDENTITY),
    **{"softmax": SOFTMAX, "exponential": EXPONENTIAL},
}
"""Links by Treelite's names of them."""
_CATEGORIES = 2
_BELOW, _AT_MOST = 2, 3
"""Its numbers of a split by categories, and of comparisons."""


class TreeliteBackend(TabularBackend):
    """Runs a forest by Treelite."""

    files = ("model.tl", "model.json", "model.ubj", "model.txt")

    def open(self, file: Path) -> OpenedModel:
        """Read the file, by its ending."""
        forest = read_forest(file, self.form_of(file))
        self.dtype = str(forest.input_type)
        threads = self.threads or -1

        compute = quicken(forest, self.threads)

        def predict(rows: Any, *, margin: bool) -> Any:
            return _squeezed(compute[margin](rows))

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
        answer = partial(self._answer, quicken(forest, self.threads)[False], places)
        return OpenedModel(number_columns(number_names(int(forest.num_feature))), {name: answer}, (name,))

    def form_of(self, file: Path) -> str:
        """Return the parameter model_type."""
        return str(self.parameters.get("model_type", "xgboost"))

    def _answer(self, compute: Compute, places: int, rows: Any) -> Any:
        found = compute(rows)
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


def run_forest(forest: Any, rows: Any, threads: int, margin: bool) -> Any:
    """Return the predictions of a forest, [rows, targets, classes] or fewer axes."""
    from treelite import gtil

    return gtil.predict(forest, _typed(forest, rows), nthread=threads, pred_margin=margin)


def run_leaves(forest: Any, rows: Any, threads: int) -> Any:
    """Return the leaf that a row falls into, of each tree."""
    from treelite import gtil

    return gtil.predict_leaf(forest, _typed(forest, rows), nthread=threads)


def quicken(forest: Any, threads: int) -> dict[bool, Compute]:
    """Return what computes margins (True) and predictions, by compiled trees where they are equal."""
    run = partial(run_forest, forest, threads=threads or -1)
    library: dict[bool, Compute] = {margin: partial(run, margin=margin) for margin in (True, False)}
    found: Any = try_trees("Treelite", lambda: _swap_trees(forest, library, threads))
    return {**library, **found}


def _swap_trees(forest: Any, library: Mapping[bool, Compute], threads: int) -> Any:
    head = forest.get_header_accessor()
    targets, classes = head.get_field("num_target"), head.get_field("num_class")
    if list(targets) != [1]:
        raise Unfit("several targets")
    outputs, narrow = int(classes[0]), str(forest.input_type) == "float32"
    arrays = [_arrays(forest.get_tree_accessor(at), outputs) for at in range(int(forest.num_tree))]
    comparisons = {int(one) for tree in arrays for one in np.unique(tree["cmp"][tree["left"] >= 0])}
    if not comparisons <= {_BELOW} and not comparisons <= {_AT_MOST}:
        raise Unfit("other comparisons")
    trees = Forest(
        int(forest.num_feature),
        head.get_field("base_scores").tolist(),
        narrow=narrow,
        narrow_sums=narrow,
        strict=_BELOW in comparisons,
        divisor=len(arrays) if int(head.get_field("average_tree_output")[0]) else 0,
        base_last=True,
        scale=float(head.get_field("sigmoid_alpha")[0]),
    )
    for tree, output in zip(arrays, head.get_field("class_id"), strict=True):
        add_tree(trees, tree, tree["values"], max(int(output), 0))
    probes = make_probes(arrays, trees.width, str(forest.input_type))
    most = most_rows(threads, len(arrays))
    shape = library[True](probes[0][:1]).shape[1:]
    links = {True: IDENTITY, False: _LINKS.get(str(head.get_field("postprocessor")))}

    def shaped(link: int) -> Compute:
        return after(Evaluator(trees, link), lambda found: found.reshape(-1, *shape))

    return {
        margin: swap(
            "Treelite's margins" if margin else "Treelite", library[margin], shaped(link), probes, most
        )
        for margin, link in links.items()
        if link is not None
    }


def _arrays(tree: Any, outputs: int) -> dict[str, Any]:
    """Return the arrays of a tree. Raises Unfit for categories."""
    if np.any(tree.get_field("node_type") == _CATEGORIES):
        raise Unfit("categories")
    values, vectors = tree.get_field("leaf_value")[:, None], tree.get_field("leaf_vector")
    left = tree.get_field("cleft")
    if vectors.size:
        values = np.zeros((len(left), outputs), vectors.dtype)
        begin = tree.get_field("leaf_vector_begin").astype(np.int64)
        values[left < 0] = vectors[begin[left < 0, None] + np.arange(outputs)]
    return {
        "feature": np.maximum(tree.get_field("split_index"), 0),
        "threshold": tree.get_field("threshold"),
        "left": left,
        "right": tree.get_field("cright"),
        "missing_left": tree.get_field("default_left"),
        "cmp": tree.get_field("cmp"),
        "values": values,
    }


def _typed(forest: Any, rows: Any) -> Any:
    return rows.astype(str(forest.input_type), copy=False)


def _squeezed(found: Any) -> Any:
    """Return predictions without axes of one."""
    found = found[:, 0] if found.ndim == 3 and found.shape[1] == 1 else found
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
