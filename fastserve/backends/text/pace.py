"""How much of prompts a step may read, so that those who write do not wait long for their next tokens.

    room = pace.room(step_tokens, writing, reading)      tokens of prompts
    pace.took(writing, read, ns)                         how long the step was

A step that reads is to take no longer than `step_ms`, or than twice a step that only writes, where that is
more: reading then has half of the time, however slow the model. What a token costs is measured, step by step.
Where more sequences that are to write wait to be read than write, they go first: all of `step_tokens` is
theirs. What is read for a vector alone holds nobody who writes up for longer, however much of it there is.
"""

from __future__ import annotations

LEAST_READ = 16
"""Tokens of prompts in a step that those who write would fill alone: who waits gets on, slowly."""
SLOWER, FASTER = 1 / 4, 1 / 2
"""What one step weighs in an average: a machine that was busy for once is soon forgotten."""


class Pace:
    """That of one engine."""

    def __init__(self, step_ms: float) -> None:
        """0: steps may take any time."""
        self._step_ns = step_ms * 1e6
        self._writers, self._write_ns = 1, 0.0
        """The last step that only wrote: how many tokens, and how long."""
        self._token_ns = 0.0
        """A token more in a step. 0: not known yet."""

    def room(self, most: int, writing: int, reading: int) -> int:
        """Tokens of prompts in a step of at most `most` tokens, where `reading` sequences could be
        read that are to write."""
        least = min(most, LEAST_READ)
        room = max(most - writing, least)
        if not (self._step_ns and self._token_ns) or not writing or reading > writing:
            return room
        write_ns = self._known_ns(writing) + self._more(writing) * self._token_ns
        left_ns = max(self._step_ns, 2 * write_ns) - write_ns
        return min(room, max(int(left_ns / self._token_ns), least))

    def took(self, writing: int, read: int, ns: int) -> None:
        """A step is over: so many tokens were written and read."""
        if read:
            beside_ns = max(ns - self._known_ns(writing), ns / 4)
            self._token_ns = _average(self._token_ns, beside_ns / (read + self._more(writing)))
        else:
            before_ns = self._write_ns if writing == self._writers else 0.0
            self._writers, self._write_ns = writing, _average(before_ns, ns)

    def _known_ns(self, writing: int) -> float:
        """What a step of so many would take to write, as far as it is like the last that only wrote."""
        return self._write_ns * min(1.0, writing / self._writers)

    def _more(self, writing: int) -> int:
        """Tokens that step did not have: they cost what any costs."""
        return max(0, writing - self._writers)


def _average(before: float, now: float) -> float:
    if not before:
        return now
    return before + (now - before) * (SLOWER if now > before else FASTER)
