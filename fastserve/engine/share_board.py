"""The turns of API keys at models, as numbers that all front processes read.

    turns = board.of("resnet")
    turns.position("search")             how far a key has come: rows, or tokens of text, by its weight
    turns.serve("search", 8 / weight)    it is given 8 rows more
    turns.tell(lowest)                   the least position of a key that waits here; NOBODY
    turns.find_needier(position)         a front whose lowest key has come less far

Requests of keys are served by start-time fair queueing: of all that wait, a request of the key with the least
position is next. A key that has not waited begins where the others are, at `clock`, so that nobody saves up
turns. A position is the highest that any front has written; a front writes its own section alone, and adds
its own rows there. A front that gives no sign of life for STALE_S is not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import ClassVar
from zlib import crc32

from fastserve._ext.shared_metrics import KIND_GAUGE_SUM, Gauge, Section, file_bytes, lay_out

MOST_ROWS = 16384
"""Pairs of model and key that have waited at one front; further ones have positions in that front alone."""
ROW_BYTES = 256
CLOCK, LOWEST, LOOKED, WHO, AT, LIGHT = range(6)
NUMBERS = 6
"""Of a model: a position, the least that waits, when that was told, who sends requests and when, and rows a
second of keys that had none waiting."""
NOBODY = float("inf")
SEVERAL = -1.0
STALE_S = 0.5
ACTIVE_S = 30.0
"""For how long a key that has sent a request is expected to send another."""


class ShareBoard:
    """The numbers of all models, as front `number` writes them. Until `open` they are its own alone."""

    SIZES: ClassVar = (MOST_ROWS, MOST_ROWS * ROW_BYTES, MOST_ROWS * 2)

    def __init__(self, number: int) -> None:
        self.number = number
        self.writes = 0
        """The section that this front writes."""
        self.sections: Sequence[Section] = ()
        self._slots: list[dict[bytes, int]] = []
        self._seen: list[int] = []
        self._models: dict[str, ModelTurns] = {}

    def open(self, sections: Sequence[Section]) -> None:
        """Take over the sections of all fronts, and the rows of a front of this number that has died."""
        self._take(sections, self.number)

    def _take(self, sections: Sequence[Section], writes: int) -> None:
        self.sections, self.writes = sections, writes
        self._slots, self._seen = [{} for _ in sections], [0] * len(sections)
        self._models.clear()

    def of(self, model: str) -> ModelTurns:
        """Return the numbers of a model."""
        found = self._models.get(model)
        if found is None:
            if not self.sections:
                memory = bytearray(file_bytes(1, *self.SIZES))
                lay_out(memory, 1, *self.SIZES)
                self._take([Section(memory, 0)], 0)
            found = self._models[model] = ModelTurns(self, model)
        return found

    def front_ended(self, front: int) -> None:
        """Nobody waits any more at a front that is gone."""
        if front < len(self.sections):
            self.learn(front)
            for text, slot in self._slots[front].items():
                if b"\0" not in text:
                    Gauge(self.sections[front], slot + LOOKED).set(0.0)

    def find(self, front: int, text: bytes) -> int:
        """Return where a row is in a front's section; -1 where it has none."""
        self.learn(front)
        return self._slots[front].get(text, -1)

    def learn(self, front: int) -> None:
        """Look at the rows that a front has added."""
        section = self.sections[front]
        for index in range(self._seen[front], len(section)):
            entry = section.text(index)
            if entry is not None:
                self._slots[front][entry[1]] = entry[2]
        self._seen[front] = max(self._seen[front], len(section))

    def add(self, text: bytes, numbers: int) -> Sequence[Gauge]:
        """Return the numbers of a row of this front, which it may have added before; some that nobody else
        sees where there is no room."""
        section, slot = self.sections[self.writes], self.find(self.writes, text)
        if slot < 0:
            slot = section.append(KIND_GAUGE_SUM, text, numbers)
        if slot < 0:
            memory = bytearray(file_bytes(1, 1, ROW_BYTES, numbers))
            lay_out(memory, 1, 1, ROW_BYTES, numbers)
            section = Section(memory, 0)
            slot = section.append(KIND_GAUGE_SUM, b"", numbers)
        return [Gauge(section, slot + number) for number in range(numbers)]


