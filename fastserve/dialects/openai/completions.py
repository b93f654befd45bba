"""POST /v1/chat/completions and /v1/completions (spec 8): from a call to its answer, whole or as events.

    read -> find the model -> prompts -> sequences -> whole answer
                                                   -> events, then [DONE]; or an error event, and no [DONE]

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":"He"}}]}

Errors before the first token are refused with a status. A stream that fails later gets an event with the
error, on which clients raise: no stream ends silently. An AnswerEncoder encodes the constant parts of a
stream's chunks once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from time import monotonic_ns, time
from typing import Any, NamedTuple

import msgspec

from fastserve.codec.generation import Finish, read_ranks
from fastserve.dialects.openai.call_parsers import AnswerPart
from fastserve.dialects.openai.errors import refuse, tell
from fastserve.dialects.openai.requests import CompletionTask, Prompt, find_model, read_chat, read_completion
from fastserve.dialects.openai.tools import ToolCall, ToolPlan, ToolReader, plan_calls, write_call_part
from fastserve.dialects.text_common.endpoint_parts import (
    BodyUse,
    InvalidBody,
    Refuse,
    TextRoute,
    TextService,
    check,
    read_offloaded,
)
from fastserve.dialects.text_common.event_streams import (
    EVENTS,
    EventStream,
    SequenceGroup,
    deadline_ns,
    mean_logprob,
    send_events,
)
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.request import Call
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import (
    Detokenizer,
    EventTemplate,
    Placeholder,
    PromptFault,
    TextAsk,
    TextModel,
    TextStream,
    Token,
)
from fastserve.serving.text.models import MOST_PROMPT_SCORES, TextCall, check_together, count_together
from fastserve.serving.text.tokenizer import Tokenizer

SEED_MASK = 2**64 - 1
MOST_ECHOED = 1 << 20
"""Characters, or tokens, of prompts that an answer repeats."""


RANK_WORK = 512
"""Cost of one log probability of a prompt, in bytes of offloaded work: 2 us to print it."""


class CompletionApi(NamedTuple):
    """One of the APIs that complete text: its reader, writer and refusals."""

    read: Callable[[bytes | bytearray, int], CompletionTask]
    answer: type[AnswerEncoder]
    refuse: Callable[[TextService, Call, ServeError, str], None]
    tell: Callable[[TextService, ServeError], bytes]
    """An error in the midst of a stream."""
    room: BodyUse


class CompletionEndpoint:
    """The endpoint of one completion API."""

    def __init__(self, service: TextService, api: CompletionApi) -> None:
        self._service, self._api = service, api

    async def __call__(self, call: Call) -> None:
        await self._service.answer(call, partial(self._answer, call), self._api.refuse)

    async def _answer(self, call: Call, about: TextCall) -> bool:
        service, api = self._service, self._api
        wanted = await read_offloaded(service, call, api.read, call.body, service.options.max_stops)
        model = find_model(service, wanted.body.model or "", must_be_named=wanted.names_model)
        about.model = model
        form = AnswerForm(
            wanted.logprobs >= 0, wanted.tells_usage, service.options.full_text, wanted.asked, wanted.older
        )
        answer = api.answer(model.shown_name, model.version.number, form)
        one = CompletionCall(service, call, model, wanted, answer)
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
class ChoiceSequence:
    """One sequence of an answer, with its prompt's text where that is echoed and its tokens where logprobs
    are wanted."""

    index: int
    stream: TextStream
    first: TextStream
    """The first sequence of its prompt."""
    echo: str = ""
    tokens: list[Token] = field(default_factory=list)
    begun: bool = False
    reader: Detokenizer | None = None
    """Makes text of its tokens, where they are scored; so many characters came of it."""
    chars: int = 0
    calls: ToolReader | None = None
    """Finds calls of tools in its text."""
    unsent: list[ScoredToken] = field(default_factory=list)
    """Tokens whose text the reader of calls holds back, where they are scored."""


class CompletionCall:
    """One request in progress."""

    def __init__(
        self,
        service: TextService,
        call: Call,
        model: TextModel,
        wanted: CompletionTask,
        answer: AnswerEncoder,
    ) -> None:
        self._service, self._call, self._model = service, call, model
        self._wanted, self._answer = wanted, answer
        self._sequences: list[ChoiceSequence] = []
        self._ended = 0  # sequences of a stream
        self._plan: ToolPlan | None = None

    async def whole(self) -> bytes:
        """The whole answer. Raises ServeError."""
        wanted = self._wanted
        async with await self._start() as running:
            tokens = await running.rest(keep=wanted.logprobs >= 0 or wanted.candidates > wanted.choices)
        for sequence, came in zip(self._sequences, tokens, strict=True):
            sequence.tokens = came
        choices = [self._choice(index, each) for index, each in enumerate(self._chosen())]
        if wanted.sampling.prompt_best >= 0:
            await self._rank_prompts(choices)
        return self._answer.write(choices, self._usage())

    async def _rank_prompts(self, choices: list[AnswerChoice]) -> None:
        """Write what vLLM's `prompt_logprobs` asks for, once for each prompt."""
        written: dict[int, msgspec.Raw] = {}
        for choice, sequence in zip(choices, self._chosen(), strict=True):
            first = sequence.first
            if id(first) not in written:
                work = self._ranks(first.prompt_tokens) * RANK_WORK
                written[id(first)] = await self._service.offload(
                    work, write_prompt_logprobs, first, self._model.tokenizer
                )
            choice.prompt_logprobs = written[id(first)]

    def _ranks(self, tokens: int) -> int:
        return tokens * (self._wanted.sampling.prompt_best + 1)

    async def send(self, out: EventStream) -> None:
        """The pieces of its stream. Raises ServeError."""
        async with await self._start() as running:
            await running.first()
            await running.stream_to(out, self._pieces, self._frames)
        end = self._answer.usage(self._usage()) if self._wanted.tells_usage else b""
        if end or self._answer.done:
            await out.write(end + self._answer.done)

    async def _start(self) -> SequenceGroup:
        """Start all sequences, or none. Raises ServeError."""
        streams: list[TextStream] = []
        try:
            tokens = 0
            for number, ask in enumerate(await self._asks()):
                await asyncio.sleep(0)  # tokenizing a prompt takes milliseconds
                started = await self._start_one(number, ask)
                streams += started
                tokens += len(started[0].prompt_ids)
                count_together(tokens, self._model.most_prompt_tokens)
                told = self._ranks(tokens) * self._wanted.choices
                check(
                    told <= MOST_PROMPT_SCORES,
                    "prompt_logprobs",
                    f"asks for {told} log probabilities in one reply, allowed: at most {MOST_PROMPT_SCORES}",
                )
                echo = self._echo(ask)
                for stream in started:
                    reader = None if self._plan is None else self._plan.reader()
                    number = len(self._sequences)
                    self._sequences.append(ChoiceSequence(number, stream, started[0], echo, calls=reader))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        self._service.read(self._call, self._model)
        return SequenceGroup(self._service, self._call, self._model, streams, self._timeout_s())

    async def _start_one(self, number: int, ask: TextAsk) -> list[TextStream]:
        try:
            return await self._model.start_many(ask, self._wanted.candidates)
        except PromptFault as fault:
            fault.field = self._prompt_field(number)
            raise

    async def _asks(self) -> list[TextAsk]:
        """Return a request to the model for each prompt. Raises ServeError."""
        wanted, body = self._wanted, self._wanted.body
        images = await self._images()
        prompts = wanted.prompts
        check_together(prompts, self._model.most_prompt_tokens)
        self._check_echo(prompts)
        sampling, plan = wanted.sampling, None
        if wanted.tools is not None:
            plan = self._plan = await plan_calls(wanted.tools, self._model, sampling.grammar)
            sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
            self._answer.held = plan.held
        if wanted.messages:
            shown = None if plan is None else plan.use.shown
            prompts = [await self._model.chat(wanted.messages, shown, **wanted.template)]
        if wanted.suffix:
            prompts = await self._infill(prompts)
        return [
            TextAsk(
                prompt=prompt,
                sampling=sampling,
                seed=None if body.seed is None else body.seed & SEED_MASK,
                stop=wanted.stop,
                include_stop=bool(body.include_stop_str_in_output),
                priority=body.priority or 5,
                deadline_ns=deadline_ns(self._call, self._timeout_s(), self._service.options),
                special=body.skip_special_tokens is False,
                shown=() if plan is None else plan.marks,
                templated=not wanted.adds_special,
                request_id=self._call.request_id,
                images=images,
            )
            for prompt in prompts
        ]

    async def _infill(self, prompts: list[Prompt]) -> list[Prompt]:
        wanted = self._wanted
        prefixes = [prompt for prompt in prompts if isinstance(prompt, str)]
        try:
            return list(await self._model.infill(prefixes, wanted.suffix, special=wanted.adds_special))
        except PromptFault as fault:
            fault.field = self._prompt_field(fault.prompt) if fault.prompt >= 0 else "suffix"
            raise

    def _prompt_field(self, number: int) -> str:
        """Return the key of a prompt in the body."""
        wanted = self._wanted
        return (
            wanted.source if wanted.messages else f"prompt[{number}]" if len(wanted.prompts) > 1 else "prompt"
        )

    def _check_echo(self, prompts: list[Prompt]) -> None:
        """The prompt is echoed once for each choice."""
        longest = max((len(prompt) for prompt in prompts), default=0)
        echoed = longest * self._wanted.choices if self._wanted.echo else 0
        check(
            echoed <= max(MOST_ECHOED, longest),
            "n",
            f"echoes the prompt {self._wanted.choices} times, {echoed} characters or tokens; "
            f"allowed: at most {MOST_ECHOED}",
        )

    async def _images(self) -> list[bytes]:
        found = self._wanted.images
        most, given = self._service.options.max_images, len(found)
        place = self._wanted.source
        check(given <= most, place, f"have {given} images, allowed: at most {most}")
        try:
            return await self._service.images.load(self._model, [value for _, value in found])
        except ServeError as fault:
            raise InvalidBody(fault.message, found[0][0] if given == 1 else place) from None

    def _timeout_s(self) -> int:
        return self._wanted.body.timeout or self._service.options.timeout_s

    def _echo(self, ask: TextAsk) -> str:
        if not self._wanted.echo:
            return ""
        return ask.prompt if isinstance(ask.prompt, str) else self._model.tokenizer.decode(ask.prompt)

    def _chosen(self) -> list[ChoiceSequence]:
        """Return the sequences of the answer: for each prompt the likeliest, where there are more
        (best_of)."""
        size, most = self._wanted.candidates, self._wanted.choices
        if size == most:
            return self._sequences
        groups = [self._sequences[at : at + size] for at in range(0, len(self._sequences), size)]
        ranked = [sorted(group, key=lambda each: mean_logprob(each.tokens), reverse=True) for group in groups]
        return [each for group in ranked for each in group[:most]]

    def _choice(self, index: int, sequence: ChoiceSequence) -> AnswerChoice:
        ending = sequence.stream.ending
        assert ending is not None
        scored = [*self._prompt_scored(sequence), *self._scored(sequence, sequence.tokens)]
        text, reader = sequence.echo + ending.text, sequence.calls
        text, calls = (text, []) if reader is None else reader.read(text)
        finish = finish_of(ending.reason, reader)
        return AnswerChoice(index, text, finish, scored, calls, stop=ending.stop)

    def _pieces(self, index: int, tokens: list[Token]) -> bytes:
        """Return the chunks of one sequence for its new tokens."""
        sequence, answer = self._sequences[index], self._answer
        more = b"" if sequence.begun else self._beginning(sequence)
        frames = self._frames(index)
        if sequence.calls is not None:
            more += self._tool_pieces(sequence, sequence.calls, tokens)
        elif frames is None:
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
        finish = finish_of(ending.reason, sequence.calls)
        return more + answer.last(index, finish, self._last_usage(), ending.stop)

    def _tool_pieces(self, sequence: ChoiceSequence, reader: ToolReader, tokens: list[Token]) -> bytes:
        """Return the chunks of a sequence that may call tools. The scores of tokens whose text is held back
        go with the next chunk."""
        parts = reader.feed("".join([token.text for token in tokens]))
        unsent = sequence.unsent
        unsent += self._scored(sequence, tokens)
        ending = sequence.stream.ending
        if ending is not None and ending.fault is None:
            parts += reader.end()
            if not parts and unsent:
                parts.append(AnswerPart(""))
        written = []
        for part in parts:
            written.append(self._answer.part(sequence.index, part, tuple(unsent)))
            unsent.clear()
        return b"".join(written)

    def _last_usage(self) -> TokenUsage | None:
        """Return the usage for the last chunk of the last choice, where the API has it there: MindIE adds it
        to a chat's (spec 3.6)."""
        wanted = self._wanted
        mindies = self._service.options.openai_flavor == "mindie" and wanted.messages
        told = self._answer.ends_with_usage or (mindies and not wanted.tells_usage)
        return self._usage() if told and self._ended == len(self._sequences) else None

    def _frames(self, index: int) -> EventTemplate | None:
        reads = self._answer.scored or self._sequences[index].calls is not None
        return None if reads else self._answer.frames(index)

    def _beginning(self, sequence: ChoiceSequence) -> bytes:
        sequence.begun = True
        said = self._answer.begin(sequence.index, sequence.stream.prompt_tokens)
        if not sequence.echo:
            return said
        return said + self._answer.piece(sequence.index, sequence.echo, self._prompt_scored(sequence))

    def _prompt_scored(self, sequence: ChoiceSequence) -> list[ScoredToken]:
        """Return the logprobs of an echoed prompt's tokens, without alternatives."""
        if not (self._answer.scored and self._wanted.echo):
            return []
        scored = sequence.stream.prompt_logprobs or sequence.first.prompt_logprobs
        return [self._one(sequence, token, "", lp, None) for token, lp in scored]

    def _scored(self, sequence: ChoiceSequence, tokens: list[Token]) -> list[ScoredToken]:
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
        self,
        sequence: ChoiceSequence,
        token: int,
        text: str,
        lp: float | None,
        best: list[TokenLogprob] | None,
    ) -> ScoredToken:
        own = self._likely(token, text, lp)
        if sequence.reader is None:
            special = self._wanted.body.skip_special_tokens is False
            sequence.reader = self._model.tokenizer.detokenizer(special=special)
        offset, known = sequence.chars, self._model.tokenizer.token_text(token)
        sequence.chars += len(sequence.reader.add(token) if known else text)
        return ScoredToken(own, best, offset)

    def _likely(self, token: int, otherwise: str, lp: float | None) -> TokenLogprob:
        """`otherwise` is its text where nobody here knows the model's tokens."""
        text = self._model.tokenizer.token_text(token)
        data = self._model.tokenizer.token_bytes(token) if text else otherwise.encode(errors="replace")
        return TokenLogprob(text or otherwise, data, lp)

    def _usage(self) -> TokenUsage:
        """Return the usage: each prompt counts once, and every generated token."""
        streams = [each.stream for each in self._sequences]
        asked = sum(stream.prompt_tokens for stream in streams[:: self._wanted.candidates])
        made = sum(stream.ending.generated for stream in streams if stream.ending is not None)
        return TokenUsage(asked, made)


