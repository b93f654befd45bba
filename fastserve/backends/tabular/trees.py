"""Ensembles of trees run by a compiled evaluator in place of their library, where both give the same bits.

    quick = Evaluator(forest, flat=True)                  a full forest of fastserve._ext.forest
    predict = swap("model.txt", library, quick, probes)   the library where some bit differs, or none is quick

The evaluator makes the comparisons of the library that trained the trees, and adds up in its order. Before
a model is served, both run over the same few hundred rows, made of the model's own thresholds, their
neighbours, missing and infinite values; one different bit leaves the model to its library. Rows that the
evaluator does not take, since the library refuses them, go to the library, which says why. A forest of 100
trees takes scikit-learn 4 ms for one row as for 32, and XGBoost 0.15 ms: few rows are most of what a server
runs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastserve._ext.forest import IDENTITY, Forest

log = logging.getLogger(__name__)
Compute = Callable[[Any], Any]
"""From rows to an array with as many."""

MOST_NODES = 1 << 25
"""Larger forests are left to their library: both stay in memory, and building one takes seconds."""
MOST_FEATURES = 1 << 13
"""Of wider rows the probes would take seconds."""
MOST_THRESHOLDS = 1 << 20
"""Of more, some are probed."""
PROBES = 192
"""Rows with finite values that both must agree on."""
FEW_VISITS = 50_000
"""Rows times trees up to which one thread takes half a millisecond, less than other threads need to start."""
_ARRAYS: dict[str, Any] = {
    "feature": np.int32,
    "threshold": np.float64,
    **dict.fromkeys(("left", "right"), np.int32),
    "missing_left": np.uint8,
}
_SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-35, -1e-35, 2e-35, 1e-40, -1e-40, 1e30, -1e30)


class Unfit(Exception):
    """The evaluator has no such trees; the message says why."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A forest as a function of rows. `flat`: its one output has no axis of its own."""

    forest: Forest
    link: int = IDENTITY
    flat: bool = False

    def __call__(self, rows: Any) -> Any:
        """Return the outputs, or None for rows that the evaluator does not take."""
        forest = self.forest
        known = isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == forest.width
        if not known or rows.dtype.char not in "fd":
            return None
        own: Any = np.ascontiguousarray(rows)
        out: Any = np.empty((len(rows), forest.outputs), np.float32 if forest.narrow_sums else np.float64)
        if not forest.predict(own, out, self.link):
            return None
        return out[:, 0] if self.flat else out


