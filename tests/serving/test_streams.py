"""The line of a stream: order, what steps out of it, bounds, ends, and who leaves. No server, no model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.serving import streams
from fastserve.serving.streams import Turn, answer_stream

FAULT = ServeError(Kind.INTERNAL, "the test's")


class Asked:
    """Requests that `begin` is given, by number: answered at once, later by the test, in pieces, or with a
    fault."""

    def __init__(self) -> None:
        self.turns: dict[int, Turn] = {}
        self.gone: list[int] = []
        self.cancelled: list[int] = []

    def begin(self, request: int, turn: Turn) -> Coroutine[Any, Any, None] | None:
        self.turns[request] = turn
        if request >= 100:
            return self._say(request, turn)
        if request >= 50:
            return self._wait(request)
        turn.on_gone = lambda: self.gone.append(request)
        return None

    async def _say(self, request: int, turn: Turn) -> None:
        turn.step_out()
        for number in range(request - 100):
            await turn.say(b"%d.%d" % (request, number))
        turn.leave()

    async def _wait(self, request: int) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise


async def feed(*requests: int) -> AsyncIterator[int]:
    for request in requests:
        yield request


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_answers_come_in_the_order_of_requests() -> None:
    async def work() -> None:
        asked = Asked()
        answers = answer_stream(feed(1, 2, 3), asked.begin, 8)
        first = asyncio.ensure_future(anext(answers))
        await settle()
        asked.turns[3].reply(b"3")
        asked.turns[2].reply(b"2")
        await settle()
        assert not first.done()
        asked.turns[1].reply(b"1")
        assert [await first, *[message async for message in answers]] == [b"1", b"2", b"3"]

    asyncio.run(work())


def test_who_steps_out_holds_up_nobody_and_is_waited_for() -> None:
    async def work() -> None:
        asked = Asked()
        answers = answer_stream(feed(1, 102, 2), asked.begin, 8)
        assert [await anext(answers), await anext(answers)] == [b"102.0", b"102.1"]
        asked.turns[2].reply(b"2")
        asked.turns[1].reply(b"1")
        assert [message async for message in answers] == [b"1", b"2"]

    asyncio.run(work())


def test_no_more_are_begun_than_may_be_under_way() -> None:
    async def work() -> None:
        asked = Asked()
        answers = answer_stream(feed(*range(6)), asked.begin, 2)
        for number in range(6):
            reading = asyncio.ensure_future(anext(answers))
            await settle()
            assert sorted(asked.turns) == list(range(min(6, number + 2)))
            asked.turns[number].reply(b"%d" % number)
            assert await reading == b"%d" % number
        await answers.aclose()

    asyncio.run(work())


def test_who_reads_slowly_holds_up_what_is_said() -> None:
    async def work() -> None:
        asked = Asked()
        said = streams.MOST_WAITING * 2
        answers = answer_stream(feed(100 + said), asked.begin, 2)
        await anext(answers)
        await settle()
        line = asked.turns[100 + said]._line
        assert len(line._said) == streams.MOST_WAITING + 1
        assert len([message async for message in answers]) == said - 1

    asyncio.run(work())


@pytest.mark.parametrize("after", [0, 1])
def test_a_fault_ends_the_stream_in_its_turn(after: int) -> None:
    async def work() -> None:
        asked = Asked()
        answers = answer_stream(feed(1, 2, 3, 50), asked.begin, 8)
        reading = asyncio.ensure_future(anext(answers))
        await settle()
        asked.turns[1 + after].fail(FAULT)
        asked.turns[2 - after].reply(b"good")
        asked.turns[1 + after].reply(b"never")  # it was answered
        if after:
            assert await reading == b"good"
            reading = asyncio.ensure_future(anext(answers))
        with pytest.raises(ServeError, match="the test's"):
            await reading
        assert asked.cancelled == [50]
        assert 3 in asked.gone

    asyncio.run(work())


def test_what_the_requests_raise_comes_after_the_answers() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise FAULT

    async def work() -> None:
        asked = Asked()
        answers = answer_stream(broken(), asked.begin, 8)
        reading = asyncio.ensure_future(anext(answers))
        await settle()
        asked.turns[1].reply(b"1")
        assert await reading == b"1"
        with pytest.raises(ServeError, match="the test's"):
            await anext(answers)

    asyncio.run(work())


def test_what_begin_raises_ends_the_stream_in_its_turn() -> None:
    async def work() -> None:
        asked = Asked()

        def begin(request: int, turn: Turn) -> Coroutine[Any, Any, None] | None:
            if request == 2:
                raise FAULT
            return asked.begin(request, turn)

        answers = answer_stream(feed(1, 2, 3), begin, 8)
        reading = asyncio.ensure_future(anext(answers))
        await settle()
        asked.turns[1].reply(b"1")
        assert await reading == b"1"
        with pytest.raises(ServeError, match="the test's"):
            await asyncio.wait_for(anext(answers), 60)

    asyncio.run(work())


def test_a_coroutine_whose_work_is_cancelled_ends_the_stream() -> None:
    async def work() -> None:
        waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await waited

        answers = answer_stream(feed(1), lambda request, turn: wait(), 8)
        reading = asyncio.ensure_future(anext(answers))
        await settle()
        waited.cancel()
        with pytest.raises(ServeError, match="was cancelled"):
            await asyncio.wait_for(reading, 60)

    asyncio.run(work())


def test_who_left_and_then_fails_has_left_once() -> None:
    async def leave_and_fail(turn: Turn) -> None:
        turn.step_out()
        await turn.say(b"said")
        turn.leave()
        raise FAULT

    async def work() -> None:
        answers = answer_stream(feed(1), lambda request, turn: leave_and_fail(turn), 8)
        assert await asyncio.wait_for(anext(answers), 60) == b"said"
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(answers), 60)

    asyncio.run(work())


def test_who_leaves_ends_everything() -> None:
    async def work() -> None:
        asked = Asked()
        answers = answer_stream(feed(1, 50, 101, 2), asked.begin, 8)
        assert await anext(answers) == b"101.0"
        await settle()
        await answers.aclose()
        assert (asked.gone, asked.cancelled) == ([1, 2], [50])
        asked.turns[1].reply(b"late")

    asyncio.run(work())


def test_what_a_coroutine_raises_ends_the_stream() -> None:
    async def fails() -> None:
        raise FAULT

    async def work() -> None:
        with pytest.raises(ServeError, match="the test's"):
            await anext(answer_stream(feed(1), lambda request, turn: fails(), 8))

    asyncio.run(work())


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning", "error::RuntimeWarning")
def test_a_reader_that_leaves_before_the_work_has_begun() -> None:
    """In the turn of the loop in which its requests were read."""
    asked = Asked()

    async def work() -> None:
        def begin(request: int, turn: Turn) -> Coroutine[Any, Any, None] | None:
            first.cancel()
            return asked.begin(request, turn)

        first = asyncio.ensure_future(anext(answer_stream(feed(50, 51), begin, 8)))
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(work())
    gc.collect()
    assert (list(asked.turns), asked.cancelled) == ([50, 51], [])


def refusing(request: int, turn: Turn) -> None:
    """Requests below 0 are refused, 0 for a time."""
    if request > 0:
        turn.reply(b"%d" % request)
    else:
        turn.refuse_with(b"no", Kind.UNAVAILABLE if request == 0 else Kind.INVALID_ARGUMENT)


async def answers(*requests: int) -> tuple[int, Kind | None]:
    """How many there were, and what the stream ended with."""
    count = 0
    try:
        async for _ in answer_stream(feed(*requests), refusing, 16):
            count += 1
    except ServeError as fault:
        return count, fault.kind
    return count, None


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((-1,) * 1000, (1000, None)),
        ((-1,) * 1001, (1000, Kind.RESOURCE_EXHAUSTED)),
        (((-1,) * 1000 + (1,)) * 2, (2002, None)),
        ((0,) * 2000, (2000, None)),
    ],
    ids=["as many as may be", "one more", "one that is answered between", "transient"],
)
def test_a_stream_of_refused_requests_ends(requests: tuple[int, ...], expected: object) -> None:
    assert streams.MOST_REFUSED == 1000
    assert asyncio.run(answers(*requests)) == expected
