"""What a worker tells of its device, at most once a second: times of the stages, and how full it is.

    {"device": "cuda:0", "pinned": true, "batches": 12, "copy_in_ns": ..., "compute_ns": ...,
     "copy_out_ns": ...}

All but the first two are increments since the last time: they may be added up over workers that come and go.
The owner keeps the sums (engine/counters.py).
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from fastserve.backends import wishes
from fastserve.workers.control import ControlFault

EVERY_NS = 1_000_000_000


@dataclass(slots=True)
class DeviceReport:
    """What has happened since it was last told."""

    device: str
    pinned: bool = True
    batches: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    last_ns: int = 0

    def flew(self, copy_in_ns: int, compute_ns: int, copy_out_ns: int) -> None:
        """A batch has landed."""
        self.batches += 1
        self.copy_in_ns += copy_in_ns
        self.compute_ns += compute_ns
        self.copy_out_ns += copy_out_ns
        self.tell()

    def tell(self, *, at_once: bool = False) -> None:
        """Say it, where it is time to."""
        now = time.monotonic_ns()
        if not at_once and now - self.last_ns < EVERY_NS:
            return
        self.last_ns = now
        with contextlib.suppress(ControlFault):  # the loop hears that nobody listens; no batch fails of it
            wishes.tell(
                "device",
                device=self.device,
                pinned=self.pinned,
                batches=self.batches,
                copy_in_ns=self.copy_in_ns,
                compute_ns=self.compute_ns,
                copy_out_ns=self.copy_out_ns,
            )
        self.batches = self.copy_in_ns = self.compute_ns = self.copy_out_ns = 0
