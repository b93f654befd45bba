"""Who waits, and who is next: by priority, then by arrival. And whose time is up, waiting or not.

    waiting.add(sequence, now); waiting.next(now); waiting.remove(sequence)
    deadlines.add(sequence); deadlines.late(now)

With ageing, a sequence counts as one priority higher for each `ageing_ns` that it has waited. Within a
priority the oldest is always first, so only the five heads are ever compared.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from fastserve.backends.text.sequence import Sequence, State

PRIORITIES = range(1, 6)


class Waiting:
    """The line before the rows."""

    def __init__(self, ageing_ns: int = 0) -> None:
        self._lines: dict[int, OrderedDict[int, Sequence]] = {level: OrderedDict() for level in PRIORITIES}
        self._ageing_ns = ageing_ns

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, sequence: Sequence) -> None:
        """The last of its priority."""
        self._lines[sequence.priority][sequence.rid] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It has begun, or ended."""
        del self._lines[sequence.priority][sequence.rid]

    def next(self, now_ns: int) -> Sequence | None:
        """Who goes first; stays in line until it is removed."""
        heads = [next(iter(line.values())) for line in self._lines.values() if line]
        return min(heads, key=lambda one: self.rank(one, now_ns), default=None)

    def rank(self, sequence: Sequence, now_ns: int) -> tuple[int, int]:
        """The lower, the sooner; also of sequences that have left the line and are being read."""
        level = sequence.priority
        if self._ageing_ns:
            level = max(1, level - (now_ns - sequence.arrived_ns) // self._ageing_ns)
        return level, sequence.number


class Deadlines:
    """Sequences by deadline; those that have ended are forgotten in passing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._most = 1024

    def add(self, sequence: Sequence) -> None:
        """One with a deadline."""
        if len(self._heap) >= self._most:
            self._heap = [one for one in self._heap if one[2].state != State.ENDED]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))
        heapq.heappush(self._heap, (sequence.deadline_ns, sequence.number, sequence))

    def late(self, now_ns: int) -> Iterator[Sequence]:
        """Takes out whoever's time is up."""
        while self._heap and self._heap[0][0] <= now_ns:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.state != State.ENDED:
                yield sequence