class ModelTurns:
    """The numbers of one model."""

    def __init__(self, board: ShareBoard, model: str) -> None:
        self._board, self._text = board, model.encode()
        self._own = board.add(self._text, NUMBERS)
        self._own[LOWEST].set(NOBODY)
        self._others = [front for front in range(len(board.sections)) if front != board.writes]
        self._rows: dict[int, list[Gauge]] = {}  # of the model, of the other fronts that have it
        self._keys: dict[str, Gauge] = {}
        self._keys_elsewhere: dict[tuple[int, str], Gauge] = {}

    # ---- positions

    def position(self, key: str) -> float:
        """Return how far a key has come."""
        best: float = self._own_key(key).value
        for front in self._others:
            found = self._keys_elsewhere.get((front, key)) or self._find_key(front, key)
            if found is not None and found.value > best:
                best = found.value
        return best

    @property
    def clock(self) -> float:
        """Where the request began that was served last."""
        return max([self._own[CLOCK].value, *(row[CLOCK].value for _, row in self._elsewhere())])

    def serve(self, key: str, start: float, cost: float, *, in_turn: bool = True) -> None:
        """Write down that a key which had come to `start` was given a request of this cost. One that went
        before its turn does not move the clock: others are still behind it."""
        self._own_key(key).set(start + cost)
        if in_turn:
            self.reach(start)

    def claim(self, key: str, cost: float) -> float:
        """Give a key the next place for a request of this cost that others put in order, and return it."""
        start = max(self.clock, self.position(key))
        self._own_key(key).set(start + cost)
        return start

    def give_back(self, key: str, cost: float) -> None:
        """Take back what a request was charged and has not cost; what is below 0 is charged besides."""
        own = self._own_key(key)
        own.set(own.value - cost)

    def reach(self, place: float) -> None:
        """Have the clock show the place of a request that runs now."""
        if place > self._own[CLOCK].value:
            self._own[CLOCK].set(place)

    # ---- fronts

    def tell(self, lowest: float) -> None:
        """Tell the other fronts of the least position that waits here."""
        if self._others:
            self._own[LOWEST].set(lowest)
            self._own[LOOKED].set(monotonic())

    def find_needier(self, position: float) -> int:
        """Return a front where a key waits whose position is below, -1 where there is none."""
        fresh = monotonic() - STALE_S
        for front, row in self._elsewhere():
            if row[LOWEST].value < position and row[LOOKED].value > fresh:
                return front
        return -1

    def note_active(self, key: str, *, several: bool, light_rate: float) -> None:
        """Tell the other fronts that this key, or several, send requests here, and how many rows a second are
        of keys that had none waiting."""
        if self._others:
            self._own[WHO].set(SEVERAL if several else float(crc32(key.encode())))
            self._own[AT].set(monotonic())
            self._own[LIGHT].set(light_rate)

    def others_active(self, key: str) -> bool:
        """Return whether other keys send requests at other fronts."""
        since, own = monotonic() - ACTIVE_S, float(crc32(key.encode()))
        return any(row[AT].value > since and row[WHO].value != own for _, row in self._elsewhere())

    @property
    def light_rate(self) -> float:
        """Rows a second, at other fronts, of keys that had none waiting."""
        since = monotonic() - ACTIVE_S
        return sum(row[LIGHT].value for _, row in self._elsewhere() if row[AT].value > since)

    def _elsewhere(self) -> Sequence[tuple[int, list[Gauge]]]:
        if len(self._rows) < len(self._others):
            for front in self._others:
                slot = -1 if front in self._rows else self._board.find(front, self._text)
                if slot >= 0:
                    section = self._board.sections[front]
                    self._rows[front] = [Gauge(section, slot + number) for number in range(NUMBERS)]
        return list(self._rows.items())

    def _own_key(self, key: str) -> Gauge:
        found = self._keys.get(key)
        if found is None:
            (found,) = self._board.add(self._text + b"\0" + key.encode(), 1)
            self._keys[key] = found
        return found

    def _find_key(self, front: int, key: str) -> Gauge | None:
        slot = self._board.find(front, self._text + b"\0" + key.encode())
        if slot < 0:
            return None
        found = self._keys_elsewhere[front, key] = Gauge(self._board.sections[front], slot)
        return found
