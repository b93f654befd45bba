"""Answers in OpenAI's words (spec 8): whole ones, and the pieces of streams.

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":"He"}}]}

An `Answer` writes what is the same in all pieces of a stream once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from time import time
from typing import Any, NamedTuple

import msgspec

from fastserve._ext.text_tokens import Frames, Hole
from fastserve.codec.text import Finish
from fastserve.dialects.textgen.sse import EVENTS

_encode = msgspec.json.Encoder().encode
_FINISH = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


class Likely(NamedTuple):
    """A token by itself, and how likely it was. `data` are its bytes, which may be no whole characters."""

    text: str
    data: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of a text, with those that were the most likely in its place."""

    own: Likely
    best: Sequence[Likely] | None = None
    offset: int = 0
    """Whole characters of the choice's text before it."""


@dataclass(slots=True)
class Choice:
    """One of the answers to a request, whole."""

    index: int
    text: str
    finish: str
    scored: list[Scored] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Usage:
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
    """What a client is told of an ending that went well."""
    return _FINISH[finish]


class Form(NamedTuple):
    """What is said besides text: logprobs; usage, with the pieces of a stream; with `full_text` the text so
    far, as in MindIE's pieces with fullTextEnabled."""

    scored: bool = False
    usage: bool = False
    full_text: bool = False


PLAIN = Form()


class Answer(ABC):
    """What is said to one request: the whole, or piece by piece."""

    content_type: bytes
    done: bytes
    """The last piece of all."""

    def __init__(self, model: str, version: object, form: Form = PLAIN) -> None:
        self.scored = form.scored

    @abstractmethod
    def write(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer, of a request that is not streamed."""

    @abstractmethod
    def begin(self, index: int) -> bytes:
        """What comes before the text of one choice."""

    @abstractmethod
    def piece(self, index: int, text: str, scored: Sequence[Scored] = ()) -> bytes:
        """More text of one choice."""

    @abstractmethod
    def frames(self, index: int) -> Frames | None:
        """The same of tokens that are not scored, a piece for each that has text; None where a piece knows
        of those before."""

    @abstractmethod
    def last(self, index: int, finish: str, usage: Usage | None = None) -> bytes:
        """The end of one choice; with the tokens of all, where it is the last and tells them."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """How many tokens there were, for those who asked."""


class OpenAiAnswer(Answer):
    """What both APIs have in common."""

    content_type = EVENTS
    done = b"data: [DONE]\n\n"
    whole_object: str
    chunk_object: str
    prefix: str

    def __init__(self, model: str, version: object, form: Form = PLAIN) -> None:
        super().__init__(model, version, form)
        self._said: dict[int, str] | None = {} if form.full_text else None
        self._frames: dict[int, Frames] = {}
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

    def write(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        written = [self._choice(choice) for choice in choices]
        return _encode({**self._head, "choices": written, "usage": usage.write()})

    def piece(self, index: int, text: str, scored: Sequence[Scored] = ()) -> bytes:
        if self._said is not None:
            self._said[index] = self._said.get(index, "") + text
        return self._chunk(index, self._delta(text), b"null", scored)

    def frames(self, index: int) -> Frames | None:
        if self._said is not None:
            return None
        frames = self._frames.get(index)
        if frames is None:
            before, after = self._chunk(index, self._delta(""), b"null", ()).rsplit(b'""', 1)
            frames = self._frames[index] = Frames((before, Hole.TEXT, after), skip_empty=True)
        return frames

    def last(self, index: int, finish: str, usage: Usage | None = None) -> bytes:
        written = self._chunk(index, self._nothing, b'"%b"' % finish.encode(), ())
        if usage is None:
            return written
        return b"%b],%b\n\n" % (written.removesuffix(self._close), _encode({"usage": usage.write()})[1:])

    def usage(self, usage: Usage) -> bytes:
        closing = _encode({"usage": usage.write()})
        return b"%b],%b\n\n" % (self._open, closing[1:])

    def _chunk(self, index: int, said: bytes, finish: bytes, scored: Sequence[Scored]) -> bytes:
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
    def _choice(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]: ...


class ChatAnswer(OpenAiAnswer):
    """Of /v1/chat/completions."""

    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    _nothing = b'"delta":{}'

    def begin(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null", ())

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % _encode(text)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.scored) if self.scored else None,
            "finish_reason": choice.finish,
        }

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        content = [
            {**_token(each.own), "top_logprobs": [_token(best) for best in each.best or ()]}
            for each in scored
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(OpenAiAnswer):
    """Of /v1/completions."""

    whole_object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"
    _nothing = b'"text":""'

    def begin(self, index: int) -> bytes:
        return b""

    def _delta(self, text: str) -> bytes:
        return b'"text":%b' % _encode(text)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.scored) if self.scored else None,
            "finish_reason": choice.finish,
        }

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return {
            "tokens": [_name(each.own) for each in scored],
            "token_logprobs": [each.own.logprob for each in scored],
            "top_logprobs": [
                None if each.best is None else {_name(best): best.logprob for best in each.best}
                for each in scored
            ],
            "text_offset": [each.offset for each in scored],
        }


def _name(one: Likely) -> str:
    """One token of a completion. A part of a character is spelled as OpenAI does: each by its own name."""
    try:
        one.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.data)
    return one.text


def _token(one: Likely) -> dict[str, Any]:
    """One token of a chat. -9999 is what OpenAI says of one that is next to impossible."""
    sure = -9999.0 if one.logprob is None else max(one.logprob, -9999.0)
    return {"token": one.text, "logprob": sure, "bytes": list(one.data)}
