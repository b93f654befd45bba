"""Metrics of models' own: shared by all who ask for the same, bounded, gone with the last who did."""

from __future__ import annotations

import pytest

from fastserve.metrics.custom import MOST_SERIES, CustomMetrics


def test_series_are_shared_and_go_with_their_last_owner():
    metrics = CustomMetrics()
    for owner in ("old", "new"):
        metrics.add_family(owner, "seen", "Seen.", "counter")
        assert metrics.add_series(owner, "seen", {"m": "a"}, []) == 1
    assert metrics.add_series("new", "seen", {"m": "b"}, []) == 2
    metrics.change(1, "increment", 2.5)
    metrics.forget("old")
    assert metrics.value(1) == 2.5
    assert metrics.write() == [
        "# HELP seen Seen.",
        "# TYPE seen counter",
        'seen{m="a"} 2.5',
        'seen{m="b"} 0',
    ]
    metrics.forget("new")
    assert metrics.write() == []
    with pytest.raises(ValueError, match="no such metric"):
        metrics.value(1)


@pytest.mark.parametrize(
    ("kind", "how", "value"),
    [("counter", "increment", -1), ("counter", "set", 1), ("gauge", "observe", 1), ("histogram", "set", 1)],
)
def test_what_a_kind_cannot_do(kind, how, value):
    metrics = CustomMetrics()
    metrics.add_family(1, "m", "", kind)
    number = metrics.add_series(1, "m", {}, [1.0] if kind == "histogram" else [])
    with pytest.raises(ValueError, match=f"a {kind} cannot {how}"):
        metrics.change(number, how, value)
    with pytest.raises(ValueError, match="cannot"):
        metrics.change(number, "increment" if kind != "histogram" else "observe", float("nan"))


@pytest.mark.parametrize("name", ["", "a-b", "nv_inference_count", "fastserve_ready", "x\ny 1"])
def test_names_that_cannot_be(name):
    with pytest.raises(ValueError, match="cannot be the name"):
        CustomMetrics().add_family(1, name, "", "gauge")


def test_what_a_model_may_not_do():
    metrics = CustomMetrics()
    metrics.add_family(1, "m", "", "counter")
    metrics.add_family(1, "h", "", "histogram")
    with pytest.raises(ValueError, match="different type"):
        metrics.add_family(2, "m", "", "gauge")
    with pytest.raises(ValueError, match="no family"):
        metrics.add_series(2, "m", {}, [])
    for labels in ({"le": "1"}, {"a b": "1"}, {"__a": "1"}, {"a": "x" * 2000}):
        with pytest.raises(ValueError, match="label"):
            metrics.add_series(1, "m", labels, [])
    for bounds in ([], [2.0, 1.0], [float("inf")]):
        with pytest.raises(ValueError, match="bucket"):
            metrics.add_series(1, "h", {}, bounds)
    for n in range(MOST_SERIES):
        metrics.add_series(1, "m", {"n": str(n)}, [])
    with pytest.raises(ValueError, match="more than"):
        metrics.add_series(1, "m", {"n": "one more"}, [])
