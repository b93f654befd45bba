"""token_records in plain Python: prompts as bytes, and a line of sequences with a bound each."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence

Record = tuple[int, int, int, bytes]
MAGIC = 0x746D7270


def write_prompt(ids: Sequence[int], note: bytes) -> bytes:
    return struct.pack(f"<IIQ{len(ids)}i", MAGIC, len(ids), len(note), *ids) + note


class PlainLine:
    """Sequences by any name: what was said is heard after `publish`, in order, whole."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.said: dict[int, list[Record]] = defaultdict(list)
        self.sent: dict[int, list[Record]] = defaultdict(list)
        self.count: dict[int, int] = defaultdict(int)
        self.taken: dict[int, int] = defaultdict(int)

    def say(self, name: int, record: Record) -> None:
        self.said[name].append(record)
        self.count[name] += 1

    def room(self, name: int) -> bool:
        return self.count[name] - self.taken[name] < self.window

    def publish(self) -> set[int]:
        """Publish records and return the sequences that are over with them."""
        over = {name for name, records in self.said.items() if records and records[-1][1]}
        for name, records in self.said.items():
            self.sent[name] += records
        self.said.clear()
        return over

    def read(self) -> dict[int, list[Record]]:
        found = {name: records for name, records in self.sent.items() if records}
        self.sent.clear()
        return found
