"""Metrics of the server: the registry, the catalogue of metrics, Prometheus text, readiness."""

from fastserve.metrics.exposition import CONTENT_TYPE, Metric
from fastserve.metrics.readiness import Heartbeat, LoadFailure, ModelReadiness, Readiness, ServerState
from fastserve.metrics.registry import Family, Registry

__all__ = [
    "CONTENT_TYPE",
    "Family",
    "Heartbeat",
    "LoadFailure",
    "Metric",
    "ModelReadiness",
    "Readiness",
    "Registry",
    "ServerState",
]
