"""What the server counts, and how it says so: the registry, the catalogue of metrics, readiness."""

from fastserve.metrics.exposition import CONTENT_TYPE
from fastserve.metrics.readiness import Heartbeat, ModelReadiness, Readiness
from fastserve.metrics.registry import Family, Registry
from fastserve.metrics.series import Metric

__all__ = ["CONTENT_TYPE", "Family", "Heartbeat", "Metric", "ModelReadiness", "Readiness", "Registry"]
