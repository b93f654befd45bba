"""A forest of 100 trees over one row, 32 and 1,000 rows, against scikit-learn's own call."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier

from fastserve.backends.tabular.scikit_learn import quicken

DATA, KINDS = load_breast_cancer(return_X_y=True)
MODEL = RandomForestClassifier(100, random_state=0, n_jobs=1).fit(DATA, KINDS)
WAYS = {"library": MODEL.predict_proba, "compiled": quicken(MODEL, 1)["probabilities"]}


@pytest.mark.parametrize("count", [1, 32, 1000])
@pytest.mark.parametrize("way", WAYS)
def test_probabilities(benchmark, way, count):  # type: ignore[no-untyped-def]
    rows = np.resize(DATA, (count, DATA.shape[1]))
    found = benchmark(lambda: WAYS[way](rows))
    assert found.tobytes() == MODEL.predict_proba(rows).tobytes()
