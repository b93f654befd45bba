"""Answers of OpenAI's API (spec 8): whole ones, and the chunks of streams.

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":"He"}}]}

An AnswerEncoder encodes the constant parts of a stream's chunks once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from time import time
from typing import Any, NamedTuple

import msgspec

from fastserve.codec.generation import Finish
from fastserve.dialects.text_common.streams import EVENTS
from fastserve.serving.text import EventTemplate, Placeholder

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


def finish_of(finish: Finish) -> str:
    """Return the finish_reason of a successful ending."""
    return _FINISH[finish]


class AnswerForm(NamedTuple):
    """Options of an answer: logprobs, usage in a stream, and `full_text`, the whole text so far in each
    chunk, as MindIE's fullTextEnabled has it."""

    scored: bool = False
    usage: bool = False
    full_text: bool = False


PLAIN = AnswerForm()


class AnswerEncoder(ABC):
    """Encodes the answer to one request, whole or as chunks."""

    content_type: bytes
    done: bytes
    """The last piece of all."""

    def __init__(self, model: str, version: object, form: AnswerForm = PLAIN) -> None:
        self.scored = form.scored

    @abstractmethod
    def write(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        """Return the whole answer."""

    @abstractmethod
    def begin(self, index: int) -> bytes:
        """Return the chunk before the text of one choice."""

    @abstractmethod
    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return a chunk with more text of one choice."""

    @abstractmethod
    def frames(self, index: int) -> EventTemplate | None:
        """Return the encoding of tokens without logprobs, a chunk for each with text; None where a chunk
        depends on those before."""

    @abstractmethod
    def last(self, index: int, finish: str, usage: TokenUsage | None = None) -> bytes:
        """Return the last chunk of one choice, with the usage where that is given."""

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
        return _encode({**self._head, "choices": written, "usage": usage.write()})

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

    def last(self, index: int, finish: str, usage: TokenUsage | None = None) -> bytes:
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

    def begin(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null", ())

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % _encode(text)

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.scored) if self.scored else None,
            "finish_reason": choice.finish,
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            {**_token(each.own), "top_logprobs": [_token(best) for best in each.best or ()]}
            for each in scored
        ]
        return {"content": content, "refusal": None}


class CompletionWriter(OpenAiWriter):
    """Writer of /v1/completions."""

    whole_object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"
    _nothing = b'"text":""'

    def begin(self, index: int) -> bytes:
        return b""

    def _delta(self, text: str) -> bytes:
        return b'"text":%b' % _encode(text)

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.scored) if self.scored else None,
            "finish_reason": choice.finish,
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


def _token(one: TokenLogprob) -> dict[str, Any]:
    """Return a token of a chat. -9999 stands for a log probability of minus infinity, as with OpenAI."""
    sure = -9999.0 if one.logprob is None else max(one.logprob, -9999.0)
    return {"token": one.text, "logprob": sure, "bytes": list(one.data)}
