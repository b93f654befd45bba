"""Lines of the log that clients cause: each text at most once a minute for a listener, however many come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0
MOST_TEXTS = 64  # of which it knows when they were said; past that everything waits


class Seldom:
    """A listener's."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, float] = {}
        self._more: dict[str, int] = {}

    def warn(self, text: str, *values: object) -> None:
        """Write it, and how often it has been held back since the last time."""
        now, last = self._clock(), self._said.get(text)
        if (last is None and len(self._said) >= MOST_TEXTS) or (last is not None and now - last < EVERY_S):
            self._more[text] = self._more.get(text, 0) + 1
            return
        self._said[text] = now
        more = self._more.pop(text, 0)
        self._log.warning(text + (f" ({more} more since)" if more else ""), *values)
