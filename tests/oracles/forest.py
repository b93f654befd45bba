"""Ensembles of trees, slow and plain: one row, one tree, one node at a time, numpy's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

IDENTITY, SIGMOID, SOFTMAX, EXPONENTIAL, BOUNDED_SIGMOID = range(5)


@dataclass
class PlainForest:
    """Takes what `fastserve._ext.forest.Forest` takes."""

    width: int
    base: list[float]
    narrow: bool = False
    narrow_sums: bool = False
    strict: bool = False
    divisor: float = 0.0
    base_last: bool = False
    scale: float = 1.0
    tiny: float = -1.0
    tiny_is_missing: bool = False
    trees: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *arrays: Any, output: int = 0) -> None:
        self.trees.append((*arrays, output))

    def predict(self, rows: Any, link: int = IDENTITY) -> Any:
        kind = np.float32 if self.narrow_sums else np.float64
        found = np.empty((len(rows), len(self.base)), kind)
        with np.errstate(all="ignore"):
            for at, row in enumerate(rows):
                sums = [kind(0 if self.base_last else value) for value in self.base]
                for tree in self.trees:
                    leaf = self._leaf(tree, row)
                    for k, value in enumerate(tree[5][leaf]):
                        sums[tree[6] + k] = sums[tree[6] + k] + kind(value)
                if self.divisor:
                    sums = [value / kind(self.divisor) for value in sums]
                if self.base_last:
                    sums = [kind(float(one) + base) for one, base in zip(sums, self.base, strict=True)]
                found[at] = self._linked([float(value) for value in sums], link)
        return found

    def _leaf(self, tree: tuple[Any, ...], row: Any) -> int:
        feature, threshold, left, right, missing_left, *_ = tree
        node = 0
        while left[node] >= 0:
            goes_left = self._goes_left(float(row[feature[node]]), threshold[node], bool(missing_left[node]))
            node = int(left[node] if goes_left else right[node])
        return node

    def _goes_left(self, value: float, threshold: float, missing_left: bool) -> bool:
        if abs(value) <= self.tiny:
            value = math.nan if self.tiny_is_missing else 0.0
        if value != value:
            return missing_left
        seen = float(np.float32(value) if self.narrow else value)
        return seen < threshold if self.strict else seen <= threshold

    def _linked(self, sums: list[float], link: int) -> list[float]:
        if link == SIGMOID:
            return [float(1 / (1 + np.exp(-value * self.scale))) for value in sums]
        if link == BOUNDED_SIGMOID:
            return [float(1 / (1 + np.exp(min(-value, 88.7)))) for value in sums]
        if link == EXPONENTIAL:
            return [float(np.exp(value)) for value in sums]
        if link == SOFTMAX:
            powers = [math.exp(value - max(sums)) for value in sums]
            return [one / sum(powers) for one in powers]
        return sums