_encode = msgspec.json.Encoder().encode
_FINISH = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


class TokenLogprob(NamedTuple):
    """A token and its log probability. `data` are its bytes, which may be no whole characters."""

    text: str
    data: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a choice, with the most likely alternatives."""

    own: TokenLogprob
    best: Sequence[TokenLogprob] | None = None
    offset: int = 0
    """Characters of the choice's text before the token."""


@dataclass(slots=True)
class AnswerChoice:
    """One whole choice of an answer."""

    index: int
    text: str
    finish: str
    scored: list[ScoredToken] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    stop: str | None = None
    """The stop string that ended it."""
    prompt_logprobs: msgspec.Raw | None = None
    """As JSON, where vLLM's key asks for it."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request, of all its choices together."""

    prompt_tokens: int
    completion_tokens: int

    def write(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def finish_of(finish: Finish, calls: ToolReader | None = None) -> str:
    """Return the finish_reason of a successful ending; of an answer that ends in a whole call, tool_calls."""
    found = _FINISH[finish]
    return "tool_calls" if found == "stop" and calls is not None and calls.calls else found


class AnswerForm(NamedTuple):
    """Options of an answer: logprobs, usage in a stream, `full_text`, the whole text so far in each chunk, as
    MindIE's fullTextEnabled has it, `asked`, the request for an API that repeats it, and `older`, calls as
    OpenAI told them before tools."""

    scored: bool = False
    usage: bool = False
    full_text: bool = False
    asked: Any = None
    older: bool = False


PLAIN = AnswerForm()


class AnswerEncoder(ABC):
    """Encodes the answer to one request, whole or as chunks."""

    content_type: bytes
    done: bytes
    """The last piece of all."""
    ends_with_usage = False
    """Whether the last chunk of a stream wants the usage."""
    held: frozenset[str] = frozenset()
    """Functions whose arguments a grammar holds to their schemas."""

    def __init__(self, model: str, version: object, form: AnswerForm = PLAIN) -> None:
        self.scored = form.scored

    @abstractmethod
    def write(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        """Return the whole answer."""

    @abstractmethod
    def begin(self, index: int, prompt_tokens: int = 0) -> bytes:
        """Return the chunk before the text of one choice."""

    @abstractmethod
    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return a chunk with more text of one choice."""

    def part(self, index: int, part: AnswerPart, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return a chunk with a part of an answer to a request with tools; of content, where the API has no
        tools."""
        return self.piece(index, part.text, scored)

    @abstractmethod
    def frames(self, index: int) -> EventTemplate | None:
        """Return the encoding of tokens without logprobs, a chunk for each with text; None where a chunk
        depends on those before."""

    @abstractmethod
    def last(
        self, index: int, finish: str, usage: TokenUsage | None = None, stop: str | None = None
    ) -> bytes:
        """Return the last chunk of one choice, with the usage where that is given. `stop`: the stop string
        that ended it."""

    @abstractmethod
    def usage(self, usage: TokenUsage) -> bytes:
        """Return the chunk with the usage, for stream_options."""


class OpenAiWriter(AnswerEncoder):
    """Common part of the chat and completion writers."""

    content_type = EVENTS
    done = b"data: [DONE]\n\n"
    whole_object: str
    chunk_object: str
    prefix: str

    def __init__(self, model: str, version: object, form: AnswerForm = PLAIN) -> None:
        super().__init__(model, version, form)
        self._said: dict[int, str] | None = {} if form.full_text else None
        self._frames: dict[int, EventTemplate] = {}
        self._head = {
            "id": self.prefix + token_hex(12),
            "object": self.whole_object,
            "created": int(time()),
            "model": model,
            "system_fingerprint": f"fastserve-{version}",
        }
        head = _encode({**self._head, "object": self.chunk_object})[:-1]
        self._head_of_piece = b"data: %b," % head
        self._open = self._head_of_piece + b'"choices":['
        self._close = b'],"usage":null}\n\n' if form.usage else b"]}\n\n"

    def write(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        written = [self._choice(choice) for choice in choices]
        return _encode({**self._head, "choices": written, "usage": usage.write(), **self._beside(choices)})

    def _beside(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return keys of a whole answer beside OpenAI's."""
        return {}

    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        if self._said is not None:
            self._said[index] = self._said.get(index, "") + text
        return self._chunk(index, self._delta(text), b"null", scored)

    def frames(self, index: int) -> EventTemplate | None:
        if self._said is not None:
            return None
        frames = self._frames.get(index)
        if frames is None:
            before, after = self._chunk(index, self._delta(""), b"null", ()).rsplit(b'""', 1)
            frames = self._frames[index] = EventTemplate((before, Placeholder.TEXT, after), skip_empty=True)
        return frames

    def last(
        self, index: int, finish: str, usage: TokenUsage | None = None, stop: str | None = None
    ) -> bytes:
        written = self._chunk(index, self._nothing, b'"%b"' % finish.encode(), ())
        if usage is None:
            return written
        return b"%b],%b\n\n" % (written.removesuffix(self._close), _encode({"usage": usage.write()})[1:])

    def usage(self, usage: TokenUsage) -> bytes:
        closing = _encode({"usage": usage.write()})
        return b"%b],%b\n\n" % (self._open, closing[1:])

    def _chunk(self, index: int, said: bytes, finish: bytes, scored: Sequence[ScoredToken]) -> bytes:
        logprobs = _encode(self._logprobs(scored)) if scored else b"null"
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._opening(index), index, said, logprobs, finish, self._close
        )  # fmt: skip

    def _opening(self, index: int) -> bytes:
        if self._said is None:
            return self._open
        return b'%b"full_text":%b,"choices":[' % (self._head_of_piece, _encode(self._said.get(index, "")))

    _nothing: bytes

    @abstractmethod
    def _delta(self, text: str) -> bytes: ...

    @abstractmethod
    def _choice(self, choice: AnswerChoice) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]: ...


class ChatWriter(OpenAiWriter):
    """Writer of /v1/chat/completions."""

    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    _nothing = b'"delta":{}'

    def __init__(self, model: str, version: object, form: AnswerForm = PLAIN) -> None:
        super().__init__(model, version, form)
        self._older = form.older

    def begin(self, index: int, prompt_tokens: int = 0) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null", ())

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % _encode(text)

    def part(self, index: int, part: AnswerPart, scored: Sequence[ScoredToken] = ()) -> bytes:
        if part.call < 0:
            return self.piece(index, part.text, scored)
        if self._older:
            called = {"name": part.name, "arguments": ""} if part.name else {"arguments": part.text}
            said = b'"delta":{"function_call":%b}' % _encode(called)
        else:
            said = b'"delta":{"tool_calls":[%b]}' % _encode(write_call_part(part))
        return self._chunk(index, said, b"null", scored)

    def last(
        self, index: int, finish: str, usage: TokenUsage | None = None, stop: str | None = None
    ) -> bytes:
        return super().last(index, self._finish(finish), usage, stop)

    def _finish(self, finish: str) -> str:
        return "function_call" if self._older and finish == "tool_calls" else finish

    def _beside(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        said = choices[0].prompt_logprobs
        return {} if said is None else {"prompt_logprobs": said}

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            if self._older:
                message["function_call"] = choice.calls[0].write()["function"]
            else:
                message["tool_calls"] = [call.write() for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.scored) if self.scored else None,
            "finish_reason": self._finish(choice.finish),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {"content": write_scored(scored), "refusal": None}


class CompletionWriter(OpenAiWriter):
    """Writer of /v1/completions."""

    whole_object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"
    _nothing = b'"text":""'

    def begin(self, index: int, prompt_tokens: int = 0) -> bytes:
        return b""

    def _delta(self, text: str) -> bytes:
        return b'"text":%b' % _encode(text)

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        said = choice.prompt_logprobs
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.scored) if self.scored else None,
            "finish_reason": choice.finish,
            **({} if said is None else {"prompt_logprobs": said}),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [_name(each.own) for each in scored],
            "token_logprobs": [each.own.logprob for each in scored],
            "top_logprobs": [
                None if each.best is None else {_name(best): best.logprob for best in each.best}
                for each in scored
            ],
            "text_offset": [each.offset for each in scored],
        }


def _name(one: TokenLogprob) -> str:
    """Return a token of a completion. A part of a character is spelled by its bytes, as OpenAI does."""
    try:
        one.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.data)
    return one.text


