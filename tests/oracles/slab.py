"""Slabs, slow and plain: a dict of leases, each at the lowest pages that have room for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlainSlabs:
    """Pages are numbered from 0; a lease is known by its first page. `warm` are free pages that hold memory,
    by whether they did at the last trim already."""

    pages: int
    page_bytes: int = 4096
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)  # first page -> (pages, owner)
    warm: dict[int, bool] = field(default_factory=dict)

    def allocate(self, nbytes: int, owner: int) -> int | None:
        count = max(1, -(-nbytes // self.page_bytes))
        taken = {page for first, (n, _) in self.leases.items() for page in range(first, first + n)}
        for first in range(self.pages):
            wanted = range(first, first + count)
            if wanted.stop <= self.pages and taken.isdisjoint(wanted):
                self.leases[first] = count, owner
                for page in wanted:
                    self.warm.pop(page, None)
                return first
        return None

    def release(self, first: int) -> bool:
        if first not in self.leases:
            return False
        self._free(first)
        return True

    def _free(self, first: int) -> int:
        count, _ = self.leases.pop(first)
        self.warm |= dict.fromkeys(range(first, first + count), False)
        return count

    def trim(self) -> int:
        gone = [page for page, old in self.warm.items() if old]
        self.warm = {page: True for page, old in self.warm.items() if not old}
        return len(gone)

    def give(self, first: int, giver: int, taker: int) -> bool:
        pages, owner = self.leases.get(first, (0, 0))
        if owner != giver:
            return False
        self.leases[first] = pages, taker
        return True

    def reclaim(self, owner: int) -> int:
        gone = [first for first, (_, who) in self.leases.items() if who == owner]
        return sum(self._free(first) for first in gone)

    def used(self) -> int:
        return sum(count for count, _ in self.leases.values())
