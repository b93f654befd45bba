"""What one process of a load saw after its warm-up. `statuses` are HTTP's numbers or gRPC's names."""

from __future__ import annotations

from typing import Any

from fastserve.cli.load.histogram import Histogram


class TextCounters:
    """What streams of text brought: until the first piece, between two, and how many tokens."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._first, self._gaps = Histogram(), Histogram()
        self._pieces = 0  # within the measured time
        self._answers = [0, 0, 0]  # whole ones: how many, their tokens, their pieces

    def first(self, after_ns: int) -> None:
        if self._counters.measuring:
            self._first.add(after_ns)
            self._pieces += 1

    def gap(self, after_ns: int) -> None:
        if self._counters.measuring:
            self._gaps.add(after_ns)
            self._pieces += 1

    def whole(self, tokens: int, pieces: int) -> None:
        if self._counters.counting:
            self._answers = [a + b for a, b in zip(self._answers, (1, tokens, pieces), strict=True)]

    def result(self) -> dict[str, Any]:
        return {
            "first": as_text(self._first),
            "gaps": as_text(self._gaps),
            "pieces": self._pieces,
            "answers": self._answers,
        }


class Counters:
    """What all connections of this process saw after the warm-up."""

    def __init__(self) -> None:
        self.texts = TextCounters(self)
        self.histogram = Histogram()
        self.statuses: dict[str, int] = {}
        self.faults: dict[str, int] = {}
        self.body_bytes = 0
        self.counting = False
        self.stopping = False

    @property
    def measuring(self) -> bool:
        """Within the measured time, and not past its end."""
        return self.counting and not self.stopping

    def answered(self, status: str, latency_ns: int, body_bytes: int) -> None:
        if self.counting:
            self.histogram.add(latency_ns)
            self.statuses[status] = self.statuses.get(status, 0) + 1
            self.body_bytes += body_bytes

    def failed(self, fault: str) -> None:
        if self.counting:
            self.faults[fault] = self.faults.get(fault, 0) + 1

    def result(self) -> dict[str, Any]:
        return {
            "histogram": as_text(self.histogram),
            "texts": self.texts.result(),
            "statuses": self.statuses,
            "faults": self.faults,
            "body_bytes": self.body_bytes,
        }


def as_text(histogram: Histogram) -> dict[str, int]:
    """Its counts as JSON has them."""
    return {str(bucket): count for bucket, count in histogram.counts.items()}
