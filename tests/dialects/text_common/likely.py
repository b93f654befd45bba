"""An engine that says how likely its tokens were, and others in their place."""

from __future__ import annotations

from fastserve.backends.llm.protocols import Out
from fastserve.codec.generation import Extra, Finish, Logprobs, read_extra, write_ranks, write_text
from tests.text_rig import Scripted

FIRST = -0.25


class Likely(Scripted):
    """-0.25 for the first token of an answer, and less each time; in its place might have been the numbers
    after it, each less likely by one. A prompt's second token was at -1, and so on."""

    def step(self, out: Out) -> bool:
        return super().step(_Scoring(self, out))

    def scored(self, rid: int, token: int, said: Extra) -> Extra:
        one = self._running[rid]
        sampling = one.request.note.sampling
        if sampling.logprobs >= 0:
            own = FIRST * one.count
            said.logprobs = Logprobs(own, [(token + i, own - i) for i in range(sampling.logprobs)])
        if sampling.prompt_logprobs and one.count == 1:
            said.prompt = [(id, -1.0 * i if i else None) for i, id in enumerate(one.request.ids)]
        if sampling.prompt_best >= 0 and one.count == 1:
            best = [(token + i, -0.5 * i) for i in range(sampling.prompt_best)]
            said.prompt_ranks = write_ranks([(7, best)] * (len(one.request.ids) - 1))
        return said


class _Scoring:
    """Adds it to what a step says."""

    def __init__(self, engine: Likely, out: Out) -> None:
        self._engine, self._out = engine, out
        self.end, self.room = out.end, out.room

    def token(
        self, rid: int, token: int, finish: Finish = Finish.NONE, took_us: int = 0, extra: bytes = b""
    ) -> None:
        said = self._engine.scored(rid, token, read_extra(extra) if extra else Extra())
        self._out.token(rid, token, finish, took_us, write_text(said))
