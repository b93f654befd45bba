"""Texts of one request for vectors, on their way through a line that others use too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastserve.codec.generation import Extra, Finish, Info, Record, TextNote, write_text
from fastserve.errors import Kind, ServeError
from fastserve.serving.text import Embedding, TextAsk, TextModels
from fastserve.serving.text.stream import AT_A_TIME, EncodedPrompt
from tests.text_rig import LocalEngine, Scripted

Heard = Callable[[list[Record]], None]


class Place:
    flow = None

    def __init__(self, line: Line) -> None:
        self.line = line
        self.took = 0

    def taken(self, records: int) -> None:
        self.took += records

    def cancel(self, why: Finish = Finish.CANCELLED) -> None:
        self.line.waiting.pop(self, None)
        self.line.cancelled += 1


class Line:
    """An engine with so many places; `run_one` ends the oldest sequence: its first token is the vector."""

    def __init__(self, places: int) -> None:
        self.places, self.most = places, 0
        self.waiting: dict[Place, tuple[Sequence[int], Heard]] = {}
        self.cancelled = 0
        self.refusal = ServeError(Kind.UNAVAILABLE, "full", retry_after_s=1)

    def start(self, ids: Sequence[int], note: TextNote, heard: Heard) -> Place:
        if len(self.waiting) >= self.places:
            raise self.refusal
        place = Place(self)
        self.waiting[place] = ids, heard
        self.most = max(self.most, len(self.waiting))
        return place

    def run_one(self, records: Sequence[Record] = (), finish: int = Finish.STOP, data: bytes = b"") -> None:
        place, (ids, heard) = next(iter(self.waiting.items()))
        del self.waiting[place]
        made = write_text(Extra(vector=bytes([ids[0] % 256]) * 4))
        heard([*records, (-1, finish, 0, data or made)])

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.waiting:
                self.run_one()


def embedding(line: Line, count: int) -> Embedding:
    prompts = [EncodedPrompt([at]) for at in range(count)]
    return Embedding(line.start, prompts, lambda prompt: TextNote(embeds=True))


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_a_version_that_is_unloaded_while_a_request_waits_for_its_line() -> None:
    """Others have all places, and when they are done there is no line any more."""

    async def work() -> None:
        line = Line(1)
        asked = asyncio.create_task(embedding(line, 3).run())
        await asyncio.sleep(0)
        line.places = 0
        line.run_one()
        await asyncio.sleep(0.02)
        assert not asked.done()
        gone = ServeError(Kind.UNAVAILABLE, "version 1 of model m is not available")
        line.refusal = gone
        with pytest.raises(ServeError) as told:
            await asked
        assert told.value is gone

    run(work())


@pytest.mark.parametrize("places", [1, 5, AT_A_TIME, 1000])
def test_a_request_of_more_texts_than_the_line_has_places(places: int) -> None:
    """It waits for its own: a line that is full of nobody else refuses it nothing."""

    async def work() -> None:
        line = Line(places)
        ends = asyncio.create_task(line.run())
        async with embedding(line, 300) as asked:
            vectors = await asked.run()
        ends.cancel()
        assert [vector.data[0] for vector in vectors] == [at % 256 for at in range(300)]
        assert line.most == min(places, AT_A_TIME)

    run(work())


def test_a_line_that_others_have_filled_refuses_it() -> None:
    async def work() -> None:
        with pytest.raises(ServeError) as refused:
            async with embedding(Line(0), 3) as asked:
                await asked.run()
        assert (refused.value.kind, refused.value.retry_after_s) == (Kind.UNAVAILABLE, 1)

    run(work())


def test_others_who_take_the_places_meanwhile_do_not_end_it() -> None:
    async def work() -> None:
        line = Line(1)
        async with embedding(line, 2) as asked:
            running = asyncio.create_task(asked.run())
            await asyncio.sleep(0)
            line.places = 0
            line.run_one()
            await asyncio.sleep(0.05)
            line.places = 1
            while not line.waiting:
                await asyncio.sleep(0.001)
            line.run_one()
            assert [vector.data[0] for vector in await running] == [0, 1]

    run(work())


def test_whoever_leaves_cancels_what_is_in_the_line() -> None:
    async def work() -> None:
        line = Line(10)
        async with embedding(line, 300) as asked:
            running = asyncio.create_task(asked.run())
            await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(ServeError) as refused:
                await running
            assert refused.value.kind is Kind.CANCELLED
        assert (line.waiting, line.cancelled) == ({}, 10)

    run(work())


def test_tokens_before_the_vector_are_taken_too() -> None:
    """Else the engine waits for a reader that has them."""

    async def work() -> None:
        line = Line(1)
        async with embedding(line, 1) as asked:
            running = asyncio.create_task(asked.run())
            await asyncio.sleep(0)
            (place,) = line.waiting
            line.run_one([(7, 0, 0, b""), (8, 0, 0, b"")])
            await running
            assert place.took == 3

    run(work())


@pytest.mark.logs_errors
@pytest.mark.parametrize(
    ("finish", "data", "kind"),
    [
        (Finish.STOP, b"\xc1", Kind.INTERNAL),
        (Finish.FAILED, write_text(Extra(message="gone", kind=99)), Kind.INTERNAL),
        (Finish.FAILED, write_text(Extra(message="gone", kind=14)), Kind.UNAVAILABLE),
        (Finish.EOS, write_text(Extra()), Kind.INTERNAL),
        (Finish.TIMEOUT, write_text(Extra()), Kind.DEADLINE_EXCEEDED),
    ],
)
def test_what_a_text_failed_of_ends_the_request(finish: int, data: bytes, kind: Kind) -> None:
    async def work() -> None:
        line = Line(4)
        async with embedding(line, 9) as asked:
            running = asyncio.create_task(asked.run())
            await asyncio.sleep(0)
            line.run_one(finish=finish, data=data)
            with pytest.raises(ServeError) as refused:
                await running
            assert refused.value.kind is kind
        assert line.cancelled == 3

    run(work())


@pytest.mark.parametrize(("texts", "beside"), [(20, False), (2000, True)])
def test_many_small_texts_are_read_beside_the_loop(texts: int, beside: bool) -> None:
    """Each is small; all of them in one turn of the loop would hold everybody up."""

    async def work() -> None:
        with LocalEngine() as engine:
            engine.add("m1", Scripted([], info=Info(tokenizer="words", embeds=2, max_tokens=4000)))
            model = TextModels(engine.context).find("m1")
            readers = set()
            encode = model.tokenizer.encode

            def watched(text: str, *, special: bool = True) -> list[int]:
                readers.add(threading.get_ident())
                return encode(text, special=special)

            model.tokenizer.encode = watched  # type: ignore[method-assign]
            await model.embedding([TextAsk(prompt="a " * 100)] * texts)
            assert readers.isdisjoint({threading.get_ident()}) is beside

    run(work())
