"""A text engine out of generators: one for each sequence, asked for one token a step.

    def generate(self, request):
        yield 5122              a token's id
        yield "Hello"           a piece of text, where there are no ids: 0 is its token's
        yield 5122, "Hello"     both; a third value is its log probability
        yield None              nothing yet: it is asked again soon

A generator that returns gives an end of sequence with that. It is closed when it has given what was asked
for, when it gave an end of sequence, and when nobody wants more: what it holds belongs into a `finally`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from fastserve.backends.base import explain, kind_of
from fastserve.backends.text_engine import Out, TextRequest
from fastserve.codec.text import Extra, Finish, Info, Logprobs, Sampling, write_text
from fastserve.errors import Kind, ServeError

log = logging.getLogger(__name__)

NO_VECTORS = "this model makes no embeddings"
# All generators have nothing yet: they are asked again after this.
NAP_S = 0.001


@dataclass(slots=True, eq=False)
class Prompt:
    """What `generate` is called with."""

    ids: list[int]
    """The prompt's tokens; empty where there is no tokenizer, `text` is it then."""
    text: str
    sampling: Sampling
    """max_new_tokens is kept for the model, and so are stop_ids; the rest is its own business."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """What the client said besides."""
    images: list[bytes] = field(default_factory=list)
    request_id: str = ""
    priority: int = 5


class Sequence:
    """One request, waiting or running."""

    __slots__ = ("asked", "last_ns", "made", "most", "request", "tokens", "why")

    def __init__(self, request: TextRequest, most: int) -> None:
        self.request, self.most = request, most
        self.asked = request.arrived_ns or time.monotonic_ns()
        self.last_ns, self.made = self.asked, 0
        self.tokens: Generator[Any, None, None] | None = None
        self.why = Finish.NONE  # it is to end

    def took_us(self) -> int:
        """Since the token before, or since it arrived."""
        now_ns = time.monotonic_ns()
        took_us, self.last_ns = (now_ns - self.last_ns) // 1000, now_ns
        return min(max(took_us, 0), 0xFFFFFFFF)


class GeneratorEngine:
    """See text_engine.TextEngine. `make` is the model's `generate`."""

    def __init__(
        self, make: Callable[[Any], Generator[Any, None, None]], info: Info, ageing_s: float = 0.0
    ) -> None:
        self.info = info
        self._make = make
        self._ageing_ns = int(ageing_s * 1e9)
        self._eos = frozenset(info.eos_ids)
        self._end = (min(info.eos_ids, default=0), "")  # of a generator that returns
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_rid: dict[int, Sequence] = {}

    def submit(self, request: TextRequest) -> None:
        """Raises ServeError for a prompt that is too long, and for one whose vector is wanted."""
        if request.note.embeds:
            raise ServeError(Kind.UNIMPLEMENTED, NO_VECTORS)
        info, given = self.info, len(request.ids)
        allowed = min(info.max_prompt_tokens, info.max_tokens - 1)
        if given > allowed:
            raise ServeError(Kind.INVALID_ARGUMENT, f"a prompt of {given} tokens, allowed: up to {allowed}")
        asked = request.note.sampling.max_new_tokens
        sequence = Sequence(request, min(asked, info.max_new_tokens, info.max_tokens - given))
        self._by_rid[request.rid] = sequence
        self._waiting.append(sequence)

    def cancel(self, rid: int, why: Finish) -> None:
        sequence = self._by_rid.get(rid)
        if sequence is not None and not sequence.why:
            sequence.why = why

    def pending(self) -> int:
        return len(self._by_rid)

    def step(self, out: Out) -> bool:
        self._end_cancelled(out)
        self._admit()
        ran = idle = False
        for sequence in list(self._running):
            if not out.room(sequence.request.rid):
                continue
            made = self._advance(sequence, out)
            ran, idle = ran or made, idle or not made
        if idle and not ran:
            time.sleep(NAP_S)
        return ran or idle

    def close(self) -> None:
        for sequence in list(self._by_rid.values()):
            self._forget(sequence)

    def _end_cancelled(self, out: Out) -> None:
        for sequence in [one for one in self._by_rid.values() if one.why]:
            self._forget(sequence)
            out.end(sequence.request.rid, sequence.why)

    def _admit(self) -> None:
        if not self._waiting or len(self._running) >= self.info.slots:
            return
        self._waiting.sort(key=self._rank)
        free = self.info.slots - len(self._running)
        admitted, self._waiting = self._waiting[:free], self._waiting[free:]
        self._running += admitted

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        waited_ns = time.monotonic_ns() - sequence.asked
        gained = waited_ns // self._ageing_ns if self._ageing_ns else 0
        return sequence.request.note.priority - gained, sequence.asked

    def _advance(self, sequence: Sequence, out: Out) -> bool:
        """One token of it, or its end. False when it has nothing yet."""
        rid = sequence.request.rid
        try:
            if sequence.tokens is None:
                sequence.tokens = self._make(read_prompt(sequence.request))
            said = next(sequence.tokens, self._end)
            if said is None:
                return False
            token, extra = self._read(said, sequence.request.note.sampling)
        # Whatever a model raises is its own request's fault alone.
        except Exception as error:
            if not isinstance(error, ServeError):
                log.exception("the model failed on a request", extra=_id_of(sequence))
            self._forget(sequence)
            out.end(rid, Finish.FAILED, write_text(Extra(message=explain(error), kind=kind_of(error).value)))
        else:
            sequence.made += 1
            finish = Finish.EOS if said is self._end else self._finish(sequence, token)
            if finish:
                self._forget(sequence)
            out.token(rid, token, finish, sequence.took_us(), extra)
        return True

    def _finish(self, sequence: Sequence, token: int) -> Finish:
        sampling = sequence.request.note.sampling
        if token in self._eos and not sampling.ignore_eos:
            return Finish.EOS
        if token in sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if sequence.made >= sequence.most else Finish.NONE

    def _read(self, said: Any, sampling: Sampling) -> tuple[int, bytes]:
        parts = said if isinstance(said, tuple) else (said,)
        if not 1 <= len(parts) <= 3:
            raise TypeError(
                f"generate yielded a tuple of {len(parts)}, not (id, text) or (id, text, logprob)"
            )
        token = next((part for part in parts[:1] if isinstance(part, int)), None)
        text = next((part for part in parts[:2] if isinstance(part, str)), None)
        if token is None and text is None:
            raise TypeError(f"generate yielded {type(said).__name__}, not an id, a text or (id, text)")
        own = float(parts[2]) if len(parts) == 3 else None
        if text is None and (own is None or sampling.logprobs < 0):
            return token or 0, b""
        logprobs = Logprobs(own) if own is not None and sampling.logprobs >= 0 else None
        return token or 0, write_text(Extra(text=text, logprobs=logprobs))

    def _forget(self, sequence: Sequence) -> None:
        del self._by_rid[sequence.request.rid]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.tokens is not None:
            try:
                sequence.tokens.close()
            except Exception:
                log.exception("the model failed to end a request", extra=_id_of(sequence))


def read_prompt(request: TextRequest) -> Prompt:
    """A request as a model sees it."""
    note = request.note
    return Prompt(
        ids=request.ids,
        text=note.text,
        sampling=note.sampling,
        parameters=note.parameters,
        images=note.images,
        request_id=note.request_id,
        priority=note.priority,
    )


def _id_of(sequence: Sequence) -> dict[str, str] | None:
    found = sequence.request.note.request_id
    return {"request_ids": found} if found else None
