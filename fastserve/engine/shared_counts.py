"""Counts of one version in memory that all front processes share: a row of whole numbers for each.

    memory = CountsMemory(fronts)                 the owner's; `fd` goes to the others with the version
    memory = CountsMemory(fronts, front, fd)      another front's
    memory.took("served").add(ns)                 counts in this process's row
    memory.read("served", 2)                      the sums over all rows

Only a row's own process writes to it, so counting takes no lock; each number is 8 bytes on a boundary of 8,
which processors load and store whole. A dead front's row stays in the sums, and the process that takes its
place goes on in it. The memory is sparse: a page takes room once it is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from fastserve._ext.response_cache import COUNTS_BYTES
from fastserve._ext.shared_metrics import SharedTook
from fastserve.metrics.registry import BUCKETS
from fastserve.util.memory import make_shared_file, map_shared_file

MOST_RESPONSES = 256  # responses of one request that are counted separately; later ones count with the last
RESPONSE_TOOKS = 6  # kinds of durations of a response
MOST_BOUNDS = 1024  # of a histogram of first responses
MOST_SIZES = 1024  # sizes of one kind that are counted separately; later ones count with the last
SIZE_WORDS = 5  # the size and what is counted of it
PAGE_WORDS = 512

# The numbers of a row, in their order. Of lists, `*_used` is how many have been begun.
_AREAS = {
    "waiting": 1,
    "last_ns": 1,
    "responses_used": 1,
    "runs_used": 1,
    "requests_used": 1,
    "ends": 8,
    "served": 4,
    "cached": COUNTS_BYTES // 8,
    "hit": 1,  # time of lookups
    "miss": 1,
    "hit_spread": BUCKETS,
    "miss_spread": BUCKETS,
    "first_sum_ns": 1,
    "first": MOST_BOUNDS + 1,
    "responses": MOST_RESPONSES * RESPONSE_TOOKS * 2,
    "runs": MOST_SIZES * SIZE_WORDS,
    "requests": MOST_SIZES * SIZE_WORDS,
}
_STARTS = {name: sum(list(_AREAS.values())[:place]) for place, name in enumerate(_AREAS)}
ROW_WORDS = -(-sum(_AREAS.values()) // PAGE_WORDS) * PAGE_WORDS
ROW_BYTES = ROW_WORDS * 8


class CountsMemory:
    """The rows of one version. `own` is this process's, of whole numbers."""

    def __init__(self, fronts: int = 1, front: int = 0, fd: int = -1) -> None:
        """`fd`: the file that the owner made, which is this object's now. Raises ValueError for another."""
        self.fd = fd
        if fronts == 1:
            memory = mmap.mmap(-1, ROW_BYTES)
        else:
            if fd < 0:
                self.fd = make_shared_file("fastserve-counts", fronts * ROW_BYTES)
            memory = map_shared_file(self.fd)
            if len(memory) != fronts * ROW_BYTES:
                raise ValueError("not the memory of a version's counts: it is of another size")
        self._front = front
        self._sizes: dict[str, dict[int, int]] = {}
        self._take_rows(memory, fronts)

    def _take_rows(self, memory: mmap.mmap, fronts: int) -> None:
        words = memoryview(memory).cast("Q")
        self._rows = [words[front * ROW_WORDS : (front + 1) * ROW_WORDS] for front in range(fronts)]
        self.own = self._rows[self._front]
        self._others = [row for row in self._rows if row is not self.own]

    def seal(self) -> None:
        """The version has ended: keep the counts in memory of this process alone. The shared memory goes with
        the last `slice` and SharedTook in it."""
        self.close_fd()
        if len(self._rows) == 1:
            return
        kept = mmap.mmap(-1, len(self._rows) * ROW_BYTES)  # a mapped file would hold a descriptor
        words = memoryview(kept).cast("Q")
        for number, row in enumerate(self._rows):
            for at in range(0, ROW_WORDS, PAGE_WORDS):
                page = row[at : at + PAGE_WORDS]
                if any(page):
                    words[number * ROW_WORDS + at : number * ROW_WORDS + at + PAGE_WORDS] = page
        self._take_rows(kept, len(self._rows))

    def close_fd(self) -> None:
        """Close the descriptor, if there is one. The counts can still be read."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self.close_fd()

    # --- counting

    def place(self, area: str, index: int = 0) -> int:
        """Return where a number of an area is in `own`."""
        return _STARTS[area] + index

    def add(self, area: str, n: int, index: int = 0) -> None:
        self.own[_STARTS[area] + index] += n

    def set(self, area: str, value: int) -> None:
        self.own[_STARTS[area]] = value

    def took(self, area: str, index: int = 0) -> SharedTook:
        """Return the `index`th pair of numbers of an area."""
        return SharedTook(self.own, _STARTS[area] + 2 * index)

    def slice(self, area: str) -> memoryview[int]:
        """Return an area of the own row, for compiled code that counts in it."""
        return self.own[_STARTS[area] : _STARTS[area] + _AREAS[area]]

    def use(self, area: str, count: int) -> None:
        """Note that the first `count` of a list are in use."""
        at = _STARTS[f"{area}_used"]
        if self.own[at] < count:
            self.own[at] = count

    def of_size(self, area: str, size: int) -> int:
        """Return where in `own` the numbers of one size are: 4, zero at first."""
        sizes = self._sizes.get(area)
        if sizes is None:
            sizes = self._sizes[area] = dict(self._sizes_of(area, self.own))
        found = sizes.get(size)
        return self._begin_size(area, size, sizes) if found is None else found

    def _begin_size(self, area: str, size: int, sizes: dict[int, int]) -> int:
        number = min(len(sizes), MOST_SIZES - 1)
        at = _STARTS[area] + number * SIZE_WORDS
        if number == len(sizes):
            self.own[at] = size
            self.use(area, number + 1)
            sizes[size] = at + 1
        return at + 1

    # --- reading

    def read(self, area: str, count: int, start: int = 0) -> list[int]:
        """Return sums of `count` numbers of an area, from the `start`th on."""
        at = _STARTS[area] + start
        read = [row[at : at + count] for row in self._rows]
        return list(read[0]) if len(read) == 1 else list(map(sum, zip(*read, strict=True)))

    def read_others(self, area: str) -> int:
        """Return the sum of the first number of an area in the rows of the other front processes."""
        return sum(row[_STARTS[area]] for row in self._others)

    def latest(self, area: str, index: int = 0) -> int:
        """Return the largest of a number."""
        return max(row[_STARTS[area] + index] for row in self._rows)

    def used(self, area: str) -> int:
        """Return how many of a list are in use in any row."""
        return min(self.latest(f"{area}_used"), _AREAS[area])

    def read_sizes(self, area: str) -> dict[int, list[int]]:
        """Return the sums by size."""
        found: dict[int, list[int]] = {}
        for row in self._rows:
            for size, at in self._sizes_of(area, row):
                numbers = row[at : at + SIZE_WORDS - 1]
                found[size] = list(map(sum, zip(found.get(size, (0,) * 4), numbers, strict=True)))
        return dict(sorted(found.items()))

    def _sizes_of(self, area: str, row: memoryview[int]) -> list[tuple[int, int]]:
        start, used = _STARTS[area], min(row[_STARTS[f"{area}_used"]], MOST_SIZES)
        places = [start + number * SIZE_WORDS for number in range(used)]
        return [(row[at], at + 1) for at in places]
