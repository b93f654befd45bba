"""Generation: one request, and what its model says to it as events, as they come.

    def start():
        return engine.stream(version, request) if view.decoupled else alone(partial(engine.infer, ...))

    async with aclosing(generate(start, write, service.apart)) as events:
        async for event in events: ...                event.text, or event.fault

Nothing is kept between model and client: a client that reads slowly holds its model up after the parts the
engine lets wait, and one that leaves ends the stream. A large response is written apart from the event loop.
What prompts and events look like is a dialect's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastserve.apart import APART_BYTES, Apart
from fastserve.errors import ModelError, ServeError
from fastserve.request import InferResponse


@dataclass(frozen=True, slots=True)
class Event:
    """One response as its dialect writes it, or what went wrong. `final`: it is known that none follows."""

    text: bytes = b""
    fault: ServeError | None = None
    final: bool = False


async def generate(
    start: Callable[[], AsyncGenerator[InferResponse, None]],
    write: Callable[[InferResponse], bytes],
    apart: Apart,
) -> AsyncGenerator[Event, None]:
    """Every response that has outputs by `write`, and released. `start` may raise ServeError as well.

    What never reached the model raises ServeError before any event. A fault of the model's is an event, and
    so is any after the first response; more may follow one that came as a response."""
    begun = False
    try:
        async with aclosing(start()) as responses:
            async for response in responses:
                begun = True
                try:
                    event = await _write(response, write, apart)
                finally:
                    response.release()
                if event is not None:
                    yield event
    except ServeError as fault:
        if not (begun or isinstance(fault, ModelError)):
            raise
        yield Event(fault=fault, final=True)


async def _write(
    response: InferResponse, write: Callable[[InferResponse], bytes], apart: Apart
) -> Event | None:
    if response.error is not None:
        return Event(fault=response.error, final=response.final)
    if not response.outputs:
        return None
    large = response.nbytes >= APART_BYTES
    text = await apart(response.nbytes, write, response) if large else write(response)
    return Event(text, final=response.final)


async def alone(infer: Callable[[], Awaitable[InferResponse]]) -> AsyncGenerator[InferResponse, None]:
    """The one response of a model that gives one. Raises ServeError."""
    yield await infer()
