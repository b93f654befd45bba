"""Triton's own metric names (spec 12), from the same counts as the statistics: what its dashboards ask for.

Only what this server measures is shown; there is no GPU to report on and no pinned memory pool.
"""

from __future__ import annotations

from fastserve.dialects.kserve_v2.statistics import Statistics
from fastserve.engine.counts import VersionCounts, counts_of
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
    samples = [(_labels(version), _values(counts_of(version))) for version in versions]
    lines: list[str] = []
    for name, help in _HELP:
        lines += [f"# HELP {name} {help}", f"# TYPE {name} counter"]
        more = ',reason="OTHER"' if name.endswith("_failure") else ""
        lines += [f"{name}{{{labels}{more}}} {values[name]}" for labels, values in samples]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _labels(version: Version) -> str:
    name = version.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'model="{name}",version="{version.number}"'


def _values(counts: VersionCounts) -> dict[str, int]:
    return {
        "nv_inference_request_success": counts.success.count,
        "nv_inference_request_failure": counts.fail.count,
        "nv_inference_count": counts.inferences,
        "nv_inference_exec_count": counts.executions,
        "nv_inference_request_duration_us": counts.success.ns // 1000,
        "nv_inference_queue_duration_us": counts.queue.ns // 1000,
        "nv_inference_compute_infer_duration_us": counts.compute_infer.ns // 1000,
    }
