"""vLLM's own POST /generate (spec 3.5): a prompt, and its texts with the prompt before them; or, as a stream,
what is new of each, as JSON objects with a NUL after each.

    {"prompt": "Once", "max_tokens": 2}  ->  {"text":["Once upon a"]}
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from fastserve.dialects.textgen import errors
from fastserve.dialects.textgen.inputs import refuse_prompt
from fastserve.dialects.textgen.openai_calls import Api, Complete
from fastserve.dialects.textgen.openai_read import (
    UNHEEDED,
    Wanted,
    check_choices,
    read_prompts,
    read_sampling,
    read_stop,
    refuse_unheeded,
)
from fastserve.dialects.textgen.openai_schema import MOST_INT, Choices, Common
from fastserve.dialects.textgen.openai_write import Answer, Choice, Scored, Usage
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.typed import check, read_typed
from fastserve.errors import ServeError
from fastserve.serving.text import Frames, Hole

JSON = b"application/json"
_encode = msgspec.json.Encoder().encode


class VllmRequest(Common, kw_only=True):
    prompt: str | list[Any]
    best_of: Choices | None = None


_read = msgspec.json.Decoder(VllmRequest)


def read_vllm(data: bytes | bytearray, max_stops: int) -> Wanted:
    """One prompt, a text or its tokens. Raises Misread."""
    body = read_typed(_read, data)
    refuse_unheeded(body, UNHEEDED)
    prompts = read_prompts(body.prompt, "prompt")
    check(len(prompts) == 1, "prompt", f"must be one, got {len(prompts)}")
    return Wanted(
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
def frames_of(index: int) -> Frames:
    """Pieces of one of the texts of an answer; the places of the others are empty."""
    return Frames((b'{"text":[' + b'"",' * index, Hole.TEXT, b"]}\0"), skip_empty=True)


class VllmAnswer(Answer):
    """Texts, and nothing else."""

    content_type = JSON
    done = b""

    def write(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode({"text": [choice.text for choice in choices]})

    def begin(self, index: int) -> bytes:
        return b""

    def piece(self, index: int, text: str, scored: Sequence[Scored] = ()) -> bytes:
        """The places of the other sequences are empty."""
        return _encode({"text": [""] * index + [text]}) + b"\0"

    def frames(self, index: int) -> Frames:
        return frames_of(index)

    def last(self, index: int, finish: str, usage: Usage | None = None) -> bytes:
        return b""

    def usage(self, usage: Usage) -> bytes:
        return b""


def tell(service: Service, fault: ServeError) -> bytes:
    """An error in the midst of a stream."""
    return errors.envelope(errors.STATUS[fault.kind], fault.message) + b"\0"


API = Api(read_vllm, VllmAnswer, refuse_prompt, tell)


def make_vllm(service: Service) -> Complete:
    """The endpoint."""
    return Complete(service, API)
