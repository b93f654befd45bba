"""An admission queue with priority levels, and a policy for each: who runs next, who is turned away.

    level 1:  in time, oldest first | past their time with action DELAY, oldest first
    level 2:  ...                                               a level is served when those above are empty

No clock, no loop: `queued` is the shell around it. Texts and meanings are Triton's (spec/triton_v2
section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastserve.config.options import QueueOptions
from fastserve.errors import Kind, ServeError

EXPIRED = "Request timeout expired"
FULL = "Exceeds maximum queue size"


@dataclass(frozen=True, slots=True)
class Policy:
    """How one level queues. Times in nanoseconds, 0 for none; `most` requests, 0 for any number."""

    reject: bool = True
    timeout_ns: int = 0
    may_override: bool = False
    most: int = 0

    def timeout_of(self, asked_us: int) -> int:
        """A request may only shorten the model's own time, and only where the policy lets it."""
        asked_ns = asked_us * 1000
        if self.may_override and 0 < asked_ns < self.timeout_ns:
            return asked_ns
        return self.timeout_ns


@dataclass(frozen=True, slots=True)
class Levels:
    """The policies of levels 1, 2, ... and the level of a request that names none of them."""

    policies: tuple[Policy, ...] = (Policy(),)
    default: int = 1

    @property
    def plain(self) -> bool:
        """True when a queue with these levels is nothing but a queue."""
        return self.policies == (Policy(),)


@dataclass(slots=True, eq=False)
class Queued:
    """One request in the queue. `what` is the shell's own; `gone` ones are passed over."""

    what: Any
    rows: int
    level: int
    arrived_ns: int
    expires_ns: int  # 0 for never
    gone: bool = False
    late: bool = False


@dataclass(slots=True)
class _Level:
    policy: Policy
    waiting: deque[Queued] = field(default_factory=deque)
    late: deque[Queued] = field(default_factory=deque)
    size: int = 0


def levels_of(options: QueueOptions) -> Levels:
    """The levels a model asks for."""
    policies = (
        Policy(given.reject, given.timeout_us * 1000, given.may_override, given.max_requests)
        for given in options.policies
    )
    return Levels(tuple(policies), options.default_level)


class AdmissionQueue:
    """Requests that wait to be put into a batch."""

    def __init__(self, levels: Levels) -> None:
        self._levels = [_Level(policy) for policy in levels.policies]
        self._default = levels.default
        self.rows = 0  # of those who wait

    def __len__(self) -> int:
        return sum(level.size for level in self._levels)

    def push(
        self, what: Any, rows: int, now_ns: int, *, priority: int = 0, timeout_us: int = 0, id: str = ""
    ) -> Queued:
        """Queue it; `priority` 0 or beyond the levels is the default. Raises ServeError UNAVAILABLE."""
        number = priority if 1 <= priority <= len(self._levels) else self._default
        level = self._levels[number - 1]
        if level.policy.most and level.size >= level.policy.most:
            raise ServeError(Kind.UNAVAILABLE, f"[request id: {id or '<id_unknown>'}] {FULL}")
        timeout_ns = level.policy.timeout_of(timeout_us)
        queued = Queued(what, rows, number, now_ns, now_ns + timeout_ns if timeout_ns else 0)
        level.waiting.append(queued)
        level.size += 1
        self.rows += rows
        return queued

    def in_order(self) -> Iterator[Queued]:
        """Who would run next, and then who."""
        for level in self._levels:
            for queued in (*level.waiting, *level.late):
                if not queued.gone:
                    yield queued

    def take(self, queued: Queued) -> None:
        """It runs, or its client left."""
        if not queued.gone:
            queued.gone = True
            level = self._levels[queued.level - 1]
            level.size -= 1
            self.rows -= queued.rows
            for line in (level.waiting, level.late):
                while line and line[0].gone:
                    line.popleft()

    def expire(self, now_ns: int) -> list[Queued]:
        """Requests past their time: those to be turned away are returned, the others wait behind."""
        rejected = []
        for level in self._levels:
            for queued in [
                q for q in level.waiting if q.expires_ns and q.expires_ns <= now_ns and not q.gone
            ]:
                if level.policy.reject:
                    self.take(queued)
                    rejected.append(queued)
                else:
                    queued.late = True
                    level.late.append(queued)
            if not level.policy.reject:
                level.waiting = deque(q for q in level.waiting if not q.late and not q.gone)
        return rejected

    def next_expiry_ns(self) -> int:
        """When `expire` next has something to do; 0 for never."""
        times = (q.expires_ns for level in self._levels for q in level.waiting if q.expires_ns and not q.gone)
        return min(times, default=0)
