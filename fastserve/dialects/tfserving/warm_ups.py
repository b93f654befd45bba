"""Warm-up records on TensorFlow Serving's metrics page (spec 6.5): of the versions that the catalog has, one
observation for each load that brought some. What a load read and could not use is of that fault's status.

The time is that of reading the file and of running it, by the slowest worker.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastserve.dialects.tfserving.monitoring import LATENCY_BOUNDS_US, Spread, write_histogram, write_series
from fastserve.engine import counters_of
from fastserve.repository.version import Version

LATENCY = "/tensorflow/serving/model_warmup_latency"
RECORDS = "/tensorflow/serving/model_warmup_records_read"


def write_warm_ups(versions: Iterable[Version]) -> list[str]:
    """The lines; none before the first record."""
    spreads: dict[tuple[str, str], Spread] = {}
    records: dict[tuple[str, str], int] = {}
    for version in versions:
        for warm_up in counters_of(version).warm_ups:
            key = str(version.folder), warm_up.status
            spreads.setdefault(key, Spread()).add(warm_up.ns / 1000)
            records[key] = records.get(key, 0) + warm_up.records
    return [
        *write_histogram(LATENCY, LATENCY_BOUNDS_US, [(_labels(*key), one) for key, one in spreads.items()]),
        *write_series(RECORDS, "counter", [(_labels(*key), count) for key, count in records.items()]),
    ]


def _labels(path: str, status: str) -> dict[str, str]:
    return {"model_path": path, "status": status}
