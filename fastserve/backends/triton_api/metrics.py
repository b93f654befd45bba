"""Metrics of a model's own, as `triton_python_backend_utils` has them.

    family = pb_utils.MetricFamily(name="seen", description="...", kind=pb_utils.MetricFamily.COUNTER)
    family.Metric(labels={"model": "m"}).increment(1)

The server keeps them (metrics/custom.py). Changes of a batch are sent in one message when it has run, changes
of other threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from fastserve.backends import model_callbacks
from fastserve.backends.triton_api.tensor import TritonModelException
from fastserve.errors import ServeError

MOST_CHANGES = 400  # of one message
_FAILED = "Failed to {} metric value: {}"


class MetricKind(IntEnum):
    """The kind of a metric family."""

    COUNTER, GAUGE, HISTOGRAM = 0, 1, 2


class MetricFamily:
    """Metrics of one name, distinguished by labels."""

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Declare the family. Raises TritonModelException for an invalid name, or one that another kind
        has."""
        self._name, self._kind = name, MetricKind(kind)
        try:
            model_callbacks.call("family", name=name, help=description, kind=self._kind.name.lower())
        except ServeError as error:
            raise TritonModelException(f"Error when creating MetricFamily: {error.message}") from None

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels, one for all callers. Raises TritonModelException."""
        if self._kind is MetricKind.HISTOGRAM and buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        made = dict(labels or {})
        if not all(isinstance(text, str) for pair in made.items() for text in pair):
            raise TritonModelException("Failed to create metric. Labels must be text.")
        try:
            told = model_callbacks.call(
                "metric", family=self._name, labels=made, buckets=[float(b) for b in buckets or ()]
            )
        except ServeError as error:
            raise TritonModelException(f"Error when creating Metric: {error.message}") from None
        return Metric(self._kind, told["number"])


class Metric:
    """One metric. Methods raise TritonModelException where its kind has no such operation."""

    def __init__(self, kind: MetricKind, number: int) -> None:
        self._kind, self._number = kind, number

    def increment(self, value: float) -> None:
        """Add to a counter (nothing below 0) or a gauge."""
        if self._kind is MetricKind.HISTOGRAM or (self._kind is MetricKind.COUNTER and value < 0):
            self._refuse("increment", value)
        changes.put(self._number, "increment", float(value))

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self._kind is not MetricKind.GAUGE:
            self._refuse("set", value)
        changes.put(self._number, "set", float(value))

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        if self._kind is not MetricKind.HISTOGRAM:
            self._refuse("observe", value)
        changes.put(self._number, "observe", float(value))

    def value(self) -> float:
        """Return the value of a counter or a gauge, over all instances."""
        if self._kind is MetricKind.HISTOGRAM:
            self._refuse("get", "of a histogram")
        changes.flush()
        try:
            return float(model_callbacks.call("value", number=self._number)["value"])
        except ServeError as error:
            raise TritonModelException(_FAILED.format("get", error.message)) from None

    def _refuse(self, what: str, value: Any) -> None:
        text = f"a {self._kind.name.lower()} cannot {what} {value}"
        raise TritonModelException(_FAILED.format(what, text))


class Changes:
    """Changes of metrics that have not been sent yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, str, float]] = []
        self.gathering = False  # a batch runs, and will flush

    def put(self, number: int, how: str, value: float) -> None:
        """Add a change; consecutive ones of one counter are added up."""
        with self._lock:
            last = self._waiting[-1] if self._waiting else (0, "", 0.0)
            if last[:2] == (number, "increment") == (number, how):
                self._waiting[-1] = (number, how, last[2] + value)
            else:
                self._waiting.append((number, how, value))
            if self.gathering and len(self._waiting) < MOST_CHANGES:
                return
        self.flush()

    def flush(self) -> None:
        """Send all changes."""
        with self._lock:
            found, self._waiting = self._waiting, []
            if found:  # under the lock: a gauge shows what was set last
                model_callbacks.notify("change", changes=found)


changes = Changes()