def most_rows(threads: int, trees: int) -> int:
    """Return up to how many rows one thread is enough: all where the library has no other."""
    return sys.maxsize if threads == 1 else max(1, FEW_VISITS // max(trees, 1))


def after(quick: Compute, derive: Compute) -> Compute:
    """Return what gives `derive` of what `quick` gives, and None where that is None."""

    def run(rows: Any) -> Any:
        found = quick(rows)
        return None if found is None else derive(found)

    return run


def try_trees(what: str, build: Callable[[], Mapping[str, Compute]]) -> Mapping[str, Compute]:
    """Return the outputs that a builder gives; none, and a line in the log, where the trees do not fit or the
    library's version has another form of them."""
    try:
        return build()
    except Unfit as reason:
        log.debug("%s: run by its library: %s", what, reason)
    except Exception as error:  # a version of the library with other names: it runs as it did, slower
        log.info("%s: run by its library: %s: %s", what, type(error).__name__, error)
    return {}


# ---- against the library


def swap(
    what: str, library: Compute, quick: Compute, probes: Sequence[Any], most: int = sys.maxsize
) -> Compute:
    """Return what runs `quick`, and the library for rows that it does not take, or for more than `most`; the
    library alone where the two differ in a bit for any of the probes."""
    for at, rows in enumerate(probes):
        if not agree(library, quick, rows, must=at == 0):
            log.debug("%s: run by its library: the compiled trees differ in a bit", what)
            return library
    log.debug("%s: run by compiled trees", what)

    def run(rows: Any) -> Any:
        found = quick(rows) if len(rows) <= most else None
        return library(rows) if found is None else found

    return run


def agree(library: Compute, quick: Compute, rows: Any, *, must: bool = False) -> bool:
    """Return whether both give the same bits, or the evaluator takes none of such rows, unless it must."""
    try:
        with np.errstate(all="ignore"):
            wanted = np.asarray(library(rows))
    except (ValueError, TypeError):
        return quick(rows) is None and not must
    for some in (slice(None), slice(0, 1), slice(1, 12)):  # one row, and groups with a rest, have other ways
        found = quick(rows[some])
        if found is None:
            return some == slice(None) and not must  # the library answers all of them
        if found.dtype != wanted.dtype or found.shape != wanted[some].shape:
            return False
        if _bits(found) != _bits(wanted[some]):
            return False
    return True


def make_probes(trees: Sequence[Mapping[str, Any]], width: int, dtype: str) -> list[Any]:
    """Return batches of rows: finite ones, some with missing, some with infinite and some with large values.
    A value is a threshold of its feature in these trees, or beside it."""
    if width > MOST_FEATURES:
        raise Unfit(f"more than {MOST_FEATURES} features")
    thresholds = _thresholds(trees, width)
    random = np.random.default_rng(len(thresholds))
    kind = np.dtype(dtype)
    near = np.empty((PROBES, len(thresholds)), kind)
    for feature, own in enumerate(thresholds):
        values = np.concatenate((np.unique(np.asarray(own, np.float64)), _SPECIAL))
        picked = values[random.integers(len(values), size=PROBES)]
        narrow = picked.astype(np.float32)
        toward = np.where(random.random(PROBES) < 0.5, -np.inf, np.inf)
        ways = np.array(
            [
                picked,
                np.nextafter(picked, toward),
                narrow,
                np.nextafter(narrow, toward.astype(np.float32)),
                picked + random.normal(size=PROBES) * (1.0 + abs(picked)),
            ]
        )
        near[:, feature] = ways[random.integers(len(ways), size=PROBES), np.arange(PROBES)]
    missing, infinite = near[:64].copy(), near[:64].copy()
    missing[random.random(missing.shape) < 0.3] = np.nan
    infinite[random.random(infinite.shape) < 0.1] = np.inf
    infinite[random.random(infinite.shape) < 0.1] = -np.inf
    large = near[:8].copy()
    large[:, random.integers(len(thresholds), size=8)] = np.finfo(kind).max / 2
    return [near, missing, infinite, large]


def settle(forest: Forest, library: Compute, probes: Sequence[Any]) -> None:
    """Set which values the forest takes: those that its library takes."""
    _, missing, infinite, large = probes
    forest.takes_missing = _takes(library, missing)
    forest.takes_infinite = _takes(library, infinite) and _takes(library, large)


def _takes(library: Compute, rows: Any) -> bool:
    try:
        with np.errstate(all="ignore"):
            library(rows)
    except (ValueError, TypeError):
        return False
    return True


def _bits(array: Any) -> Any:
    return array.tolist() if array.dtype.kind in "OU" else np.ascontiguousarray(array).tobytes()


# ---- trees


def add_tree(forest: Forest, arrays: Mapping[str, Any], values: Any, output: int = 0) -> None:
    """Add a tree of numpy arrays of any dtypes: feature, threshold, left, right, missing_left; values
    [nodes, k]. Raises ValueError, and Unfit for a forest that becomes too large."""
    if forest.nodes + len(values) > MOST_NODES:
        raise Unfit(f"more than {MOST_NODES} nodes")
    typed: dict[str, Any] = {name: np.ascontiguousarray(arrays[name], kind) for name, kind in _ARRAYS.items()}
    typed["values"] = np.ascontiguousarray(values, np.float64)
    forest.add(**typed, output=output)


def _thresholds(trees: Sequence[Mapping[str, Any]], width: int) -> list[Any]:
    """Return the thresholds of each feature."""
    features, thresholds = [], []
    for arrays in trees:
        inner = np.asarray(arrays["left"]) >= 0
        features.append(np.asarray(arrays["feature"])[inner])
        thresholds.append(np.asarray(arrays["threshold"], np.float64)[inner])
    step = 1 + sum(map(len, features)) // MOST_THRESHOLDS
    feature, threshold = (np.concatenate([one[::step] for one in many]) for many in (features, thresholds))
    order = np.argsort(feature, kind="stable")
    return np.split(threshold[order], np.searchsorted(feature[order], np.arange(1, width)))
