"""The server's counters of one model and dialect, as far as they tell of requests.

    before = read(rig, "tfserving", "columns-fast")
    ...
    after = read(rig, "tfserving", "columns-fast")
    assert after - before == Told(OK=2, UNAVAILABLE=1, queue_rows=1).counted_of("columns")

fastserve's own metrics by their labels, and what is behind nv_* and Triton's statistics.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fastserve.engine.counters import counts_of
from fastserve.errors import Kind
from fastserve.metrics import names

if TYPE_CHECKING:
    from tests.conformance.rig import Rig

KINDS = {"OK", *(kind.name for kind in Kind)}
STAGES = {
    "duration": names.REQUEST_DURATION,
    "decode": names.DECODE_DURATION,
    "encode": names.ENCODE_DURATION,
}


class Told(Counter[str]):
    """Counts that are expected: requests by how they ended, and besides

    queue_rows, queue_bytes, deadline     why they were turned away (`rejects_total`)
    queued, running                       where they were when their client left (`cancels_total`)
    REJECTED, CANCELED, BACKEND, OTHER    the same as Triton has it (`nv_inference_request_failure`)
    hits, misses                          of the response cache
    unread                                those that were never read, and so have no time of reading
    """

    def counted_of(self, form: str) -> Counter[str]:
        """With what follows of it."""
        told: Counter[str] = Counter(self)
        unread = told.pop("unread", 0)
        good = told["OK"]
        told |= {"duration": good, "encode": good, "success": good}
        told["decode"] = sum(self[kind] for kind in KINDS) + self["queued"] + self["running"] - unread
        if form == "cached":
            told["misses"] = told["misses"] or told["decode"] - told["hits"]
        return +told


def count_cause(rig: Rig, model: str, cause: str) -> int:
    """How many requests of a model were turned away or left for a cause. A scenario may ask again and again:
    to read everything takes twenty times as long."""
    found = rig.server.registry.read(names.REJECTS, names.CANCELS)
    return sum(
        int(value)
        for series in found
        for (name, _, told), (value,) in series.items()
        if (name, told) == (model, cause)
    )


def read(rig: Rig, dialect: str, model: str) -> Counter[str]:
    """Everything so far."""
    registry = rig.server.registry
    found: Counter[str] = Counter()
    requests, rejects, cancels, retries, *stages = registry.read(
        names.REQUESTS, names.REJECTS, names.CANCELS, names.RETRIES, *STAGES.values()
    )
    for (name, _, spoken, status), (value,) in requests.items():
        if (name, spoken) == (model, dialect):
            found[status] += int(value)
    for series in (rejects, cancels):
        for (name, _, cause), (value,) in series.items():
            if name == model:
                found[cause] += int(value)
    found["retries"] = sum(int(value) for (name, _), (value,) in retries.items() if name == model)
    for stage, series in zip(STAGES, stages, strict=True):
        for (name, _, spoken), (*buckets, _) in series.items():
            if (name, spoken) == (model, dialect):
                found[stage] += int(sum(buckets))
    version = rig.server.catalog.available(model)
    if version is not None:
        told = counts_of(version)
        found |= {reason: took.count for reason, took in told.failures.items()}
        found |= {
            "success": told.success.count,
            "hits": told.cache_hit.count,
            "misses": told.cache_miss.count,
        }
        found["pending"] = told.pending
    return found
