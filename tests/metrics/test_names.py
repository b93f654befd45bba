"""The catalogue: everything the issue asks to see is there, well-formed and documented."""

from __future__ import annotations

from pathlib import Path

from fastserve.metrics import Registry, names

WANTED = """
requests_total request_duration_seconds queue_duration_seconds batch_form_duration_seconds rejects_total
compute_duration_seconds encode_duration_seconds batch_rows padding_rows_total queue_rows cancels_total
worker_restarts_total workers_alive connections decode_duration_seconds wire_rejects_total
"""


def test_all_that_was_asked_for() -> None:
    assert {f"fastserve_{name}" for name in WANTED.split()} <= set(names.CATALOGUE)


def test_every_metric_is_well_formed() -> None:
    found = Registry()
    for metric in names.CATALOGUE.values():
        found.family(metric).of(*metric.labels)
        assert metric.help.endswith(".")
        assert metric.kind != "counter" or metric.name.endswith("_total")
        assert not set(metric.labels) & {"path", "target", "client", "request_id"}
    text = found.expose().decode()
    assert all(f"# TYPE {name} " in text for name in names.CATALOGUE)
    found.close()


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    assert [name for name in names.CATALOGUE if f"`{name}`" not in page] == []
