"""A worker gone mad, in the test's own hands: it writes over any word of an arena that workers may write."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

from fastserve.workers.arena import Arena

HEADER = struct.Struct("<8I2Q")  # arena.h: magic .. fronts, slot_bytes, slots_offset
ROWS_AT, ROW_BYTES, PAGE_WORDS_AT, PAGE = 512, 64, 128, 4096


class Scrawl:
    """Aims at control words, never at data: header, desks, rings, slots, row tables, page words."""

    def __init__(self, arena: Arena, rng: random.Random) -> None:
        self.rng = rng
        self.words = memoryview(arena.memory).cast("B").cast("Q")
        self.halves = memoryview(arena.memory).cast("B").cast("I")
        self.geometry = arena.geometry
        self.slot_bytes, self.slots_at = HEADER.unpack_from(self.words)[8:]
        self.slabs_at = -(-(self.slots_at + arena.geometry.slots * self.slot_bytes) // PAGE) * PAGE
        self.leases = [at // 8 for at in self._places()]
        self.hurting = [at // 8 for at in self._slot_words()]
        self.written = 0

    def close(self) -> None:
        self.words.release()
        self.halves.release()

    def _places(self) -> Iterator[int]:
        yield from range(0, self.slots_at, 8)
        for start in self._starts():
            yield from range(start, start + ROWS_AT + self.geometry.max_rows * ROW_BYTES, 8)
        if self.geometry.slab_pages:
            yield from range(self.slabs_at, self.slabs_at + PAGE_WORDS_AT + 8 * self.geometry.slab_pages, 8)

    def _slot_words(self) -> Iterator[int]:
        """Slots' words, rows' states and slabs, page words: what hurts most."""
        for start in self._starts():
            yield start
            for row in range(self.geometry.max_rows):
                at = start + ROWS_AT + row * ROW_BYTES
                yield from (at, at + 8, at + 16)
        if self.geometry.slab_pages:
            first = self.slabs_at + PAGE_WORDS_AT
            yield from range(first, first + 8 * min(self.geometry.slab_pages, 8), 8)

    def _starts(self) -> list[int]:
        return [self.slots_at + slot * self.slot_bytes for slot in range(self.geometry.slots)]

    def value(self, old: int) -> int:
        """Noise, edges, something near to what is there, and words that look right."""
        rng = self.rng
        kind = rng.choice((0, 1, 2, 3, 3, 3, 4, 4, 5))
        if kind == 0:
            return rng.getrandbits(64)
        if kind == 1:
            return rng.choice([0, 1, 2, (1 << 64) - 1, 1 << 63, 0xFFFFFFFF])
        if kind == 2:
            return (old + rng.choice([-1, 1, -(1 << 16), 1 << 16, 1 << 32, -(1 << 32)])) & ((1 << 64) - 1)
        if kind == 3:  # a slot's word of this generation, in any state
            counts = rng.randrange(5) << 16 | rng.randrange(5)
            return old & 0xFFFF << 48 | rng.choice([0, 1, 0xFF]) << 40 | rng.randrange(8) << 32 | counts
        if kind == 4:  # a row's state, front and rows
            return rng.randrange(6) | rng.randrange(2) << 32 | rng.randrange(5) << 48
        return self.words[rng.choice(self.leases)]  # what is right elsewhere: another slab, another word

    def write(self, count: int) -> None:
        for _ in range(count):
            at = self.rng.choice(self.hurting if self.rng.random() < 0.7 else self.leases)
            if self.rng.random() < 0.2:
                half = self.rng.choice([self.value(0) & 0xFFFFFFFF, self.rng.randrange(6)])
                self.halves[2 * at + self.rng.randrange(2)] = half
            else:
                self.words[at] = self.value(self.words[at])
            self.written += 1
