"""vLLM's own paths: POST /generate (spec 3.5), a prompt and its texts with the prompt before them; POST
/tokenize and /detokenize.

    {"prompt": "Once", "max_tokens": 2}  ->  {"text":["Once upon a"]}
    {"prompt": "Once"}                   ->  {"count":1,"max_model_len":2560,"tokens":[515],"token_strs":null}
    {"tokens": [515]}                    ->  {"prompt":"Once"}

A stream has the new text of each sequence, as JSON objects with a NUL after each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec
from msgspec import UNSET

from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.openai.completions import (
    AnswerChoice,
    AnswerEncoder,
    CompletionApi,
    CompletionEndpoint,
    ScoredToken,
    TokenUsage,
)
from fastserve.dialects.openai.errors import refuse
from fastserve.dialects.openai.requests import (
    MOST_INT,
    Choices,
    CompletionFields,
    CompletionTask,
    Refused,
    TokenIds,
    check_choices,
    find_model,
    read_chat,
    read_prompts,
    read_sampling,
    read_stop,
    refuse_unsupported,
)
from fastserve.dialects.text_common import mindie
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    BodyUse,
    TargetParts,
    TextRoute,
    TextService,
    check,
    read_offloaded,
    read_typed,
)
from fastserve.dialects.text_common.mindie import refuse_prompt
from fastserve.errors import ServeError
from fastserve.net.access_control import Scope
from fastserve.net.limits import JSON
from fastserve.net.request import Call, Endpoint
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import EventTemplate, Placeholder, PromptFault
from fastserve.serving.text.models import TextCall

_encode = msgspec.json.Encoder().encode


class VllmRequest(CompletionFields, kw_only=True):
    prompt: str | list[Any]
    best_of: Choices | None = None
    prompt_logprobs: Refused = UNSET


_reader: FreeJSON[VllmRequest] = FreeJSON(VllmRequest, BOUNDS)


def read_vllm(data: bytes | bytearray, max_stops: int) -> CompletionTask:
    """Return the task of one prompt, a text or its tokens. Raises InvalidBody."""
    body = read_typed(_reader, data)
    refuse_unsupported(body)
    prompts = read_prompts(body.prompt, "prompt")
    check(len(prompts) == 1, "prompt", f"must be one, got {len(prompts)}")
    return CompletionTask(
        body=body,
        sampling=read_sampling(body, body.max_tokens or MOST_INT, -1),
        choices=body.n or 1,
        candidates=check_choices(body, body.best_of),
        stop=read_stop(body, max_stops),
        prompts=prompts,
        echo=not body.stream,
        names_model=False,
    )


@cache
def frames_of(index: int) -> EventTemplate:
    """Pieces of one of the texts of an answer; the places of the others are empty."""
    return EventTemplate((b'{"text":[' + b'"",' * index, Placeholder.TEXT, b"]}\0"), skip_empty=True)


class VllmWriter(AnswerEncoder):
    """Writer of texts alone."""

    content_type = JSON
    done = b""

    def write(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        return _encode({"text": [choice.text for choice in choices]})

    def begin(self, index: int, prompt_tokens: int = 0) -> bytes:
        return b""

    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return the new text of one sequence; the items of the others are empty."""
        return _encode({"text": [""] * index + [text]}) + b"\0"

    def frames(self, index: int) -> EventTemplate:
        return frames_of(index)

    def last(
        self, index: int, finish: str, usage: TokenUsage | None = None, stop: str | None = None
    ) -> bytes:
        return b""

    def usage(self, usage: TokenUsage) -> bytes:
        return b""


def tell(service: TextService, fault: ServeError) -> bytes:
    """An error in the midst of a stream."""
    return mindie.envelope(mindie.STATUS[fault.kind], fault.message) + b"\0"


API = CompletionApi(read_vllm, VllmWriter, refuse_prompt, tell, BodyUse.TEXT)


TOKEN_WORK = 1024
"""Cost of the text of one token, in bytes of offloaded work: 5 us."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize of a text; of a conversation the body is a chat's."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


_tokenize: FreeJSON[TokenizeRequest] = FreeJSON(TokenizeRequest, BOUNDS)
_detokenize: FreeJSON[DetokenizeRequest] = FreeJSON(DetokenizeRequest, BOUNDS)


def read_tokenize(data: bytes | bytearray) -> tuple[TokenizeRequest, CompletionTask | None]:
    """Return the body, and the task of a conversation. Raises InvalidBody."""
    body = read_typed(_tokenize, data)
    return body, read_chat(data, 0) if body.prompt is None else None


def tokenize(service: TextService) -> Callable[[Call], Awaitable[None]]:
    """POST /tokenize."""

    async def answer(call: Call, about: TextCall) -> bool:
        body, chat = await read_offloaded(service, call, read_tokenize, call.body)
        model = about.model = find_model(service, body.model or "", must_be_named=False)
        special = body.add_special_tokens is not False
        if chat is None:
            text = body.prompt or ""
        else:
            text, special = await model.chat(chat.messages, **chat.template), chat.adds_special
        tokens = await model.tokens(text, special=special) if text else []
        texts = None
        if body.return_token_strs:
            work = len(tokens) * TOKEN_WORK
            texts = await service.offload(work, lambda: list(map(model.tokenizer.token_text, tokens)))
        reply = {
            "count": len(tokens),
            "max_model_len": model.info.max_tokens,
            "tokens": tokens,
            "token_strs": texts,
        }
        call.reply(200, _encode(reply))
        return True

    return lambda call: service.answer(call, partial(answer, call), refuse)


def detokenize(service: TextService, named: TargetParts) -> Endpoint:
    """POST /detokenize."""

    async def answer(call: Call, about: TextCall) -> bool:
        body = await read_offloaded(service, call, read_typed, _detokenize, call.body)
        model = about.model = find_model(service, body.model or "", must_be_named=False)
        try:
            text = await model.decode(body.tokens)
        except PromptFault as fault:
            fault.field = "tokens"
            raise
        call.reply(200, _encode({"prompt": text}))
        return True

    return lambda call: service.answer(call, partial(answer, call), refuse)


PATHS = (
    TextRoute(
        HttpRoute("detokenize", "/detokenize", {"POST": Scope.INFER}), detokenize, refuse, room=BodyUse.TEXT
    ),
)


def make_vllm(service: TextService) -> CompletionEndpoint:
    """The endpoint."""
    return CompletionEndpoint(service, API)
