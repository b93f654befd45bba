"""What one step computes: a token of each sequence that writes, then prompts, in chunks, until it is full.

A long prompt so never holds up the others by more than a step; a prompt of higher priority goes before what
is left of a lower one. A sequence takes its row when the first chunk of it fits, no sooner: while it waits,
whoever is more urgent can still come before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.text.model import Chunk, Plan
from fastserve.backends.text.rows import Rows
from fastserve.backends.text.sequence import Sequence, State
from fastserve.backends.text.waiting import Waiting

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Reading:
    """One chunk, and whose it is."""

    __slots__ = ("chunk", "draws", "last", "sequence")

    def __init__(self, sequence: Sequence, chunk: Chunk) -> None:
        self.sequence, self.chunk = sequence, chunk
        self.last = chunk.start + chunk.count == len(sequence.prompt)
        """The prompt is read to its end."""
        self.draws = self.last and sequence.pool is None
        """The first token can be drawn."""


def share_out(
    rows: Rows, waiting: Waiting, begin: Callable[[Sequence], None], left: int, now_ns: int
) -> list[Reading]:
    """Whose prompts are read in this step, and how much of each, `left` tokens in all. `begin` gives a
    sequence its row."""
    offset = rows.writing
    reading = [
        one for one in rows.sequences[rows.writing :] if one is not None and one.state == State.READING
    ]
    reading.sort(key=lambda one: waiting.rank(one, now_ns), reverse=True)
    shares = []
    while left > 0 and (sequence := _next(rows, waiting, reading, begin, now_ns)) is not None:
        start = int(rows.lengths[sequence.row])
        count = min(len(sequence.prompt) - start, left)
        shares.append(Reading(sequence, Chunk(sequence.row, offset, count, start)))
        offset, left = offset + count, left - count
    return shares


def make_plan(rows: Rows, shares: list[Reading]) -> Plan:
    """The arrays of a step. Of a chunk the last token's logits are wanted when the prompt ends there and a
    token is to follow, and, behind all of those, every token's where the prompt's scores were asked for."""
    writing, chunks = rows.writing, [share.chunk for share in shares]
    tokens: list[NDArray[Any]] = [rows.tokens[:writing]]
    positions = [rows.lengths[:writing]]
    wanted = [np.arange(writing)]
    for share in shares:
        one = share.chunk
        tokens.append(share.sequence.prompt[one.start : one.start + one.count])
        positions.append(np.arange(one.start, one.start + one.count))
    wanted.append(np.array([one.chunk.offset + one.chunk.count - 1 for one in shares if one.draws], np.int64))
    wanted += [
        np.arange(one.chunk.offset, one.chunk.offset + one.chunk.count)
        for one in shares
        if one.sequence.scores is not None
    ]
    return Plan(
        np.concatenate(tokens, dtype=np.int64),
        np.concatenate(positions, dtype=np.int64),
        writing,
        chunks,
        np.concatenate(wanted),
        _pooled(shares),
    )


def _pooled(shares: list[Reading]) -> NDArray[np.int64] | None:
    places = [one.sequence.pool.places(one.chunk, last=one.last) for one in shares if one.sequence.pool]
    return np.concatenate(places) if places else None


def _next(
    rows: Rows,
    waiting: Waiting,
    reading: list[Sequence],
    begin: Callable[[Sequence], None],
    now_ns: int,
) -> Sequence | None:
    first = waiting.next(now_ns) if rows.free else None
    if reading and (first is None or waiting.rank(reading[-1], now_ns) < waiting.rank(first, now_ns)):
        return reading.pop()
    if first is not None:
        waiting.remove(first)
        begin(first)
    return first
