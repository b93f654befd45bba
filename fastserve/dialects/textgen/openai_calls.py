"""POST /v1/chat/completions and /v1/completions: from a call to its answer, whole or as a stream of events.

    read -> find the model -> prompts -> sequences -> whole answer
                                                   -> events, then [DONE]; or an error event, and no [DONE]

What is wrong before the first token is told by a status. A stream that goes wrong later has an event with the
error, which clients raise: its end is never silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import NamedTuple

from fastserve.dialects.textgen.events import send_events
from fastserve.dialects.textgen.openai_errors import refuse, tell
from fastserve.dialects.textgen.openai_models import find_model
from fastserve.dialects.textgen.openai_read import Wanted, read_chat, read_completion
from fastserve.dialects.textgen.openai_write import (
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    Form,
    Likely,
    Scored,
    Usage,
    finish_of,
)
from fastserve.dialects.textgen.paths import Named, Path, Refuse
from fastserve.dialects.textgen.patience import deadline_ns
from fastserve.dialects.textgen.sequences import Sequences, likelihood
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.sse import EventStream
from fastserve.dialects.textgen.typed import Misread, check
from fastserve.errors import ServeError
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import Detokenizer, Frames, PromptFault, TextAsk, TextModel, TextStream, Token
from fastserve.serving.text.answering import About
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope

SEED_MASK = 2**64 - 1


class Api(NamedTuple):
    """One of those that complete text: how it is read, written, refused."""

    read: Callable[[bytes | bytearray, int], Wanted]
    answer: type[Answer]
    refuse: Callable[[Service, Call, ServeError, str], None]
    tell: Callable[[Service, ServeError], bytes]
    """An error in the midst of a stream."""


class Complete:
    """The endpoint of one of them."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service, self._api = service, api

    async def __call__(self, call: Call) -> None:
        await self._service.answer(call, partial(self._answer, call), self._api.refuse)

    async def _answer(self, call: Call, about: About) -> bool:
        service, api = self._service, self._api
        wanted = await service.apart(len(call.body), api.read, call.body, service.options.max_stops)
        model = find_model(service, wanted.body.model or "", must_be_named=wanted.names_model)
        about.model = model
        form = Form(wanted.logprobs >= 0, wanted.tells_usage, service.options.full_text)
        answer = api.answer(model.name, model.version.number, form)
        one = Completing(service, call, model, wanted, answer)
        if wanted.streams:
            kind = answer.content_type
            return await send_events(service, call, model.name, one.send, self._tell, content_type=kind)
        body = await one.whole()
        took_ms = (monotonic_ns() - call.received_ns) // 1_000_000
        call.reply(200, body, headers=((b"openai-processing-ms", b"%d" % took_ms),))
        return True

    def _tell(self, fault: ServeError) -> bytes:
        return self._api.tell(self._service, fault)


@dataclass(slots=True)
class Sequence:
    """One sequence of an answer: its prompt's text where that is echoed, its tokens where they are scored."""

    index: int
    stream: TextStream
    echo: str = ""
    tokens: list[Token] = field(default_factory=list)
    begun: bool = False
    reader: Detokenizer | None = None
    """Makes text of its tokens, where they are scored; so many characters came of it."""
    chars: int = 0


