"""How much slower this machine is, at this moment, than the one on which the bounds on CPU time were set.

The CPU time of one piece of work differs by a factor of three between hours: other machines share its
processors. A bound on CPU time is multiplied by `slowness()`, so it holds for the work and not for the hour.
"""

from __future__ import annotations

import time

ADDITIONS, USUAL_S = 1_000_000, 0.05
TRIES = 5


def slowness() -> float:
    """At least 1. It takes a quarter of a second: ask when a bound was passed, not before."""
    return max(1.0, min(_add_s() for _ in range(TRIES)) / USUAL_S)


def _add_s() -> float:
    began, total = time.thread_time(), 0
    for number in range(ADDITIONS):
        total += number
    return time.thread_time() - began
