"""The response cache, slow and plain: a list in the order of use."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

WHOLE_BYTES, ENTRY_BYTES = 1024, 512


class PlainCache:
    """`kept` holds (key, form, outputs, parameters), least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.evictions, self.hits, self.misses = capacity, 0, 0, 0
        self.kept: list[tuple[bytes, Any, tuple[bytes, ...], tuple[Any, ...]]] = []
        self.running: set[bytes] = set()

    def key(self, head: bytes, inputs: list[bytes]) -> bytes:
        whole = sum(map(len, inputs)) <= WHOLE_BYTES
        return head + b"".join(data if whole else blake2b(data).digest() for data in inputs)

    def find(self, head: bytes, inputs: list[bytes]) -> Any:
        """(form, outputs, parameters) of a hit, the key of a miss, None for one whose like is under way."""
        key = self.key(head, inputs)
        for entry in self.kept:
            if entry[0] == key:
                self.kept.remove(entry)
                self.kept.append(entry)
                self.hits += 1
                return entry[1:]
        if key in self.running:
            return None
        self.running.add(key)
        self.misses += 1
        return key

    def keep(self, key: bytes, form: Any, outputs: list[bytes], parameters: tuple[Any, ...]) -> None:
        entry = key, form, tuple(outputs), parameters
        if _size(entry) > self.capacity or any(key == other[0] for other in self.kept):
            return
        self.kept.append(entry)
        while self.used > self.capacity:
            self.kept.pop(0)
            self.evictions += 1

    def leave(self, key: bytes) -> None:
        self.running.discard(key)

    def forget(self, prefix: bytes) -> None:
        self.kept = [entry for entry in self.kept if not entry[0].startswith(prefix)]

    @property
    def used(self) -> int:
        return sum(map(_size, self.kept))


def _size(entry: tuple[Any, ...]) -> int:
    return ENTRY_BYTES + len(entry[0]) + sum(map(len, entry[2]))