class Completing:
    """One request on its way to its answer."""

    def __init__(
        self, service: Service, call: Call, model: TextModel, wanted: Wanted, answer: Answer
    ) -> None:
        self._service, self._call, self._model = service, call, model
        self._wanted, self._answer = wanted, answer
        self._sequences: list[Sequence] = []
        self._ended = 0  # of those that are poured

    async def whole(self) -> bytes:
        """The whole answer. Raises ServeError."""
        wanted = self._wanted
        async with await self._start() as running:
            tokens = await running.rest(keep=wanted.logprobs >= 0 or wanted.candidates > wanted.choices)
        for sequence, came in zip(self._sequences, tokens, strict=True):
            sequence.tokens = came
        choices = [self._choice(index, each) for index, each in enumerate(self._chosen())]
        return self._answer.write(choices, self._usage())

    async def send(self, out: EventStream) -> None:
        """The pieces of its stream. Raises ServeError."""
        async with await self._start() as running:
            await running.first()
            await running.pour(out, self._pieces, self._frames)
        end = self._answer.usage(self._usage()) if self._wanted.tells_usage else b""
        if end or self._answer.done:
            await out.write(end + self._answer.done)

    async def _start(self) -> Sequences:
        """Every sequence there will be, or none. Raises ServeError."""
        streams: list[TextStream] = []
        try:
            for number, ask in enumerate(await self._asks()):
                await asyncio.sleep(0)  # reading a prompt is milliseconds: others come between
                for stream in await self._start_one(number, ask):
                    streams.append(stream)
                    self._sequences.append(Sequence(len(self._sequences), stream, self._echo(ask)))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        self._service.read(self._call, self._model)
        return Sequences(self._service, self._call, self._model, streams, self._timeout_s())

    async def _start_one(self, number: int, ask: TextAsk) -> list[TextStream]:
        try:
            return await self._model.start_many(ask, self._wanted.candidates)
        except PromptFault as fault:
            wanted = self._wanted
            several = len(wanted.prompts) > 1
            fault.field = "messages" if wanted.messages else f"prompt[{number}]" if several else "prompt"
            raise

    async def _asks(self) -> list[TextAsk]:
        """What is asked of the model, for each prompt. Raises ServeError."""
        wanted, body = self._wanted, self._wanted.body
        images = await self._images()
        prompts = wanted.prompts
        if wanted.messages:
            prompts = [await self._model.chat(wanted.messages, **wanted.template)]
        return [
            TextAsk(
                prompt=prompt,
                sampling=wanted.sampling,
                seed=None if body.seed is None else body.seed & SEED_MASK,
                stop=wanted.stop,
                include_stop=bool(body.include_stop_str_in_output),
                priority=body.priority or 5,
                deadline_ns=deadline_ns(self._call.received_ns, self._timeout_s(), self._service.options),
                special=body.skip_special_tokens is False,
                templated=bool(wanted.messages),
                request_id=self._call.request_id,
                images=images,
            )
            for prompt in prompts
        ]

    async def _images(self) -> list[bytes]:
        found = self._wanted.images
        most, given = self._service.options.max_images, len(found)
        check(given <= most, "messages", f"have {given} images, allowed: at most {most}")
        try:
            return await self._service.images.load(self._model, [value for _, value in found])
        except ServeError as fault:
            raise Misread(fault.message, found[0][0] if given == 1 else "messages") from None

    def _timeout_s(self) -> int:
        return self._wanted.body.timeout or self._service.options.timeout_s

    def _echo(self, ask: TextAsk) -> str:
        if not self._wanted.echo:
            return ""
        return ask.prompt if isinstance(ask.prompt, str) else self._model.decode(ask.prompt)

    def _chosen(self) -> list[Sequence]:
        """The sequences that are told: of each prompt the likeliest, where there are more."""
        size, most = self._wanted.candidates, self._wanted.choices
        if size == most:
            return self._sequences
        groups = [self._sequences[at : at + size] for at in range(0, len(self._sequences), size)]
        ranked = [sorted(group, key=lambda each: likelihood(each.tokens), reverse=True) for group in groups]
        return [each for group in ranked for each in group[:most]]

    def _choice(self, index: int, sequence: Sequence) -> Choice:
        ending = sequence.stream.ending
        assert ending is not None
        scored = [*self._prompt_scored(sequence), *self._scored(sequence, sequence.tokens)]
        return Choice(index, sequence.echo + ending.text, finish_of(ending.reason), scored)

    def _pieces(self, index: int, tokens: list[Token]) -> bytes:
        """What there is to say of one of them, now that these tokens came."""
        sequence, answer = self._sequences[index], self._answer
        more = b"" if sequence.begun else self._beginning(sequence)
        frames = self._frames(index)
        if frames is None:
            said = [each for each in tokens if each.text or answer.scored]
            more += b"".join(
                [answer.piece(index, each.text, self._scored(sequence, [each])) for each in said]
            )
        else:
            more += frames.write(tokens)
        ending = sequence.stream.ending
        if ending is None or ending.fault is not None:
            return more
        self._ended += 1
        return more + answer.last(index, finish_of(ending.reason), self._last_usage())

    def _last_usage(self) -> Usage | None:
        """What the last piece of a chat's last choice tells of its tokens, as MindIE does (spec 3.6)."""
        wanted = self._wanted
        told = self._service.options.openai_flavor == "mindie" and wanted.messages and not wanted.tells_usage
        return self._usage() if told and self._ended == len(self._sequences) else None

    def _frames(self, index: int) -> Frames | None:
        return None if self._answer.scored else self._answer.frames(index)

    def _beginning(self, sequence: Sequence) -> bytes:
        sequence.begun = True
        said = self._answer.begin(sequence.index)
        if not sequence.echo:
            return said
        return said + self._answer.piece(sequence.index, sequence.echo, self._prompt_scored(sequence))

    def _prompt_scored(self, sequence: Sequence) -> list[Scored]:
        """What is known of an echoed prompt's tokens: how likely each was, not what else might have been."""
        if not (self._answer.scored and self._wanted.echo):
            return []
        return [self._one(sequence, token, "", lp, None) for token, lp in sequence.stream.prompt_logprobs]

    def _scored(self, sequence: Sequence, tokens: list[Token]) -> list[Scored]:
        if not self._answer.scored:
            return []
        return [
            self._one(
                sequence,
                each.id,
                each.text,
                each.logprob,
                [self._likely(id, f"token_id:{id}", lp) for id, lp in each.best],
            )
            for each in tokens
        ]

    def _one(
        self, sequence: Sequence, token: int, text: str, lp: float | None, best: list[Likely] | None
    ) -> Scored:
        own = self._likely(token, text, lp)
        if sequence.reader is None:
            special = self._wanted.body.skip_special_tokens is False
            sequence.reader = self._model.detokenizer(special=special)
        offset, known = sequence.chars, self._model.token_text(token)
        sequence.chars += len(sequence.reader.add(token) if known else text)
        return Scored(own, best, offset)

    def _likely(self, token: int, otherwise: str, lp: float | None) -> Likely:
        """`otherwise` is its text where nobody here knows the model's tokens."""
        text = self._model.token_text(token)
        data = self._model.token_bytes(token) if text else otherwise.encode(errors="replace")
        return Likely(text or otherwise, data, lp)

    def _usage(self) -> Usage:
        """Each prompt counts once, every token made counts."""
        streams = [each.stream for each in self._sequences]
        asked = sum(stream.prompt_tokens for stream in streams[:: self._wanted.candidates])
        made = sum(stream.ending.generated for stream in streams if stream.ending is not None)
        return Usage(asked, made)


def completing_path(name: str, path: str, api: Api, refuse: Refuse) -> Path:
    """The row of one of them."""

    def make(service: Service, named: Named) -> Endpoint:
        return Complete(service, api)

    return Path(HttpRoute(name, path, {"POST": Scope.INFER}), make, refuse)


CHAT = Api(read_chat, ChatAnswer, refuse, tell)
COMPLETION = Api(read_completion, CompletionAnswer, refuse, tell)
PATHS = (
    completing_path("chat", "/v1/chat/completions", CHAT, refuse),
    completing_path("completions", "/v1/completions", COMPLETION, refuse),
)
