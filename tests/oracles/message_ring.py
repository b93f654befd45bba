"""The message ring, slow and plain: a queue with a bound."""

from __future__ import annotations

from collections import deque


class PlainRing:
    """Messages are (kind, slot, seq, value)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._messages: deque[tuple[int, int, int, int]] = deque()

    def push(self, *message: int) -> bool:
        if len(self._messages) == self._capacity:
            return False
        kind, slot, seq, value = message
        self._messages.append((kind, slot, seq, value))
        return True

    def pop(self) -> tuple[int, int, int, int] | None:
        return self._messages.popleft() if self._messages else None
