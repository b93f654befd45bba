"""Triton's own metric names (spec 12), from the same counts as the statistics: what its dashboards ask for.

Only what this server measures is shown; there is no GPU to report on and no pinned memory pool.
"""

from __future__ import annotations

from fastserve.dialects.kserve_v2.statistics import Counts, Statistics
from fastserve.repository.version import Version

_HELP: tuple[tuple[str, str], ...] = (
    ("nv_inference_request_success", "Number of successful inference requests, all batch sizes"),
    ("nv_inference_request_failure", "Number of failed inference requests, all batch sizes"),
    ("nv_inference_count", "Number of inferences performed (does not include cached requests)"),
    ("nv_inference_exec_count", "Number of model executions performed (does not include cached requests)"),
    ("nv_inference_request_duration_us", "Cumulative inference request duration in microseconds"),
    ("nv_inference_queue_duration_us", "Cumulative inference queuing duration in microseconds"),
    ("nv_inference_compute_infer_duration_us", "Cumulative compute inference duration in microseconds"),
)


def write_nv_metrics(statistics: Statistics, versions: list[Version]) -> bytes:
    """Prometheus text; every counter of every version given. May run beside the event loop."""
    counts = statistics.counts(versions)
    samples = [(_labels(version), _values(version, found)) for version, found in counts.items()]
    lines: list[str] = []
    for name, help in _HELP:
        lines += [f"# HELP {name} {help}", f"# TYPE {name} counter"]
        more = ',reason="OTHER"' if name.endswith("_failure") else ""
        lines += [f"{name}{{{labels}{more}}} {values[name]}" for labels, values in samples]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _labels(version: Version) -> str:
    name = version.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'model="{name}",version="{version.number}"'


def _values(version: Version, counts: Counts) -> dict[str, int]:
    return {
        "nv_inference_request_success": counts.requests,
        "nv_inference_request_failure": counts.failures,
        "nv_inference_count": counts.inferences(version),
        "nv_inference_exec_count": counts.batches,
        "nv_inference_request_duration_us": round(counts.requests_s * 1e6),
        "nv_inference_queue_duration_us": round(counts.queue_s * counts.share * 1e6),
        "nv_inference_compute_infer_duration_us": round(counts.compute_s * counts.share * 1e6),
    }
