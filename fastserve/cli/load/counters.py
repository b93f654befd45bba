"""What one process of a load saw after its warm-up. `statuses` are HTTP's numbers or gRPC's names."""

from __future__ import annotations

from typing import Any

from fastserve.cli.load.histogram import Histogram


class Counters:
    """What all connections of this process saw after the warm-up."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self.statuses: dict[str, int] = {}
        self.faults: dict[str, int] = {}
        self.body_bytes = 0
        self.counting = False
        self.stopping = False

    def answered(self, status: str, latency_ns: int, body_bytes: int) -> None:
        if self.counting:
            self.histogram.add(latency_ns)
            self.statuses[status] = self.statuses.get(status, 0) + 1
            self.body_bytes += body_bytes

    def failed(self, fault: str) -> None:
        if self.counting:
            self.faults[fault] = self.faults.get(fault, 0) + 1

    def result(self) -> dict[str, Any]:
        counts = {str(bucket): count for bucket, count in self.histogram.counts.items()}
        return {
            "histogram": counts,
            "statuses": self.statuses,
            "faults": self.faults,
            "body_bytes": self.body_bytes,
        }
