"""The statistics extension (spec 8), read from the meters every front process keeps anyway.

A version that is loaded again starts anew: what its meters said when it was first seen is taken off.
The meters count batches; a request's share of queue and compute time is the mean of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.metrics import Registry, names
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version, VersionState

Totals = Mapping[tuple[str, ...], tuple[int, float]]
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Counts:
    """What the meters say of one version. Times are seconds, sums over requests or over batches."""

    requests: int = 0
    requests_s: float = 0.0
    failures: int = 0
    rows: int = 0
    batches: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0

    @property
    def share(self) -> float:
        """Requests per batch: each of them waited for the whole batch."""
        return self.requests / self.batches if self.batches else 0.0

    def inferences(self, version: Version) -> int:
        """Rows run, or runs for a model without a batch axis."""
        return self.rows if version.batching else self.batches

    def since(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(Counts)))


class Statistics:
    """What versions did, over all front processes and dialects."""

    def __init__(self, registry: Registry, catalog: Catalog) -> None:
        self._registry = registry
        self._catalog = catalog
        self._first: dict[tuple[str, int], tuple[Version, Counts]] = {}
        self._last_ms: dict[tuple[str, int], int] = {}
        for model in catalog.models.values():
            for version in model.versions.values():
                self._meet(version)
        catalog.on_change.append(self._meet)

    def show(self, name: str = "", number: int | None = None) -> dict[str, Any]:
        """One entry per ready version, of one model or of all. Raises ServeError."""
        chosen = self._choose(name, number)
        counts = self._count(chosen)
        return {"model_stats": [self._show(version, counts[version]) for version in chosen]}

    def ready(self) -> list[Version]:
        """Every ready version, by name."""
        return self._choose("", None)

    def counts(self, versions: list[Version]) -> dict[Version, Counts]:
        """What these versions did since they were loaded. May run beside the event loop."""
        return self._count(versions)

    def ran(self, version: Version) -> None:
        """A request was answered just now."""
        self._last_ms[version.model, version.number] = time.time_ns() // 1_000_000

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

    def _meet(self, version: Version) -> None:
        if version.state is VersionState.AVAILABLE:
            self._before(version, self._read([version])[version])

    def _before(self, version: Version, now: Counts) -> Counts:
        """What the meters said when the version became available. Front processes that are not told of that
        keep on counting over a reload."""
        key = (version.model, version.number)
        known = self._first.get(key)
        if known is None or known[0] is not version:
            known = self._first[key] = (version, now)
            self._last_ms.pop(key, None)
        return known[1]

    def _count(self, versions: list[Version]) -> dict[Version, Counts]:
        now = self._read(versions)
        return {v: now[v].since(self._before(v, Counts())) for v in versions}

    def _read(self, versions: list[Version]) -> dict[Version, Counts]:
        totals = self._registry.totals(
            names.REQUEST_DURATION, names.REQUESTS, names.ROWS, names.QUEUE_DURATION, names.COMPUTE_DURATION
        )
        return {version: _read_one(version, *totals) for version in versions}

    def _show(self, version: Version, counts: Counts) -> dict[str, Any]:
        compute = _duration(counts.requests, counts.compute_s * counts.share)
        nothing = _duration(0, 0)
        return {
            "name": version.model,
            "version": str(version.number),
            "last_inference": self._last_ms.get((version.model, version.number), 0),
            "inference_count": counts.inferences(version),
            "execution_count": counts.batches,
            "inference_stats": {
                "success": _duration(counts.requests, counts.requests_s),
                "fail": _duration(counts.failures, 0),
                "queue": _duration(counts.requests, counts.queue_s * counts.share),
                "compute_input": _duration(counts.requests, 0),
                "compute_infer": compute,
                "compute_output": _duration(counts.requests, 0),
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "response_stats": {},
            "batch_stats": [],
            "memory_usage": [],
        }


def _read_one(
    version: Version, durations: Totals, requests: Totals, rows: Totals, queue: Totals, compute: Totals
) -> Counts:
    who = (version.model, str(version.number))
    answered = [total for labels, total in durations.items() if labels[:2] == who]
    refused = (n for labels, (n, _) in requests.items() if labels[:2] == who and labels[-1] != "OK")
    batches, compute_s = compute.get(who, (0, 0.0))
    return Counts(
        requests=sum(count for count, _ in answered),
        requests_s=sum(seconds for _, seconds in answered),
        failures=sum(refused),
        rows=rows.get(who, (0, 0.0))[0],
        batches=batches,
        queue_s=queue.get(who, (0, 0.0))[1],
        compute_s=compute_s,
    )


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": max(round(seconds * NS), 0)}
