"""Scheduling of sequences: the waiting queue, rows of the KV cache, and the plan of each step.

    WaitingQueue -> Rows -> share_out -> make_plan

A step computes a token of each sequence that decodes, then prompts in chunks until the step is full: a long
prompt delays the others by one step at most. Prompts go by priority, then by arrival; with ageing, a
sequence gains one priority for each `ageing_ns` it has waited. It takes its row with its first chunk:
until then a more urgent sequence can go first.

Rows that decode are packed in front:

    0 ... writing-1 | writing ...
    decode          | prefill, are stalled, or are free

A row changes its place by an exchange with another. A free row may keep what its last sequence left, for
prompts that begin alike (prefix cache): what is computed of them is copied.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.llm.grammars import CompiledGrammar
from fastserve.backends.llm.pooling import Pool
from fastserve.backends.llm.protocols import Chunk, KVCache, Out, StepPlan, TextRequest
from fastserve.codec.generation import Finish, Info, PromptRank, Sampling
from fastserve.errors import invalid
from fastserve.settings.model_options import TextOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastserve.backends.llm.drafts import DraftPace


class DecodeState(IntEnum):
    """WAITING -> PREFILL -> DECODING <-> STALLED, and ENDED from each of them."""

    WAITING = 0
    PREFILL = 1
    """Its prompt is computed, in chunks."""
    DECODING = 2
    """It gets a token each step."""
    STALLED = 3
    """Its reader is behind; it keeps its row."""
    ENDED = 4


@dataclass(slots=True, eq=False)
class TextSequence:
    """One sequence: its request, its place, its limits. `number` is its place in the order of arrival."""

    rid: int
    prompt: NDArray[np.int32]
    sampling: Sampling
    limit: int
    """Tokens to generate at most."""
    ends: Mapping[int, Finish]
    """Tokens that end it."""
    number: int = 0
    priority: int = 5
    turn: float = 0.0
    deadline_ns: int = 0
    arrived_ns: int = 0
    last_ns: int = 0
    """Time of the last token; arrival before the first."""
    adapter: int = 0
    """Number of its adapter; 0: none."""
    state: DecodeState = DecodeState.WAITING
    row: int = -1
    slot: int = -1
    """Slot of the sampler."""
    drawn: int = 0
    scores: list[tuple[int, float | None]] | None = None
    """Log probabilities of the prompt's tokens, when requested."""
    ranks: list[PromptRank] = field(default_factory=list)
    """Ranks of the prompt's tokens behind the first and the likeliest there, when requested."""
    grammar: CompiledGrammar | None = None
    """The language of the answer; it is compiled while the sequence waits."""
    pool: Pool | None = None
    """Pools the prompt's embedding, when that was requested: no token is generated then."""
    drafts: DraftPace | None = None
    """Length of its next draft, where drafts are made."""

    @property
    def is_ready(self) -> bool:
        """Whether it can begin once there is a row."""
        return self.grammar is None or self.grammar.done()

    @property
    def reads_all(self) -> bool:
        """Whether the output of every prompt token is needed: none may come from the prefix cache."""
        return self.scores is not None or self.pool is not None


def make_sequence(
    request: TextRequest, prompt: NDArray[np.int32], info: Info, eos: Mapping[int, Finish]
) -> TextSequence:
    """Return the sequence of a request. Raises ServeError for one that can never run."""
    sampling, count = request.note.sampling, len(prompt)
    check_prompt(prompt, info)
    asked = min(sampling.max_new_tokens, info.max_new_tokens)
    return TextSequence(
        rid=request.rid,
        prompt=prompt,
        sampling=sampling,
        limit=max(1, min(asked, info.max_tokens - count)),
        adapter=_find_adapter(request.note.adapter, info),
        ends=_ends(sampling, eos),
        priority=min(5, max(1, request.note.priority)),
        turn=request.note.turn,
        deadline_ns=request.note.deadline_ns,
        scores=[(int(prompt[0]), None)] if sampling.prompt_logprobs else None,
    )


