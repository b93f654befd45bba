"""A rate limit for log lines that clients cause: each text once a minute, or a few lines of each cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

EVERY_S = 60.0

MOST_TEXTS = 64  # whose times are remembered; further ones are held back

FEW = 10  # lines of one cause in EVERY_S


class RateLimitedLog:
    """Limit the lines of one logger."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, float] = {}
        self._more: dict[str, int] = {}
        self._few_since, self._few = clock(), dict[str, int]()

    def warn(self, text: str, *values: object) -> None:
        """Write the text, and how often it was held back since the last time."""
        more = self._turn(text)
        if more is not None:
            self._log.warning(text + more, *values)

    def error(self, text: str, error: Exception) -> None:
        """Write the text and the exception, limited by its place; the first one has a traceback."""
        place = f"{text}: {type(error).__name__} at {_place(error)}"
        known = place in self._said
        more = self._turn(place)
        if more is not None:
            self._log.error("%s%s: %.200s", place, more, error, exc_info=None if known else error)

    def few(self, cause: str) -> str | None:
        """Return text to append to a line of this cause; None where FEW were written within EVERY_S.

        Beyond MOST_TEXTS causes the rest count as one."""
        now, held = self._clock(), 0
        if now - self._few_since >= EVERY_S:
            held = sum(max(0, count - FEW) for count in self._few.values())
            self._few_since, self._few = now, {}
        cause = cause if cause in self._few or len(self._few) < MOST_TEXTS else ""
        count = self._few[cause] = self._few.get(cause, 0) + 1
        if count > FEW:
            return None
        return f" ({held} such lines more before)" if held else ""

    def _turn(self, text: str) -> str | None:
        """Return a note on the lines held back; None to hold this one back too."""
        now, last = self._clock(), self._said.get(text)
        if (last is None and len(self._said) >= MOST_TEXTS) or (last is not None and now - last < EVERY_S):
            self._more[text] = self._more.get(text, 0) + 1
            return None
        self._said[text] = now
        more = self._more.pop(text, 0)
        return f" ({more} more since)" if more else ""


def _place(error: Exception) -> str:
    """Return the function and line that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"


log = logging.getLogger(__name__)

_limited_log = RateLimitedLog(log)

T = TypeVar("T")


def run_all(
    things: Iterable[T],
    work: Callable[[T], object],
    failed: Callable[[T, Exception], object] | None = None,
) -> None:
    """Call `work` for each thing. A failure stops none of the others.

    `failed` is called with a thing that failed and its exception, and must not raise. Without it the
    exception is logged, once a minute for each place.
    """
    for thing in things:
        try:
            work(thing)
        except Exception as error:
            if failed is None:
                _limited_log.error("one of many failed; the others go on", error)
            else:
                failed(thing, error)
