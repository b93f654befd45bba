"""Responses as events: which faults are events, what is released, who leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from fastserve.errors import Kind, ModelError, ServeError
from fastserve.request import InferResponse
from fastserve.serving.streams import Event, alone, generate
from fastserve.tensor import DTYPES, Tensor
from fastserve.util.offload import OFFLOAD_BYTES, Offload

FAULT = ServeError(Kind.UNAVAILABLE, "full")
MODELS_FAULT = ModelError(Kind.INTERNAL, "raised")


class Source:
    """Responses with one byte each, or errors among them (str) and instead of them."""

    def __init__(self, *given: bytes | str | ServeError) -> None:
        self.given = given
        self.released: list[object] = []
        self.closed = False

    async def responses(self) -> AsyncGenerator[InferResponse, None]:
        try:
            for one in self.given:
                await asyncio.sleep(0)
                if isinstance(one, ServeError):
                    raise one
                yield self.response(one)
        finally:
            self.closed = True

    def response(self, one: bytes | str) -> InferResponse:
        found = InferResponse({}, lambda: self.released.append(one))
        if isinstance(one, str):
            found.error = ModelError(Kind.INTERNAL, one)
        elif one:
            found.outputs = {"y": Tensor(DTYPES["uint8"], (1,), one)}
        return found


def write(response: InferResponse) -> bytes:
    return b"<%b>" % response.outputs["y"].data


async def collect(source: Source) -> list[bytes | str]:
    return [
        event.text if event.fault is None else event.fault.message
        async for event in generate(source.responses, write, Offload())
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((b"a", b"b"), [b"<a>", b"<b>"]),
        ((b"a", b"", b"b"), [b"<a>", b"<b>"]),  # one without outputs says nothing
        ((b"",), []),
        (("no", b"a"), ["no", b"<a>"]),  # an error among responses, which others follow
        ((b"a", FAULT), [b"<a>", "full"]),
        ((b"", FAULT), ["full"]),  # the model has been reached
        ((MODELS_FAULT,), ["raised"]),
    ],
)
def test_events(given: Sequence[bytes | str | ServeError], expected: list[bytes | str]) -> None:
    source = Source(*given)
    assert asyncio.run(collect(source)) == expected
    assert source.released == [one for one in given if not isinstance(one, ServeError)]
    assert source.closed


def test_what_never_reached_the_model_is_raised() -> None:
    with pytest.raises(ServeError) as caught:
        asyncio.run(collect(Source(FAULT)))
    assert caught.value is FAULT


def test_a_request_that_cannot_be_made() -> None:
    """The model's own refusals are events, though it was not asked."""

    def start() -> AsyncGenerator[InferResponse, None]:
        raise MODELS_FAULT

    async def run() -> list[Event]:
        return [event async for event in generate(start, write, Offload())]

    assert asyncio.run(run()) == [Event(fault=MODELS_FAULT, final=True)]


def test_a_response_that_cannot_be_written() -> None:
    """It is released all the same, and the fault is an event: the status may have been sent."""
    source = Source(b"a", b"b")

    def refuse(response: InferResponse) -> bytes:
        raise FAULT

    async def run() -> list[Event]:
        return [event async for event in generate(source.responses, refuse, Offload())]

    assert asyncio.run(run()) == [Event(fault=FAULT, final=True)]
    assert (source.released, source.closed) == ([b"a"], True)


def test_a_large_response_is_written_beside_the_loop() -> None:
    """And is released when it was written, not before."""
    source, where = Source(b"a", bytes(OFFLOAD_BYTES), b"b"), []

    def note(response: InferResponse) -> bytes:
        where.append((threading.current_thread() is threading.main_thread(), len(source.released)))
        return b""

    async def run() -> int:
        return len([event async for event in generate(source.responses, note, Offload())])

    assert asyncio.run(run()) == 3
    assert where == [(True, 0), (False, 1), (True, 2)]


def test_who_leaves_ends_the_stream() -> None:
    """And nothing was taken that nobody has asked for."""
    source = Source(b"a", b"b", b"c")

    async def run() -> None:
        async with aclosing(generate(source.responses, write, Offload())) as events:
            assert (await anext(events)).text == b"<a>"
            assert source.released == [b"a"]

    asyncio.run(run())
    assert (source.released, source.closed) == ([b"a"], True)


def test_the_one_response_of_a_model_that_gives_one() -> None:
    source = Source()

    async def run() -> list[Event]:
        async def infer() -> InferResponse:
            return source.response(b"a")

        return [event async for event in generate(lambda: alone(infer), write, Offload())]

    assert asyncio.run(run()) == [Event(b"<a>", final=True)]
    assert source.released == [b"a"]
