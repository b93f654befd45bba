"""What the server knows about its own health: filled by the server, read by the ops dialect.

Ready and live are different questions. Ready: would a request for every wanted model be answered
now? Live: does the event loop still turn?
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModelReadiness:
    """One model as a probe sees it; `reason` says in words a client may read why it is not ready."""

    ready: bool
    reason: str = ""
    workers_alive: int = 0
    workers_wanted: int = 0


@dataclass(slots=True)
class Readiness:
    """False until the server says otherwise: a server that forgot to fill it is not ready."""

    ready: bool = False
    reason: str = "starting"
    models: dict[str, ModelReadiness] = field(default_factory=dict)


@dataclass(slots=True)
class Heartbeat:
    """When the event loop last turned. The server beats from a timer; nobody beating is not dead.

    `stale_after_s` is how long the loop may be stuck before a probe says so.
    """

    stale_after_s: float = 10.0
    beat_ns: int = 0  # time.monotonic_ns()

    def beat(self) -> None:
        self.beat_ns = time.monotonic_ns()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat, 0 before the first."""
        return (time.monotonic_ns() - self.beat_ns) / 1e9 if self.beat_ns else 0.0

    @property
    def stale(self) -> bool:
        return self.age_s > self.stale_after_s
