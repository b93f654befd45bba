"""Trace contexts beside a batch: by slot and front, kept apart by the slot's openings, bounded."""

from __future__ import annotations

import mmap
import os

import pytest

from fastserve.util.tracing import TraceContext
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.trace_notes import MOST_NOTES, RowsTrace, TraceNotes

SLOTS, FRONTS, ROWS = 4, 3, 64


def make_notes() -> TraceNotes:
    memory = mmap.mmap(-1, 4096 + TraceNotes.measure(SLOTS, FRONTS, ROWS))
    return TraceNotes(memory, 4096, SLOTS, FRONTS, ROWS)


def context(number: int, state: str = "") -> TraceContext:
    return TraceContext(f"{number:032x}", f"{number:016x}", bool(number % 2), state)


def test_notes_of_all_fronts_come_in_the_order_of_their_rows() -> None:
    notes = make_notes()
    notes.write(2, 1, 7, 5, 2, context(1, "a=b"))
    notes.write(0, 1, 7, 0, 1, context(2))
    notes.write(2, 1, 7, 3, 1, context(3))
    notes.write(1, 2, 7, 0, 9, context(4))
    assert notes.read(1, 7) == [
        RowsTrace(0, 1, context(2)),
        RowsTrace(3, 1, context(3)),
        RowsTrace(5, 2, context(1, "a=b")),
    ]
    assert notes.read(2, 7) == [RowsTrace(0, 9, context(4))]


def test_notes_of_an_earlier_opening_are_gone() -> None:
    notes = make_notes()
    notes.write(0, 0, 7, 0, 1, context(1))
    notes.write(1, 0, 7, 1, 1, context(2))
    notes.write(0, 0, 8, 4, 1, context(3))
    assert notes.read(0, 8) == [RowsTrace(4, 1, context(3))]
    assert notes.read(0, 9) == []


def test_one_too_many_is_left_out_and_touches_no_neighbour() -> None:
    notes = make_notes()
    notes.write(1, 0, 7, 0, 1, context(1))
    notes.write(0, 1, 7, 0, 1, context(2))
    for row in range(MOST_NOTES + 9):
        notes.write(0, 0, 7, row + 1, 1, context(row, "x" * 500))
    assert [one.first_row for one in notes.read(0, 7)] == list(range(MOST_NOTES + 1))
    assert notes.read(1, 7) == [RowsTrace(0, 1, context(2))]
    with pytest.raises(ValueError, match="no slot 4"):
        notes.write(0, SLOTS, 7, 0, 1, context(1))


def test_every_process_of_an_arena_has_its_name_and_its_notes() -> None:
    geometry = Geometry(SLOTS, ROWS, (8,), (8,), 4, 0, 1, FRONTS)
    arena, other = Arena.create(geometry), Arena.create(geometry)
    message, fds = arena.fds_for_worker(0)
    joined = Arena.join(message, [*map(os.dup, fds)])
    try:
        arena.traces.write(1, 3, 5, 0, 1, context(1))
        assert joined.traces.read(3, 5) == [RowsTrace(0, 1, context(1))]
        assert other.traces.read(3, 5) == []
        assert joined.traces.arena == arena.traces.arena != other.traces.arena
    finally:
        for one in (joined, arena, other):
            one.close()


def test_notes_go_to_another_arena_as_they_lie_here() -> None:
    notes, other = make_notes(), make_notes()
    assert notes.packed(1, 7) == b""
    notes.write(2, 1, 7, 5, 2, context(1, "a=b"))
    notes.write(0, 1, 7, 0, 1, context(2))
    packed = notes.packed(1, 7)
    assert notes.packed(1, 8) == b""
    other.write_packed(0, 3, 9, packed)
    assert other.read(3, 9) == notes.read(1, 7) != []
    other.write_packed(0, 3, 9, packed * MOST_NOTES)  # those too many are left out
    assert len(other.read(3, 9)) == MOST_NOTES
    other.write_packed(0, 3, 10, b"")
    assert other.read(3, 9) == other.read(3, 10) == []
    for damaged in (packed[:-1], packed + b"x"):
        with pytest.raises(ValueError, match=f"{len(damaged)} bytes of trace notes"):
            other.write_packed(0, 3, 11, damaged)
