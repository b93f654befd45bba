"""Text engines and models as protocols: an engine runs many sequences, one iteration at a time, in a worker.

    engine.submit(request)      joins at the next step it fits in; never waits
    engine.cancel(rid, why)     takes effect at the next step, and always yields a last record
    engine.step(out)            one iteration: a record in `out` for each token; whether anything ran
    engine.pending()            sequences that have not had their last record

Everything is called from one thread. workers/text_loop.py delivers requests and sends records; the front
makes text of tokens. A BatchEngine computes logits with a ModelRunner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastserve.codec.generation import Finish, Info, TextNote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class TextRequest:
    """One sequence to run. `ids` is the prompt; empty where the engine takes `note.text`."""

    rid: int
    ids: list[int]
    note: TextNote
    arrived_ns: int = 0


class Out(Protocol):
    """Takes the records of a step."""

    def token(
        self, rid: int, token: int, finish: Finish = Finish.NONE, took_us: int = 0, extra: bytes = b""
    ) -> None:
        """Send one token of a sequence; with a `finish`, its last. `took_us`: microseconds since the token
        before, since arrival for the first. `extra` are bytes of codec.text.Extra."""

    def end(self, rid: int, finish: Finish, extra: bytes = b"") -> None:
        """Send a last record without a token: cancelled, timed out, failed."""

    def room(self, rid: int) -> bool:
        """Return whether a sequence may get one token more: its reader is near enough, or a request waits
        for its slot. A sequence without room keeps its slot and is stalled until its reader catches up, its
        deadline passes, it is cancelled, or a request waits that could have the slot: then it writes to its
        end."""


class TextEngine(Protocol):
    """Sequences of one loaded model."""

    info: Info

    def submit(self, request: TextRequest) -> None:
        """Take a request. Raises ServeError for one that can never run (a prompt that is too long, say)."""

    def cancel(self, rid: int, why: Finish) -> None:
        """End a sequence at the next step. Nothing for one that has ended."""

    def step(self, out: Out) -> bool:
        """Run one iteration over all sequences that can go on. Return False when none could: until there is
        a request, a cancellation, room or a deadline, another would do nothing. An exception ends the
        worker."""

    def pending(self) -> int:
        """Sequences submitted and not ended."""

    def close(self) -> None:
        """Give memory back."""


class TextBackend(TextEngine, Protocol):
    """A backend of text models (registry: takes="text"): made like others, an engine once it is loaded."""

    def load(self) -> None:
        """Loads the model; may take minutes. Whatever it raises fails the load, in those words."""


@dataclass(slots=True)
class Chunk:
    """A stretch of one prompt, or of a draft: `count` tokens at `offset` in the plan, which become positions
    `start` and on of the row."""

    row: int
    offset: int
    count: int
    start: int


@dataclass(slots=True)
class StepPlan:
    """The plan of one step: int64 arrays. The first `writing` tokens belong to rows 0, 1, ... of the cache,
    one each; chunks follow, of prompts, or of drafts: a draft's row decodes, and the chunk begins behind the
    row's own token, which this step computes too. `wanted` are the places in `tokens` whose logits are
    needed, `pooled` those whose hidden states are, None for none. `adapters` are those of `tokens` by number,
    0 for none; None where no token has one."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    writing: int
    chunks: list[Chunk]
    wanted: NDArray[np.int64]
    pooled: NDArray[np.int64] | None = None
    adapters: NDArray[np.int64] | None = None


class KVCache(Protocol):
    """Rows of keys and values. All values are finite at any time: stale ones are masked, but NaN times zero
    would be NaN."""

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row."""

    def swap(self, one: int, other: int, count: int) -> None:
        """Exchange the first `count` positions of two rows."""

    def wipe(self, row: int, count: int, begin: int = 0) -> None:
        """Zero the first `count` positions of a row, from `begin` on, which may hold NaN."""


class ModelRunner(Protocol):
    """Weights, and the cache that belongs to them."""

    @property
    def cache(self) -> KVCache:
        """The model's cache."""

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        """Return logits [wanted, vocab], valid until the next call. Raises MemoryError when memory is short:
        the plan may be run again, or a smaller one."""

    def states(self) -> NDArray[np.float32]:
        """Return hidden states [pooled, width] of the last plan, behind the last norm."""

    def close(self) -> None:
        """Give memory back."""
