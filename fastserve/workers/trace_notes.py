"""Trace contexts of the requests in a batch, in memory behind the arena: fronts write them, workers may read
them.

    notes.write(front, slot, seq, row, rows, context)      before the rows are committed
    notes.read(slot, seq)                                  once the batch is taken, if the model asks

A row of a dense batch has no room for text, and most requests are not traced: notes lie beside the ring, a
sheet for each slot and front. A front alone writes its sheets, and a worker reads them after the ring's own
compare-and-swap has published the rows, so no lock is needed. A sheet of an earlier opening of the slot has
another `seq`. The memory is sparse: a page takes room once a traced request has touched it.
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

from fastserve.util.tracing import TraceContext

MOST_NOTES = 32  # requests of one front in a batch whose contexts a model gets
STATE_BYTES = 80  # of a tracestate; a longer one is left out here

_HEAD = struct.Struct("<QQ")  # the slot's seq, and how many notes there are
_NOTE = struct.Struct(f"<II16s8sB{STATE_BYTES}p7x")  # first row, rows, trace id, span id, flags, tracestate
_HEAD_BYTES, _NOTE_BYTES = _HEAD.size, _NOTE.size
_read_head, _write_head, _write_note = _HEAD.unpack_from, _HEAD.pack_into, _NOTE.pack_into
fromhex = bytes.fromhex
KEY_BYTES = 16  # random bytes before the first sheet, written once: what tells this arena from others

KEY_ROOM = 64  # a cache line


class RowsTrace(NamedTuple):
    """Rows of a batch that belong to a traced request, and the span that the model's own are to be below."""

    first_row: int
    rows: int
    context: TraceContext


class TraceNotes:
    """The sheets of one arena, behind its ring at `at`."""

    def __init__(self, memory: mmap, at: int, slots: int, fronts: int, max_rows: int) -> None:
        self._memory, self._at, self._fronts = memory, at + KEY_ROOM, fronts
        self.arena = bytes(memory[at : at + KEY_BYTES]).hex()
        """The name of this arena among all others."""
        self._most, self._bytes = _sheet(max_rows)
        self._slots = slots
        self.layout = self._at, self._bytes, fronts
        """Where the sheets begin, and the bytes of each; those of a slot lie one behind the other, by front.
        A sheet begins with the slot's `seq` and the number of its notes, 8 bytes each."""

    @staticmethod
    def measure(slots: int, fronts: int, max_rows: int) -> int:
        """Return how many bytes the sheets take, of which none are touched."""
        return KEY_ROOM + slots * fronts * _sheet(max_rows)[1]

    def write(self, front: int, slot: int, seq: int, row: int, rows: int, context: TraceContext) -> None:
        """Note the context of a lease. One too many is left out."""
        memory, at = self._memory, self._sheet_at(slot, front)
        known, count = _read_head(memory, at)
        if known != seq:
            count = 0
        elif count >= self._most:
            return
        state = context.state
        _write_note(
            memory,
            at + _HEAD_BYTES + count * _NOTE_BYTES,
            row,
            rows,
            fromhex(context.trace_id),
            fromhex(context.span_id),
            context.sampled,
            state.encode() if 0 < len(state) < STATE_BYTES else b"",
        )
        _write_head(memory, at, seq, count + 1)

    def read(self, slot: int, seq: int) -> list[RowsTrace]:
        """Return the notes of a batch, by row. What a front has damaged is left out."""
        found = []
        for front in range(self._fronts):
            at = self._sheet_at(slot, front)
            known, count = _HEAD.unpack_from(self._memory, at)
            for number in range(min(count, self._most) if known == seq else 0):
                note = _NOTE.unpack_from(self._memory, at + _HEAD.size + number * _NOTE.size)
                row, rows, trace_id, span_id, flags, state = note
                context = TraceContext(
                    trace_id.hex(), span_id.hex(), bool(flags), state.decode("ascii", "replace")
                )
                found.append(RowsTrace(row, rows, context))
        return sorted(found, key=_first_row)

    def packed(self, slot: int, seq: int) -> bytes:
        """Return the notes of a batch as they lie here, for `write_packed` of another arena; b"" for none."""
        found = b""
        for front in range(self._fronts):
            at = self._sheet_at(slot, front)
            known, count = _HEAD.unpack_from(self._memory, at)
            if known == seq and count:
                at += _HEAD.size
                found += self._memory[at : at + min(count, self._most) * _NOTE.size]
        return found

    def write_packed(self, front: int, slot: int, seq: int, notes: bytes) -> None:
        """Note what was packed, in place of this front's notes of the slot. Those too many are left out.
        Raises ValueError for bytes that are no notes."""
        if len(notes) % _NOTE.size:
            raise ValueError(f"{len(notes)} bytes of trace notes, which have {_NOTE.size} each")
        count, at = min(len(notes) // _NOTE.size, self._most), self._sheet_at(slot, front)
        self._memory[at + _HEAD.size : at + _HEAD.size + count * _NOTE.size] = notes[: count * _NOTE.size]
        _HEAD.pack_into(self._memory, at, seq, count)

    def _sheet_at(self, slot: int, front: int) -> int:
        if not (0 <= slot < self._slots and 0 <= front < self._fronts):
            raise ValueError(f"no slot {slot} of front {front}")
        return self._at + (slot * self._fronts + front) * self._bytes


def _first_row(one: RowsTrace) -> int:
    return one.first_row


def _sheet(max_rows: int) -> tuple[int, int]:
    """Return how many notes a sheet has, and its bytes, whole cache lines."""
    most = min(max(max_rows, 1), MOST_NOTES)
    return most, -(-(_HEAD.size + most * _NOTE.size) // 64) * 64