def _find_adapter(name: str, info: Info) -> int:
    if not name:
        return 0
    if name not in info.adapters:
        raise invalid(f"adapter: given {name!r}, allowed: {', '.join(info.adapters) or 'none'}")
    return info.adapters.index(name) + 1


def check_prompt(prompt: NDArray[np.int32], info: Info) -> None:
    """Check tokens against the model. Raises ServeError."""
    count = len(prompt)
    if not count:
        raise invalid("prompt: given 0 tokens, allowed: 1 or more")
    if count > info.max_prompt_tokens:
        raise invalid(f"prompt: given {count} tokens, allowed: at most {info.max_prompt_tokens}")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or (info.vocab_size and high >= info.vocab_size):
        given = low if low < 0 else high
        raise invalid(f"prompt: given token {given}, allowed: 0 to {info.vocab_size - 1}")


def _ends(sampling: Sampling, eos: Mapping[int, Finish]) -> Mapping[int, Finish]:
    ignores_eos = sampling.ignore_eos and sampling.grammar is None
    if not sampling.stop_ids and not ignores_eos:
        return eos
    ends = dict.fromkeys(sampling.stop_ids, Finish.STOP)
    if not ignores_eos:
        ends.update(eos)
    return ends


PRIORITIES = range(1, 6)


