"""The engine of vectors on a scripted `embed`: who goes first, who fails, what is left."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from fastserve.backends.llm.embedding import MOST_TOKENS, EmbedEngine
from fastserve.backends.llm.protocols import TextRequest
from fastserve.codec.generation import Finish, Info, TextNote
from fastserve.errors import Kind, ServeError
from fastserve.settings.model_options import TextOptions
from tests.backends.llm.outs import Heard

BAD = 13


class Scripted:
    """The vector of a text is its first token and how many it has."""

    def __init__(self, slots: int = 4, **options: Any) -> None:
        self.batches: list[list[int]] = []
        self.closed = False
        info = Info(vocab_size=100, max_prompt_tokens=5000, slots=slots, embeds=2, writes=False)
        self.engine = EmbedEngine(self.embed, info, TextOptions(**{"normalize": False} | options), self.close)
        self.heard = Heard()

    def embed(self, requests: list[TextRequest]) -> Any:
        self.batches.append([request.rid for request in requests])
        if any(BAD in request.ids for request in requests):
            raise ServeError(Kind.INVALID_ARGUMENT, "unlucky")
        return [[request.ids[0] if request.ids[0] != 9 else np.nan, len(request.ids)] for request in requests]

    def close(self) -> None:
        self.closed = True

    def ask(self, rid: int, ids: list[int], **note: Any) -> None:
        self.engine.submit(TextRequest(rid, ids, TextNote(embeds=True, **note)))

    def run(self) -> None:
        while self.engine.pending():
            self.engine.step(self.heard)

    def vector(self, rid: int) -> list[float]:
        (extra,) = self.heard.extras[rid]
        return [float(each) for each in np.frombuffer(extra.vector, "<f4")]


def test_batches_by_priority_and_arrival() -> None:
    one = Scripted()
    for rid in range(10):
        one.ask(rid, [rid + 20] * (rid + 1), priority=1 if rid >= 8 else 5)
    one.run()
    assert one.batches == [[8, 9, 0, 1], [2, 3, 4, 5], [6, 7]]
    assert [one.vector(rid) for rid in range(10)] == [[rid + 20, rid + 1] for rid in range(10)]


def test_a_batch_has_so_many_tokens() -> None:
    one = Scripted(slots=64)
    one.ask(0, [1] * (MOST_TOKENS // 2))
    one.ask(1, [1])
    one.ask(2, [1])
    one.ask(3, [1] * 5000)
    one.run()
    assert one.batches == [[0, 1], [2], [3]]


def test_who_fails_fails_alone() -> None:
    one = Scripted()
    for rid, ids in enumerate([[1], [BAD], [9], [4]]):
        one.ask(rid, ids)
    one.run()
    assert one.heard.ended == {0: Finish.STOP, 1: Finish.FAILED, 2: Finish.FAILED, 3: Finish.STOP}
    assert (one.heard.extras[1][0].message, one.heard.extras[1][0].kind) == (
        "unlucky",
        Kind.INVALID_ARGUMENT.value,
    )
    assert "NaN" in one.heard.extras[2][0].message
    assert one.batches == [[0, 1, 2, 3], [0], [1], [2], [3]]


@pytest.mark.parametrize("made", [[[1.0]], [1.0, 2.0], [[1.0, 2.0], [1.0, 2.0]], [["a", "b"]], None])
def test_what_is_no_vector_fails(made: Any) -> None:
    one = Scripted()
    one.engine._embed = lambda _: made
    one.ask(0, [1])
    one.run()
    assert one.heard.ended == {0: Finish.FAILED}


def test_no_memory_for_a_batch_is_none_for_it_alone() -> None:
    one = Scripted()
    embed, one.engine._embed = one.engine._embed, lambda batch: _short(batch, one.embed)
    one.ask(0, [1])
    one.ask(1, [2])
    one.ask(2, [3] * 100)
    one.run()
    assert one.heard.ended == {0: Finish.STOP, 1: Finish.STOP, 2: Finish.FAILED}
    assert one.heard.extras[2][0].kind == Kind.INTERNAL.value  # a MemoryError is the model's failure
    assert embed is not None


def _short(batch: list[TextRequest], embed: Any) -> Any:
    if sum(len(request.ids) for request in batch) > 1:
        raise MemoryError
    return embed(batch)


def test_who_leaves_or_is_late_is_not_computed() -> None:
    one = Scripted()
    one.ask(0, [1])
    one.ask(1, [1], deadline_ns=time.monotonic_ns() - 1)
    one.ask(2, [1])
    one.engine.cancel(0, Finish.CANCELLED)
    one.engine.cancel(0, Finish.TIMEOUT)
    one.engine.cancel(77, Finish.CANCELLED)
    one.run()
    assert one.heard.ended == {0: Finish.CANCELLED, 1: Finish.TIMEOUT, 2: Finish.STOP}
    assert one.batches == [[2]]
    assert not one.engine.step(one.heard)


def test_the_line_has_an_end() -> None:
    one = Scripted(slots=2, max_waiting=1)
    for rid in range(3):
        one.ask(rid, [1])
    with pytest.raises(ServeError) as full:
        one.ask(3, [1])
    assert (full.value.kind, full.value.retry_after_s) == (Kind.RESOURCE_EXHAUSTED, 1)
    one.run()
    one.engine.close()
    assert one.closed


def test_length_one() -> None:
    one = Scripted(normalize=True)
    one.ask(0, [3, 3, 3, 3])
    one.run()
    assert one.vector(0) == pytest.approx([0.6, 0.8])