def write_scored(scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Return tokens with their log probabilities, as a chat has them."""
    return [
        {**_token(each.own), "top_logprobs": [_token(best) for best in each.best or ()]} for each in scored
    ]


def _token(one: TokenLogprob) -> dict[str, Any]:
    """Return a token of a chat. -9999 stands for a log probability of minus infinity, as with OpenAI."""
    sure = -9999.0 if one.logprob is None else max(one.logprob, -9999.0)
    return {"token": one.text, "logprob": sure, "bytes": list(one.data)}


def write_prompt_logprobs(stream: TextStream, tokenizer: Tokenizer) -> msgspec.Raw:
    """Return vLLM's `prompt_logprobs` as JSON: null for the first token, then an object for each, with the
    token itself and the likeliest in its place. Raises ServeError for an engine that ranks none."""
    names: dict[int, str] = {}
    ranks = read_ranks(stream.prompt_ranks)
    if len(ranks) != len(stream.prompt_logprobs) - 1:
        raise ServeError(Kind.UNIMPLEMENTED, "the model gives no log probabilities of its prompts")

    def name_of(token: int) -> str:
        if token not in names:
            names[token] = tokenizer.token_text(token) or f"token_id:{token}"
        return names[token]

    said: list[dict[str, dict[str, Any]] | None] = [None]
    for (token, own), (rank, best) in zip(stream.prompt_logprobs[1:], ranks, strict=True):
        found = {token: (own, rank), **{other: (lp, at) for at, (other, lp) in enumerate(best, 1)}}
        said.append(
            {
                str(one): {
                    "logprob": -9999.0 if lp is None else max(lp, -9999.0),
                    "rank": at,
                    "decoded_token": name_of(one),
                }
                for one, (lp, at) in found.items()
            }
        )
    return msgspec.Raw(_encode(said))


def completion_route(name: str, path: str, api: CompletionApi, refuse: Refuse) -> TextRoute:
    """Return the route of one completion API."""
    row = HttpRoute(name, path, {"POST": Scope.INFER})
    return TextRoute(row, lambda service, named: CompletionEndpoint(service, api), refuse, room=api.room)


CHAT = CompletionApi(read_chat, ChatWriter, refuse, tell, BodyUse.CHAT)
COMPLETION = CompletionApi(read_completion, CompletionWriter, refuse, tell, BodyUse.TEXTS)
PATHS = (
    completion_route("chat", "/v1/chat/completions", CHAT, refuse),
    completion_route("completions", "/v1/completions", COMPLETION, refuse),
)
