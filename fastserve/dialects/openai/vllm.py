"""vLLM's own POST /generate (spec 3.5): a prompt, and its texts with the prompt before them.

    {"prompt": "Once", "max_tokens": 2}  ->  {"text":["Once upon a"]}

A stream has the new text of each sequence, as JSON objects with a NUL after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.openai.completions import (
    AnswerChoice,
    AnswerEncoder,
    CompletionApi,
    CompletionEndpoint,
    ScoredToken,
    TokenUsage,
)
from fastserve.dialects.openai.requests import (
    MOST_INT,
    Choices,
    CompletionFields,
    CompletionTask,
    check_choices,
    read_prompts,
    read_sampling,
    read_stop,
    refuse_unsupported,
)
from fastserve.dialects.text_common import mindie
from fastserve.dialects.text_common.endpoint_parts import BOUNDS, BodyUse, TextService, check, read_typed
from fastserve.dialects.text_common.mindie import refuse_prompt
from fastserve.errors import ServeError
from fastserve.net.limits import JSON
from fastserve.serving.text import EventTemplate, Placeholder

_encode = msgspec.json.Encoder().encode


class VllmRequest(CompletionFields, kw_only=True):
    prompt: str | list[Any]
    best_of: Choices | None = None


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

    def begin(self, index: int) -> bytes:
        return b""

    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return the new text of one sequence; the items of the others are empty."""
        return _encode({"text": [""] * index + [text]}) + b"\0"

    def frames(self, index: int) -> EventTemplate:
        return frames_of(index)

    def last(self, index: int, finish: str, usage: TokenUsage | None = None) -> bytes:
        return b""

    def usage(self, usage: TokenUsage) -> bytes:
        return b""


def tell(service: TextService, fault: ServeError) -> bytes:
    """An error in the midst of a stream."""
    return mindie.envelope(mindie.STATUS[fault.kind], fault.message) + b"\0"


API = CompletionApi(read_vllm, VllmWriter, refuse_prompt, tell, BodyUse.TEXT)


def make_vllm(service: TextService) -> CompletionEndpoint:
    """The endpoint."""
    return CompletionEndpoint(service, API)
