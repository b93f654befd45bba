"""One request of MindIE's APIs on its way: what was read of it becomes a stream of the model's.

    read -> start -> [tokens ...] -> ending        what fails until `start` is plain JSON, also of streams

The APIs differ in what they read and in what they write of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import getrandbits
from typing import Generic, TypeVar

from fastserve.dialects.textgen.errors import NO_ANSWER, tell
from fastserve.dialects.textgen.infer_request import Asked
from fastserve.dialects.textgen.inputs import refuse_prompt
from fastserve.dialects.textgen.patience import Patience, deadline_ns
from fastserve.dialects.textgen.running import Held
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.sse import EventStream
from fastserve.errors import Kind, ServeError
from fastserve.serving.exchange import unforeseen
from fastserve.serving.text import (
    Ending,
    Frames,
    TextAsk,
    TextModel,
    TextStream,
    Token,
)
from fastserve.serving.text.answering import About
from fastserve.serving.text.ask import TO_FIT
from fastserve.wire.call import Call

SEED_BITS = 53
"""Of a seed that is chosen here: every client can read it, and send it again."""
Read = TypeVar("Read", bound=Asked)


class Answer(ABC, Generic[Read]):
    """The life of one call, whose API says how it is read and written."""

    model: TextModel
    asked: Read
    stream: TextStream

    def __init__(self, service: Service, call: Call) -> None:
        self.service, self.call = service, call

    @abstractmethod
    async def read(self) -> tuple[TextModel, Read]:
        """The model, and what is asked of it. Raises ServeError."""

    @abstractmethod
    def write(self, ending: Ending) -> bytes:
        """The reply of a call that wants no stream."""

    @abstractmethod
    def write_tokens(self, tokens: list[Token]) -> bytes:
        """Their events; nothing for the one that ends the sequence, where `write_last` has it."""

    def frames(self) -> Frames | None:
        """What `write_tokens` makes of them, where that is no more than frames."""
        return None

    @abstractmethod
    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        """The event that ends a stream; `token` is the last, None where it ended without one of its own."""

    async def run(self) -> None:
        """Answer the call; when this returns, it was, unless its client is gone."""
        await self.service.answer(self.call, self._answer, refuse_prompt)

    async def _answer(self, about: About) -> bool:
        about.model, self.asked = await self.read()
        self.model = about.model
        self.service.read(self.call, self.model)
        self.stream = await start(self.service, self.call, self.model, self.asked)
        held = self.service.running.hold(self.model.name, self.asked.request_id, self.stream)
        async with self.stream:
            with held as self._held:
                return await (self._send_events() if self.asked.stream else self._send_one())

    def _patience(self) -> Patience:
        return Patience(self.stream, self.call.received_ns, self.asked.timeout_s, self.service.options)

    async def _send_one(self) -> bool:
        with self._patience() as patience:
            ending = await self.stream.rest()
        fault = fault_of(ending, patience, self._held)
        if fault is not None:
            raise fault
        self.call.reply(200, self.write(ending))
        return True

    async def _send_events(self) -> bool:
        service = self.service
        async with EventStream(self.call, service.options.keepalive_s) as out:
            fault = None
            try:
                fault = await self._pass_on(out)
            except ConnectionResetError:
                raise
            except Exception as error:
                fault = unforeseen(self.call, error)
            if fault is not None:
                await out.write(tell(service, fault, self.model.name))
            await out.close()
        return fault is None

    async def _pass_on(self, out: EventStream) -> ServeError | None:
        """Every token as it comes, and the end; or what went wrong."""
        last: Token | None = None
        with self._patience() as patience:

            def write(tokens: list[Token]) -> bytes:
                nonlocal last
                if tokens and tokens[-1].finish:
                    last = tokens[-1]
                return self.write_tokens(tokens)

            ending = await out.pour(self.stream, write, self.frames())
        fault = fault_of(ending, patience, self._held)
        if fault is None:
            await out.write(self.write_last(ending, last))
        return fault


async def start(service: Service, call: Call, model: TextModel, asked: Asked) -> TextStream:
    """Raises ServeError."""
    options = service.options
    ask = TextAsk(
        prompt=asked.inputs.prompt,
        sampling=asked.sampling,
        seed=getrandbits(SEED_BITS) if asked.seed is None else asked.seed,
        priority=asked.priority,
        deadline_ns=deadline_ns(call.received_ns, asked.timeout_s, options),
        truncate=TO_FIT if options.truncate else 0,
        request_id=asked.request_id or call.request_id,
        images=await service.images.load(model, asked.inputs.images),
    )
    return await model.start(ask)


def fault_of(ending: Ending, patience: Patience, held: Held) -> ServeError | None:
    """What went wrong; None for nothing. What was stopped by its id is whole: it has what there was."""
    fault = ending.fault
    if patience.words:
        return ServeError(Kind.DEADLINE_EXCEEDED, patience.words)
    if fault is None or held.stopped:
        return None
    if fault.kind is Kind.DEADLINE_EXCEEDED:
        return ServeError(Kind.DEADLINE_EXCEEDED, patience.told)
    return ServeError(fault.kind, f"{NO_ANSWER}: {fault.message}")
