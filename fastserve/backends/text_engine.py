"""What a text engine is: it runs many sequences, one iteration at a time, inside a worker.

    engine.submit(request)      joins at the next step it fits in; never waits
    engine.cancel(rid, why)     takes effect at the next step, and always yields a last record
    engine.step(out)            one iteration: a record in `out` for each token; whether anything ran
    engine.pending()            sequences that have not had their last record

Everything is called from one thread. How requests get here and where records go is the worker's business
(workers/text.py); what tokens mean to a client is the front's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fastserve.codec.text import Finish, Info, TextNote


@dataclass(slots=True, eq=False)
class TextRequest:
    """One sequence to run. `ids` is the prompt; empty where the engine takes `note.text`."""

    rid: int
    ids: list[int]
    note: TextNote
    arrived_ns: int = 0


class Out(Protocol):
    """Where a step puts what it has made. A sequence whose reader is behind may not get more: `room` says."""

    def token(
        self, rid: int, token: int, finish: Finish = Finish.NONE, took_us: int = 0, extra: bytes = b""
    ) -> None:
        """One token of one sequence. `took_us`: since its arrival for the first, since the one before for
        others. With a `finish`, it is the last. `extra` are bytes of codec.text.Extra."""

    def end(self, rid: int, finish: Finish, extra: bytes = b"") -> None:
        """A last record without a token: cancelled, timed out, failed."""

    def room(self, rid: int) -> bool:
        """Whether the reader of this sequence is near enough for one token more. A sequence that has no room
        keeps its slot and stands still until its reader comes, its deadline passes or it leaves."""


class TextEngine(Protocol):
    """Sequences of one loaded model."""

    info: Info

    def submit(self, request: TextRequest) -> None:
        """Take a request. Raises ServeError for one that can never run (a prompt that is too long, say)."""

    def cancel(self, rid: int, why: Finish) -> None:
        """End a sequence at the next step. Nothing for one that has ended."""

    def step(self, out: Out) -> bool:
        """One iteration over all sequences that can go on. False when none could: until there is a request, a
        cancellation, room or a deadline, another would do nothing. What it raises is the worker's end."""

    def pending(self) -> int:
        """Sequences submitted and not ended."""

    def close(self) -> None:
        """Give memory back."""


class TextBackend(TextEngine, Protocol):
    """A backend that takes text (registry: takes="text"): made like others, an engine once it is loaded."""

    def load(self) -> None:
        """Loads the model; may take minutes. Whatever it raises fails the load, in those words."""
