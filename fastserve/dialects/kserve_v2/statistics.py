"""The statistics extension (spec 8): what `engine.counters` knows of every version, under Triton's names.

Counts start anew when a version is loaded again. Requests of every dialect count; one that never reached the
model's queue, as its inputs were wrong, is no inference request, as in the original.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.engine import BatchCounts, VersionCounts, counts_of
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version

# InferStatistics' fields, which VersionCounts has by the same names.
KINDS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip


class Statistics:
    """The statistics of a catalog's versions."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def show(self, name: str = "", number: int | None = None) -> dict[str, Any]:
        """One entry per ready version, of one model or of all. Raises ServeError."""
        return {"model_stats": [_show(version, counts_of(version)) for version in self._choose(name, number)]}

    def _choose(self, name: str, number: int | None) -> list[Version]:
        catalog = self._catalog
        if not name:
            return [
                version for known in sorted(catalog.models) for version in catalog.models[known].available()
            ]
        if name not in catalog.models or not catalog.models[name].available():
            raise invalid(f"requested model '{name}' is not available")
        if number is None:
            return catalog.models[name].available()
        version = catalog.available(name, number)
        if version is None:
            raise invalid(f"requested model version is not available for model '{name}'")
        return [version]


def _show(version: Version, counts: VersionCounts) -> dict[str, Any]:
    return {
        "name": version.model,
        "version": str(version.number),
        "last_inference": counts.last_ms,
        "inference_count": counts.inferences,
        "execution_count": counts.executions,
        "inference_stats": {kind: msgspec.to_builtins(getattr(counts, kind)) for kind in KINDS},
        "response_stats": msgspec.to_builtins(counts.responses, str_keys=True),
        "batch_stats": [_show_batch(batch) for batch in counts.batches],
        "memory_usage": [],
    }


def _show_batch(batch: BatchCounts) -> dict[str, Any]:
    return {
        "batch_size": batch.rows,
        "compute_input": {"count": batch.runs, "ns": batch.input_ns},
        "compute_infer": {"count": batch.runs, "ns": batch.infer_ns},
        "compute_output": {"count": batch.runs, "ns": batch.output_ns},
    }
