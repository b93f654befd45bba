"""The numbers that front processes share of API keys: of their limits (net/key_usage.py), and of their turns
at models (engine/share_board.py).

The owner makes two files with a section for each front. In the first is a row of numbers for each key that
has had a limit, in all sections at the same place: the owner alone adds rows, others find them by the name.
To the second each front adds rows in its own section. A front writes its own section.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

from fastserve._ext.shared_metrics import KIND_GAUGE_SUM, Gauge, Section, file_bytes, lay_out
from fastserve.engine.share_board import ShareBoard
from fastserve.net.key_usage import Bucket, KeyShare
from fastserve.serving.replication import Content, ReplicatedPart, StateRecord
from fastserve.util.memory import make_shared_file, map_shared_file
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
MOST_KEYS = 2048
"""Names of keys with limits during the life of a server; limits of further ones are divided by its fronts."""
NAME_BYTES = 64
RUNNING, BUCKETS = 0, (1, 3, 5)
"""Numbers of a row: requests under way, and where the two of a bucket are, of requests, rows and tokens."""
NUMBERS = 7
FULL_S = -1e9
"""`forfeited` of a new bucket, which is full on a machine that has just started too."""


class KeyShares(ReplicatedPart):
    """The shares of front `number` of `fronts`; the owner is number 0."""

    PART = "key shares"

    def __init__(self, number: int, fronts: int) -> None:
        self._number, self._fronts = number, fronts
        self._limited_log = RateLimitedLog(log)
        self._sections: Sequence[Section] = ()
        self._slots: dict[str, int] = {}
        self._seen = 0  # rows that are in `_slots`
        self._own: dict[str, KeyShare] = {}  # of keys without a row
        self.board = ShareBoard(number)
        self._fds: list[int] = []
        if number == 0:
            for name, sizes in (("fastserve-keys", _SIZES), ("fastserve-turns", ShareBoard.SIZES)):
                fd = make_shared_file(name, file_bytes(fronts, *sizes))
                self._fds.append(fd)
                with map_shared_file(fd) as memory:
                    lay_out(memory, fronts, *sizes)
            self._map(self._fds)

    def find(self, name: str) -> KeyShare:
        """Return the numbers of a key; those of this front alone while there are no others."""
        slot = self._find_slot(name)
        if slot < 0:
            return self._own.get(name) or self._make_own(name)
        self._own.pop(name, None)
        running = [Gauge(section, slot + RUNNING) for section in self._sections]
        requests, rows, tokens = (self._bucket(slot + number) for number in BUCKETS)
        return KeyShare(running[self._number], running, requests, rows, tokens)

    def _bucket(self, slot: int) -> Bucket:
        used = [Gauge(section, slot) for section in self._sections]
        return Bucket(used[self._number], Gauge(self._sections[0], slot + 1), used)

    def close(self) -> None:
        """Close the file; its memory stays as long as a share of it is in use."""
        self._sections = ()
        while self._fds:
            os.close(self._fds.pop())

    # ---- ReplicatedPart

    def apply(self, content: Content, fds: list[int]) -> None:
        try:
            self._map(fds)
        finally:
            for fd in fds:
                os.close(fd)

    def records(self) -> Iterator[StateRecord]:
        if self._fds:
            yield StateRecord({}, tuple(self._fds))

    def front_ended(self, front: int) -> None:
        """Take the requests of a front that is no more out of the sums."""
        if self._sections:
            for slot in self._slots.values():
                self._sections[front].zero(slot + RUNNING, 1)
        self.board.front_ended(front)

    def _map(self, fds: Sequence[int]) -> None:
        limits, turns = map(map_shared_file, fds)
        self._sections = [Section(limits, number) for number in range(self._fronts)]
        self.board.open([Section(turns, number) for number in range(self._fronts)])

    def _find_slot(self, name: str) -> int:
        slot = self._slots.get(name, -1)
        if slot >= 0 or not self._sections:
            return slot
        first = self._sections[0]
        for index in range(self._seen, len(first)):
            entry = first.text(index)
            if entry is not None:
                self._slots[entry[1].decode()] = entry[2]
        self._seen = len(first)
        if name in self._slots or self._number:
            return self._slots.get(name, -1)
        if self._seen == MOST_KEYS:
            text = (
                "more than %d keys have had limits since the start: limits of others are divided by %d fronts"
            )
            self._limited_log.warn(text, MOST_KEYS, self._fronts)
            return -1
        for section in reversed(self._sections):  # the first one last: there others look for it
            slot = section.append(KIND_GAUGE_SUM, name.encode(), NUMBERS)
        for number in BUCKETS:
            Gauge(first, slot + number + 1).set(FULL_S)
        self._slots[name], self._seen = slot, self._seen + 1
        return slot

    def _make_own(self, name: str) -> KeyShare:
        memory = bytearray(file_bytes(1, 1, NAME_BYTES, NUMBERS))
        lay_out(memory, 1, 1, NAME_BYTES, NUMBERS)
        section = Section(memory, 0)
        slot = section.append(KIND_GAUGE_SUM, b"", NUMBERS)
        running = Gauge(section, slot + RUNNING)
        used = [(Gauge(section, slot + number), Gauge(section, slot + number + 1)) for number in BUCKETS]
        for _, forfeited in used:
            forfeited.set(FULL_S)
        requests, rows, tokens = (Bucket(own, forfeited, (own,)) for own, forfeited in used)
        found = KeyShare(running, (running,), requests, rows, tokens, whole=False)
        self._own[name] = found
        return found


_SIZES = MOST_KEYS, MOST_KEYS * NAME_BYTES, MOST_KEYS * NUMBERS
