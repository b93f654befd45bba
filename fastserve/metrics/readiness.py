"""Health of the server, filled by the server and read by the ops dialect; and the use of the machine.

Ready and live are different questions. Ready: would a request for every wanted model be answered now?
Live: does the event loop still turn?
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from fastserve.metrics.exposition import write_family, write_labels

# Columns of the first line of /proc/stat that are work, and that are not: user nice system irq softirq steal.
_BUSY, _IDLE = (0, 1, 2, 5, 6, 7), (3, 4)


class MachineUsage:
    """CPU and memory use of the whole machine, from /proc, as Triton reports them."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._read_times()

    def cpu_utilization(self) -> float:
        """Return the use of all cores since the last call, between 0 and 1."""
        now = self._read_times()
        busy, idle = (max(a - b, 0) for a, b in zip(now, self._before, strict=True))
        self._before = now
        return busy / (busy + idle) if busy + idle else 0.0

    def memory_bytes(self) -> tuple[int, int]:
        """Return (total, used), where used is all that is not available."""
        found = dict(line.split(":", 1) for line in self._text("meminfo").splitlines() if ":" in line)
        total, available = (_kilobytes(found.get(name, "")) for name in ("MemTotal", "MemAvailable"))
        return total, max(total - available, 0)

    def _read_times(self) -> tuple[int, int]:
        fields = self._text("stat").partition("\n")[0].split()[1:]
        ticks = [int(text) for text in fields[:8] if text.isdecimal()]
        ticks += [0] * (8 - len(ticks))
        return sum(ticks[i] for i in _BUSY), sum(ticks[i] for i in _IDLE)

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:  # a sandbox that hides it: zeros, as of a machine nobody knows
            return ""


def _kilobytes(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdecimal() else 0


REASON_MAX = 200

"""Characters of a label."""


@dataclass(slots=True)
class LoadFailure:
    """A change of a model's folder that could not be loaded, while an older version may go on serving.

    `at` is Unix time, `since` the same in ISO form, `reason` the first line of the error.
    """

    at: float
    since: str
    reason: str

    @classmethod
    def of(cls, at: float, text: str) -> LoadFailure:
        since = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(at, since, text.partition("\n")[0])


@dataclass(slots=True)
class ModelReadiness:
    """One model as a probe sees it. `reason` is why it is not ready, in words for clients."""

    ready: bool
    reason: str = ""
    workers_alive: int = 0
    workers_wanted: int = 0
    failed: LoadFailure | None = None


class ServerState(Enum):
    """Phase of the server's life, ready or not."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class Readiness:
    """Readiness of the server, False until it says otherwise. Decisions are taken on `ready` and `state`."""

    ready: bool = False
    reason: str = "starting"
    models: dict[str, ModelReadiness] = field(default_factory=dict)
    state: ServerState = ServerState.STARTING


def write_failures(models: Mapping[str, ModelReadiness]) -> list[str]:
    """Return a series for each model whose change could not be loaded.

    The reason is a label, so the registry, which keeps every series for good, does not hold them.
    """
    help = "Unix time since which what a model's folder wants could not be loaded, and why."
    samples = [
        (write_labels({"model": name, "reason": found.failed.reason[:REASON_MAX]}), found.failed.at)
        for name, found in sorted(models.items())
        if found.failed is not None
    ]
    return write_family("fastserve_model_load_failed_since_seconds", "gauge", help, samples)


@dataclass(slots=True)
class Heartbeat:
    """Time of the event loop's last turn, which a timer of the server reports. Without one it is not stale.

    `stale_after_s` is how long the loop may be stuck before a probe says so.
    """

    stale_after_s: float = 10.0
    beat_ns: int = 0  # time.monotonic_ns()

    def beat(self) -> None:
        self.beat_ns = time.monotonic_ns()

    @property
    def age_s(self) -> float:
        """Return the seconds since the last beat, 0 before the first."""
        return (time.monotonic_ns() - self.beat_ns) / 1e9 if self.beat_ns else 0.0

    @property
    def stale(self) -> bool:
        return self.age_s > self.stale_after_s
