"""Compiled trees against plain ones: sums are equal to the last bit, whatever the rows, and links nearly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.forest import BOUNDED_SIGMOID, EXPONENTIAL, IDENTITY, SIGMOID, SOFTMAX, Forest
from tests.effort import examples
from tests.oracles.forest import PlainForest

THRESHOLDS = (0.0, -0.0, 1.0, -1.5, 0.1, 1e-35, -1e-35, 3.4e38, 1e-45, -7.25, 1e300)
VALUES = (*THRESHOLDS, 0.1000000001, -1.6, 2.5, np.nan, 1e-40, np.inf, -np.inf)
KINDS: dict[str, dict[str, Any]] = {
    "scikit-learn": {"narrow": True, "divisor": 7.0},
    "XGBoost": {"narrow": True, "narrow_sums": True, "strict": True},
    "LightGBM": {"tiny": 1e-35, "scale": 1.7},
    "LightGBM, zeros are missing": {"tiny": 1e-35, "tiny_is_missing": True},
    "Treelite": {"narrow": True, "narrow_sums": True, "divisor": 3.0, "base_last": True},
    "strict": {"narrow": True, "strict": True},
    "wide": {"strict": True},
}


def make_tree(random: Any, width: int, leaves: int, wide: int) -> list[Any]:
    """Return the arrays of a tree of so many leaves, its nodes in any order behind the root."""
    left, right, ends = [-1], [-1], [0]
    while len(ends) < leaves:
        # The last is the deepest: some trees are a chain.
        parent = ends.pop(-1 if random.random() < 0.5 else int(random.integers(len(ends))))
        left[parent], right[parent] = len(left), len(left) + 1
        ends += [len(left), len(left) + 1]
        left, right = [*left, -1, -1], [*right, -1, -1]
    nodes = len(left)
    order = np.concatenate(([0], 1 + random.permutation(nodes - 1))).astype(np.int32)  # old to new
    moved: list[Any] = [np.full(nodes, -1, np.int32) for _ in range(2)]
    for target, source in zip(moved, (left, right), strict=True):
        for node, child in enumerate(source):
            target[order[node]] = order[child] if child >= 0 else -1
    return [
        random.integers(width, size=nodes).astype(np.int32),
        random.choice(THRESHOLDS, nodes),
        *moved,
        random.integers(2, size=nodes).astype(np.uint8),
        random.normal(size=(nodes, wide)) * 10.0 ** random.integers(-3, 4),
    ]


def make_both(kind: str, seed: int, leaves: list[int], outputs: int) -> tuple[Forest, PlainForest, Any]:
    random = np.random.default_rng(seed)
    width = int(random.integers(1, 6))
    base = random.normal(size=outputs).tolist()
    if kind == "XGBoost":
        base = np.float32(base).tolist()
    both = Forest(width, base, **KINDS[kind]), PlainForest(width, base, **KINDS[kind])
    for many in leaves:
        wide = outputs if random.random() < 0.5 else 1
        arrays = make_tree(random, width, many, wide)
        if KINDS[kind].get("narrow_sums"):
            with np.errstate(over="ignore"):
                arrays[1] = np.float64(np.minimum(np.float32(arrays[1]), np.finfo(np.float32).max))
            arrays[5] = np.float64(np.float32(arrays[5]))
        output = 0 if wide == outputs else int(random.integers(outputs))
        for one in both:
            one.add(*arrays, output=output)
    return *both, random


@given(
    st.sampled_from(list(KINDS)),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([1, 2, 3, 9, 31, 32, 33, 63, 64, 65, 90]), min_size=1, max_size=11),
    st.integers(1, 3),
    st.sampled_from([1, 3, 4, 7, 8, 9, 16, 17, 33, 140]),
    st.booleans(),
    st.booleans(),
)
@examples(300)
def test_agrees_with_the_oracle(
    kind: str, seed: int, leaves: list[int], outputs: int, count: int, special: bool, is_double: bool
) -> None:
    forest, plain, random = make_both(kind, seed, leaves, outputs)
    own = random.choice(VALUES if special else THRESHOLDS[:-1], (count, plain.width))
    rows = np.where(random.random(own.shape) < 0.3, random.normal(size=own.shape), own)
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float64 if is_double else np.float32)
    out: Any = np.full((count, outputs), 77, np.float32 if forest.narrow_sums else np.float64)
    assert forest.predict(rows, out)
    assert out.tobytes() == plain.predict(rows).tobytes()
    for link in (SIGMOID, EXPONENTIAL, SOFTMAX, BOUNDED_SIGMOID) if count < 10 else ():
        with np.errstate(all="ignore"):
            assert forest.predict(rows, out, link)
            wanted = plain.predict(rows, link)
            np.testing.assert_allclose(out, wanted, rtol=3e-5 if forest.narrow_sums else 1e-12, atol=1e-37)


@pytest.mark.parametrize("count", [1, 6])
def test_values_that_are_not_taken(count: int) -> None:
    forest, _, _ = make_both("scikit-learn", 1, [5, 9], 1)
    rows, out = np.zeros((count, forest.width)), np.empty((count, 1))
    for value, takes in (
        (np.nan, "takes_missing"),
        (np.inf, "takes_infinite"),
        (-1e39, "takes_infinite"),
        (1e38, ""),
    ):
        rows[-1, -1] = value
        assert forest.predict(rows, out)
        if takes:
            setattr(forest, takes, False)
            assert not forest.predict(rows, out)
            setattr(forest, takes, True)


def test_what_is_no_tree() -> None:
    good = [np.array([0, 0, 0], np.int32), np.zeros(3), np.array([1, -1, -1], np.int32)]
    good += [np.array([2, -1, -1], np.int32), np.zeros(3, np.uint8), np.ones((3, 1))]

    def changed(place: int, array: Any) -> list[Any]:
        return [array if at == place else one for at, one in enumerate(good)]

    forest = Forest(2, [0.0, 0.0])
    for arrays, output in (
        (changed(0, np.array([2, 0, 0], np.int32)), 0),  # a feature that rows do not have
        (changed(0, np.array([-1, 0, 0], np.int32)), 0),
        (changed(1, np.array([np.nan, 0, 0])), 0),
        (changed(2, np.array([0, -1, -1], np.int32)), 0),  # a child that is its own parent
        (changed(2, np.array([3, -1, -1], np.int32)), 0),
        (changed(3, np.array([-1, -1, -1], np.int32)), 0),  # a split with one child
        (changed(4, np.zeros(2, np.uint8)), 0),
        (changed(5, np.ones((3, 3))), 0),
        (good, 2),
        (good, -1),
        ([one[:0] for one in good], 0),
    ):
        with pytest.raises(ValueError):
            forest.add(*arrays, output=output)
    rows, out = np.zeros((1, 2)), np.zeros((1, 2))
    with pytest.raises(ValueError, match="no tree"):
        forest.predict(rows, out)
    forest.add(*good, output=1)
    assert forest.nodes == 3
    assert forest.predict(rows, out)
    assert out.tolist() == [[0.0, 1.0]]
    for wrong in (np.zeros((1, 3)), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="rows, out"):
            forest.predict(wrong, out)
    with pytest.raises(ValueError, match="link"):
        forest.predict(rows, out, 5)
    with pytest.raises(ValueError):
        forest.predict(rows, np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="narrow_sums"):
        Forest(1, [0.0], narrow_sums=True)
    for width, base in ((0, [0.0]), (1, [])):
        with pytest.raises(ValueError, match="width, base"):
            Forest(width, base)
    assert forest.predict(np.zeros((0, 2)), np.zeros((0, 2)), IDENTITY)


@given(st.integers(0, 2**32), st.integers(1, 12))
@examples(200)
def test_any_arrays_are_a_tree_or_refused(seed: int, nodes: int) -> None:
    """Children that are shared, or in a circle, end."""
    random = np.random.default_rng(seed)
    forest = Forest(2, [0.0])
    children = random.integers(-1, nodes + 1, (2, nodes)).astype(np.int32)
    try:
        forest.add(
            random.integers(-1, 3, nodes).astype(np.int32),
            random.normal(size=nodes),
            *children,
            random.integers(2, size=nodes).astype(np.uint8),
            random.normal(size=(nodes, 1)),
        )
    except ValueError:
        assert forest.nodes == 0
        return
    assert 1 <= forest.nodes <= nodes
    assert forest.predict(random.normal(size=(9, 2)), np.empty((9, 1)))
