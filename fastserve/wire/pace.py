"""How long a client takes: facts about a connection in, a verdict out. No I/O and no clock of its own.

The listener looks at every connection about once a second. A phase is told from the one before by
comparing with the last look, so that a request costs no reading of the clock; limits are therefore
kept to within one look.
"""

from __future__ import annotations

from enum import Enum

from fastserve.config import Limits
from fastserve.wire.faults import WireFault, too_slow

LINGER_S = 1.0  # how long a connection closed by us drops input, so that a reset cannot eat the reply


class Verdict(Enum):
    """What is to be done about a connection."""

    FINE = "fine"
    IDLE = "idle"
    SLOW_HEAD = "slow head"
    SLOW_BODY = "slow body"
    STALLED = "stalled"
    LINGERED = "lingered"


class Phase(Enum):
    """What a connection is waiting for."""

    REQUEST = "request"  # nothing has been sent, nothing is owed
    HEAD = "head"
    BODY = "body"
    REPLY = "reply"  # the server's turn: no limit here
    END = "end"  # the last reply is out, the client should hang up


class Pace:
    """One connection's memory between looks."""

    __slots__ = ("_calls", "_phase", "_received", "_since_s", "_unsent", "_unsent_since_s")

    def __init__(self) -> None:
        self._phase = Phase.REPLY
        self._calls = -1
        self._since_s = 0.0  # when this phase, or this stretch of a body, was first seen
        self._received = 0
        self._unsent = 0
        self._unsent_since_s = 0.0

    def judge(
        self, phase: Phase, calls: int, received: int, unsent: int, now: float, limits: Limits
    ) -> Verdict:
        """`calls` begun so far tell two phases of one kind apart. `received` counts body bytes, `unsent`
        bytes the client has not taken; `now` in seconds."""
        if (unsent or self._unsent) and self._is_stalled(unsent, now, limits.write_stall_s):
            return Verdict.STALLED
        if phase is not self._phase or calls != self._calls or (phase is Phase.END and unsent):
            self._phase = phase
            self._calls = calls
            self._since_s = now
            self._received = received
            return Verdict.FINE
        passed = now - self._since_s
        if phase is Phase.REQUEST and passed >= limits.idle_timeout_s:
            return Verdict.IDLE
        if phase is Phase.HEAD and passed >= limits.header_timeout_s:
            return Verdict.SLOW_HEAD
        if phase is Phase.END and passed >= LINGER_S:
            return Verdict.LINGERED
        if phase is Phase.BODY and passed >= limits.header_timeout_s:
            return self._judge_stretch(received, now, limits.body_bytes_per_s * passed)
        return Verdict.FINE

    def _is_stalled(self, unsent: int, now: float, limit_s: float) -> bool:
        if unsent == 0 or unsent < self._unsent or self._unsent == 0:
            self._unsent_since_s = now
        self._unsent = unsent
        return unsent > 0 and now - self._unsent_since_s >= limit_s

    def _judge_stretch(self, received: int, now: float, least: float) -> Verdict:
        """A body must keep its rate over every stretch, not only since it began."""
        if received - self._received < least:
            return Verdict.SLOW_BODY
        self._since_s = now
        self._received = received
        return Verdict.FINE


def slowness(verdict: Verdict, limits: Limits) -> WireFault:
    """What a client that is too slow is told."""
    if verdict is Verdict.SLOW_HEAD:
        return too_slow(
            "The header block did not arrive in time", "header_timeout_s", limits.header_timeout_s
        )
    text = "The request body arrives too slowly, in bytes per second"
    return too_slow(text, "body_bytes_per_s", limits.body_bytes_per_s)