class WaitingQueue:
    """Sequences that wait for a row, by priority, turn and arrival."""

    def __init__(self, ageing_ns: int = 0) -> None:
        self._lines: dict[int, list[tuple[float, int, TextSequence]]] = {level: [] for level in PRIORITIES}
        self._places: dict[int, tuple[float, int]] = {}  # by rid
        self._came = 0
        self._ageing_ns = ageing_ns

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, sequence: TextSequence) -> None:
        """Add a sequence behind those of its priority and turn."""
        self._came += 1
        place = self._places[sequence.rid] = sequence.turn, self._came
        insort(self._lines[sequence.priority], (*place, sequence))

    def remove(self, sequence: TextSequence) -> None:
        """Remove a sequence that has begun or ended."""
        line = self._lines[sequence.priority]
        del line[bisect_left(line, self._places.pop(sequence.rid))]

    def next(self, now_ns: int) -> TextSequence | None:
        """Return the first sequence that is ready, which stays in the queue until it is removed."""
        heads = [_first_ready(line) for line in self._lines.values() if line]
        found = [one for one in heads if one is not None]
        return min(found, key=lambda one: self.rank(one, now_ns), default=None)

    def rank(self, sequence: TextSequence, now_ns: int) -> tuple[int, float, int]:
        """Return the order of a sequence, lower first; also of sequences in prefill."""
        level = sequence.priority
        if self._ageing_ns:
            level = max(1, level - (now_ns - sequence.arrived_ns) // self._ageing_ns)
        return level, sequence.turn, sequence.number


def _first_ready(line: list[tuple[float, int, TextSequence]]) -> TextSequence | None:
    return next((sequence for _, _, sequence in line if sequence.is_ready), None)


class DeadlineQueue:
    """Sequences by deadline; those that have ended are dropped in passing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TextSequence]] = []
        self._most = 1024

    def add(self, sequence: TextSequence) -> None:
        """Add a sequence with a deadline."""
        if len(self._heap) >= self._most:
            self._heap = [one for one in self._heap if one[2].state != DecodeState.ENDED]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))
        heapq.heappush(self._heap, (sequence.deadline_ns, sequence.number, sequence))

    def late(self, now_ns: int) -> Iterator[TextSequence]:
        """Remove and yield sequences past their deadline."""
        while self._heap and self._heap[0][0] <= now_ns:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.state != DecodeState.ENDED:
                yield sequence


class QueuedEngine:
    """The sequences of a TextEngine from `submit` to their end: in order, with deadlines, and to be ended."""

    def __init__(self, options: TextOptions) -> None:
        self._waiting, self._deadlines = WaitingQueue(int(options.ageing_s * 1e9)), DeadlineQueue()
        self._sequences: dict[int, TextSequence] = {}
        self._to_end: dict[int, Finish] = {}

    def cancel(self, rid: int, why: Finish) -> None:
        """End a sequence at the next step; the first reason stays."""
        if rid in self._sequences:
            self._to_end.setdefault(rid, why)

    def pending(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._sequences)

    def _add(self, sequence: TextSequence) -> None:
        self._sequences[sequence.rid] = sequence
        self._waiting.add(sequence)
        if sequence.deadline_ns:
            self._deadlines.add(sequence)

    def _end_due(self, out: Out, now_ns: int) -> None:
        """End the sequences that are cancelled or late."""
        for sequence in self._deadlines.late(now_ns):
            self._to_end.setdefault(sequence.rid, Finish.TIMEOUT)
        for rid, why in self._to_end.items():
            if rid in self._sequences:
                self._end(self._sequences[rid])
                out.end(rid, why)
        self._to_end.clear()

    def _end(self, sequence: TextSequence) -> None:
        """Release what a sequence holds."""
        if sequence.state == DecodeState.WAITING:
            self._waiting.remove(sequence)
        sequence.state = DecodeState.ENDED
        del self._sequences[sequence.rid]


class Rows:
    """Sequences by their rows of the cache. `tokens[r]` is a row's next token to compute, `lengths[r]` its
    positions in the cache, `slots[r]` its slot of the sampler, `adapters[r]` the adapter they were computed
    with, `ids` the tokens of those positions, where tokens are kept."""

    def __init__(self, count: int, cache: KVCache, keep_tokens: int = 0, *, keep_rows: bool = True) -> None:
        """`keep_tokens`: tokens of a row that are kept, 0 for none; `keep_rows`: whether a free row keeps
        what its last sequence left, if its tokens are kept."""
        self.sequences: list[TextSequence | None] = [None] * count
        self.writing = 0
        self.free = count
        self.tokens = np.zeros(count, np.int64)
        self.lengths = np.zeros(count, np.int64)
        self.slots = np.zeros(count, np.int32)
        self.adapters = np.zeros(count, np.int64)
        self.ids = np.full((count, keep_tokens), -1, np.int32)
        self.freed = np.zeros(count, np.int64)
        """Order in which free rows were released."""
        self._cache = cache
        self._keep_tokens = keep_tokens > 0
        self._keep = keep_rows and keep_tokens > 0
        self._clock = 0

    def take(self, sequence: TextSequence, row: int = -1) -> None:
        """Give a row to a new sequence: `row`, or a free one with the least to lose, the nearest to those
        that decode."""
        if row < 0:
            free = [at for at in range(self.writing, len(self.sequences)) if self.sequences[at] is None]
            row = min(free, key=lambda at: (self.lengths[at] > 0, self.freed[at])) if self._keep else free[0]
            self.lengths[row] = 0
        self.sequences[row], self.slots[row] = sequence, sequence.slot
        self.adapters[row] = sequence.adapter
        if self._keep_tokens:
            self.ids[row, : len(sequence.prompt)] = sequence.prompt
        sequence.row, sequence.state = row, DecodeState.PREFILL
        self.free -= 1

    def join(self, sequence: TextSequence) -> None:
        """Let a sequence decode from now on."""
        self._swap(sequence.row, self.writing)
        self.writing += 1
        sequence.state = DecodeState.DECODING

    def stand(self, sequence: TextSequence) -> None:
        """Stall a sequence that decodes."""
        self.writing -= 1
        self._swap(sequence.row, self.writing)
        sequence.state = DecodeState.STALLED

    def release(self, sequence: TextSequence, *, proven: bool) -> None:
        """Free a row. Unless its content is `proven` to have led to numbers, it is wiped."""
        if sequence.row < self.writing:
            self.stand(sequence)
        row = sequence.row
        if not proven:
            self._cache.wipe(row, int(self.lengths[row]))
        if not (proven and self._keep):
            self.lengths[row] = 0
        self._clock += 1
        self.freed[row] = self._clock
        self.sequences[row], sequence.row = None, -1
        self.free += 1

    def advance(self, plan: StepPlan) -> None:
        """Account for the plan's tokens, which are in the cache now: all but those of drafts."""
        if self._keep_tokens:
            at = np.arange(plan.writing)
            self.ids[at, self.lengths[: plan.writing]] = plan.tokens[: plan.writing]
        self.lengths[: plan.writing] += 1
        for chunk in plan.chunks:
            if chunk.row >= plan.writing:
                self.lengths[chunk.row] += chunk.count

    def said(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of a row that decodes, its next one to compute included."""
        length = int(self.lengths[row])
        self.ids[row, length] = self.tokens[row]
        return self.ids[row, : length + 1]

    def accept(self, row: int, tokens: list[int]) -> None:
        """Account for tokens of a draft, which are in the cache behind those that `advance` counted."""
        length = int(self.lengths[row])
        self.ids[row, length : length + len(tokens)] = tokens
        self.lengths[row] += len(tokens)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row to another."""
        self._cache.move(source, target, count)
        self.ids[target, :count] = self.ids[source, :count]
        self.lengths[target] = count

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._swap_cached(a, b)
        for array in (self.tokens, self.lengths, self.slots, self.adapters, self.freed, self.ids):
            array[[a, b]] = array[[b, a]]
        self.sequences[a], self.sequences[b] = self.sequences[b], self.sequences[a]
        for row in (a, b):
            if (sequence := self.sequences[row]) is not None:
                sequence.row = row

    def _swap_cached(self, a: int, b: int) -> None:
        one, other = int(self.lengths[a]), int(self.lengths[b])
        if one and other:
            self._cache.swap(a, b, max(one, other))
        elif one:
            self._cache.move(a, b, one)
        elif other:
            self._cache.move(b, a, other)


LEAST = 16
"""Tokens below which a copy is not worth its while."""


def begin_row(rows: Rows, sequence: TextSequence) -> None:
    """Take a row for a sequence, with as much of its prompt as another row of the same adapter has. The last
    token of a prompt is always computed: its logits are needed."""
    prompt = sequence.prompt
    source, count = _longest(rows, prompt, sequence.adapter)
    if count < LEAST or sequence.reads_all:
        rows.take(sequence)
    elif rows.sequences[source] is None:
        rows.take(sequence, source)
        rows.lengths[source] = count
    else:
        rows.take(sequence)
        rows.copy(source, sequence.row, count)


def _longest(rows: Rows, prompt: np.ndarray, adapter: int) -> tuple[int, int]:
    best, most = -1, 0
    limit = len(prompt) - 1
    if limit < LEAST:
        return best, most
    alike = (rows.ids[:, :LEAST] == prompt[:LEAST]).all(1) & (rows.adapters == adapter)
    for row in np.flatnonzero(alike):
        count = min(limit, int(rows.lengths[row]))
        differs = np.flatnonzero(rows.ids[row, :count] != prompt[:count])
        count = int(differs[0]) if len(differs) else count
        if count > most:
            best, most = int(row), count
    return best, most


class Prefill:
    """One chunk of a sequence's prompt."""

    __slots__ = ("chunk", "draws", "last", "sequence")

    def __init__(self, sequence: TextSequence, chunk: Chunk) -> None:
        self.sequence, self.chunk = sequence, chunk
        self.last = chunk.start + chunk.count == len(sequence.prompt)
        """Whether the prompt ends with it."""
        self.draws = self.last and sequence.pool is None
        """Whether the first token can be sampled."""


def share_out(
    rows: Rows, waiting: WaitingQueue, begin: Callable[[TextSequence], None], left: int, now_ns: int
) -> list[Prefill]:
    """Return the chunks of prompts for this step, `left` tokens in all. `begin` gives a sequence its row."""
    offset = rows.writing
    reading = [
        one for one in rows.sequences[rows.writing :] if one is not None and one.state == DecodeState.PREFILL
    ]
    reading.sort(key=lambda one: waiting.rank(one, now_ns), reverse=True)
    shares = []
    while left > 0 and (sequence := _next_prefill(rows, waiting, reading, begin, now_ns)) is not None:
        start = int(rows.lengths[sequence.row])
        count = min(len(sequence.prompt) - start, left)
        shares.append(Prefill(sequence, Chunk(sequence.row, offset, count, start)))
        offset, left = offset + count, left - count
    return shares


def make_plan(rows: Rows, shares: list[Prefill]) -> StepPlan:
    """Return the arrays of a step. Logits are needed for a chunk's last token when the prompt ends there and
    a token is to follow, and, behind all of those, for every token where the prompt's scores were
    requested."""
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
    return StepPlan(
        np.concatenate(tokens, dtype=np.int64),
        np.concatenate(positions, dtype=np.int64),
        writing,
        chunks,
        np.concatenate(wanted),
        _pooled_positions(shares),
        _adapters_of(rows, shares),
    )


def _adapters_of(rows: Rows, shares: list[Prefill]) -> NDArray[np.int64] | None:
    if not rows.adapters.any():
        return None
    chunks = [np.full(one.chunk.count, one.sequence.adapter) for one in shares]
    found = np.concatenate([rows.adapters[: rows.writing], *chunks])
    return found if found.any() else None


def _pooled_positions(shares: list[Prefill]) -> NDArray[np.int64] | None:
    places = [one.sequence.pool.places(one.chunk, last=one.last) for one in shares if one.sequence.pool]
    return np.concatenate(places) if places else None


def _next_prefill(
    rows: Rows,
    waiting: WaitingQueue,
    reading: list[TextSequence],
    begin: Callable[[TextSequence], None],
    now_ns: int,
) -> TextSequence | None:
    first = waiting.next(now_ns) if rows.free else None
    if reading and (first is None or waiting.rank(reading[-1], now_ns) < waiting.rank(first, now_ns)):
        return reading.pop()
    if first is not None:
        waiting.remove(first)
        begin(first)
    return first


LEAST_READ = 16
"""Tokens of prompts in a step that decoding would fill alone: prefill goes on, slowly."""
SLOWER, FASTER = 1 / 4, 1 / 2
"""Weight of one step in an average: an outlier of a busy machine is soon forgotten."""


class PrefillBudget:
    """Tokens of prompts for each step, so that decoding is not delayed for long.

    A step with prefill takes at most `step_ms`, or twice a step without, whichever is more. The cost of a
    token is measured. Where more sequences that are to decode wait for prefill than decode, all of
    `step_tokens` is theirs. Prefill for embeddings alone does not count as such."""

    def __init__(self, step_ms: float) -> None:
        """Take the target of a step in milliseconds; 0: steps may take any time."""
        self._step_ns = step_ms * 1e6
        self._writers, self._write_ns = 1, 0.0
        """Tokens and duration of the last step that only decoded."""
        self._token_ns = 0.0
        """Cost of one token more in a step; 0: not known yet."""

    def room(self, most: int, writing: int, reading: int) -> int:
        """Return the tokens of prompts for a step of at most `most` tokens; `reading` sequences wait for
        prefill that are to decode."""
        least = min(most, LEAST_READ)
        room = max(most - writing, least)
        if not (self._step_ns and self._token_ns) or not writing or reading > writing:
            return room
        write_ns = self._known_ns(writing) + self._more(writing) * self._token_ns
        left_ns = max(self._step_ns, 2 * write_ns) - write_ns
        return min(room, max(int(left_ns / self._token_ns), least))

    def took(self, writing: int, read: int, ns: int) -> None:
        """Record a step: tokens decoded, tokens of prompts, duration."""
        if read:
            beside_ns = max(ns - self._known_ns(writing), ns / 4)
            self._token_ns = _average(self._token_ns, beside_ns / (read + self._more(writing)))
        else:
            before_ns = self._write_ns if writing == self._writers else 0.0
            self._writers, self._write_ns = writing, _average(before_ns, ns)

    def _known_ns(self, writing: int) -> float:
        """Return the estimated duration of decoding so many, from the last step that only decoded."""
        return self._write_ns * min(1.0, writing / self._writers)

    def _more(self, writing: int) -> int:
        """Return the tokens beyond that step's, which cost as any."""
        return max(0, writing - self._writers)


def _average(before: float, now: float) -> float:
    if not before:
        return now
    return before + (now - before) * (SLOWER if now > before else FASTER)
