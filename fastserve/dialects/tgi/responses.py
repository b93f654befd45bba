"""Answers of TGI's API (spec 7), and of MindIE's compatibility mode (3.4): other keys and nulls.

data:{"index":1,"token":{"id":42,"text":"He","logprob":-0.5,"special":false},"generated_text":null,"details":null}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fastserve.codec.generation import Finish
from fastserve.dialects.text_common import mindie
from fastserve.dialects.text_common.endpoint_parts import BodyTooLarge
from fastserve.errors import Kind, Reason, ServeError
from fastserve.net.router import common_status
from fastserve.serving.text import Ending, EventTemplate, Placeholder, TextStream, Token

_encode = msgspec.json.Encoder().encode
FINISH = {Finish.EOS: "eos_token", Finish.LENGTH: "length", Finish.STOP: "stop_sequence"}
STATUS: dict[Kind, tuple[int, str]] = {
    Kind.CANCELLED: (500, "incomplete_generation"),
    Kind.UNKNOWN: (424, "generation"),
    Kind.INVALID_ARGUMENT: (422, "validation"),
    Kind.DEADLINE_EXCEEDED: (500, "incomplete_generation"),
    Kind.NOT_FOUND: (404, "not_found"),
    Kind.ALREADY_EXISTS: (422, "validation"),
    Kind.PERMISSION_DENIED: (403, "forbidden"),
    Kind.RESOURCE_EXHAUSTED: (429, "overloaded"),
    Kind.FAILED_PRECONDITION: (422, "validation"),
    Kind.ABORTED: (500, "incomplete_generation"),
    Kind.OUT_OF_RANGE: (422, "validation"),
    Kind.UNIMPLEMENTED: (422, "validation"),
    Kind.INTERNAL: (424, "generation"),
    Kind.UNAVAILABLE: (503, "unavailable"),
    Kind.DATA_LOSS: (500, "incomplete_generation"),
    Kind.UNAUTHENTICATED: (401, "unauthorized"),
}
"""Error kind -> TGI's status and type: the only such table of this API."""
TextOf = Callable[[int], str]
"""The text of a token alone, "" where nobody knows."""


def error_status(fault: ServeError, flavor: str) -> int:
    """A fault's status."""
    if isinstance(fault, BodyTooLarge):
        return 413
    own = mindie.STATUS[fault.kind] if flavor == "mindie" else _told(fault)[0]
    return common_status(fault) or own


def error_body(fault: ServeError, flavor: str) -> bytes:
    """A fault as JSON."""
    if flavor == "mindie":
        return mindie.envelope(common_status(fault) or mindie.STATUS[fault.kind], fault.message)
    message = fault.message.encode("utf-8", "replace").decode()
    return _encode({"error": message, "error_type": _told(fault)[1]})


def _told(fault: ServeError) -> tuple[int, str]:
    """Return status and type; a full queue and a starting server count as overloaded."""
    overloaded = fault.reason in (Reason.QUEUE_FULL, Reason.SERVER_STARTING)
    return STATUS[Kind.RESOURCE_EXHAUSTED if overloaded else fault.kind]


@dataclass(frozen=True, slots=True)
class Generated:
    """One whole sequence."""

    ending: Ending
    stream: TextStream
    tokens: Sequence[Token]
    sampled: bool

    @property
    def seed(self) -> int | None:
        return self.stream.seed if self.sampled else None


OPEN = b'"generated_text":null,"details":null'
"""Keys of an event before the last."""
FRAMES = EventTemplate(
    (
        *(
            b'data:{"index":',
            Placeholder.NUMBER,
            b',"token":{"id":',
            Placeholder.ID,
            b',"text":',
            Placeholder.TEXT,
        ),
        *(b',"logprob":', Placeholder.LOGPROB, b',"special":', Placeholder.SPECIAL, b"}," + OPEN + b"}\n\n"),
    ),
    bare=True,
)
MINDIE_FRAMES = {
    in_list: EventTemplate(
        (
            *(b'data: {"token":{"id":' + before, Placeholder.ID, after + b',"text":', Placeholder.TEXT),
            b',"logprob":null,"special":null},' + OPEN + b"}\n\n",
        ),
        bare=True,
    )
    for in_list, before, after in ((False, b"", b""), (True, b"[", b"]"))
}


class TgiWriter:
    """Encodes an answer."""

    _frames = FRAMES

    def __init__(self, text_of: TextOf, *, top_tokens: bool, details: bool) -> None:
        self._text_of, self._top_tokens, self._details = text_of, top_tokens, details

    def whole(self, text: str, first: Generated, others: Sequence[Generated]) -> dict[str, Any]:
        """An answer that is not streamed; `others` are what best_of made besides."""
        if not self._details:
            return {"generated_text": text}
        told = self.details(first)
        if others:
            told["best_of_sequences"] = [
                {"generated_text": each.ending.text, **self.details(each)} for each in others
            ]
        return {"generated_text": text, "details": told}

    def details(self, one: Generated) -> dict[str, Any]:
        told: dict[str, Any] = {
            "finish_reason": FINISH[one.ending.reason],
            "generated_tokens": one.ending.generated,
            "seed": one.seed,
            "prefill": [
                {"id": token, "text": self._text_of(token), "logprob": logprob}
                for token, logprob in one.stream.prompt_logprobs
            ],
            "tokens": [self.token(each) for each in one.tokens],
        }
        if self._top_tokens:
            told["top_tokens"] = [self.top_tokens(each) for each in one.tokens]
        return told

    @property
    def frames(self) -> EventTemplate | None:
        """The encoding of plain tokens, None where events have more."""
        return None if self._top_tokens else self._frames

    def events(self, tokens: list[Token]) -> bytes:
        """The events of tokens, but for one that ends the sequence."""
        if self._top_tokens:
            return b"".join([self.event(each, OPEN) for each in tokens if not each.finish])
        return self._frames.write(tokens)

    def event(self, token: Token, ending: bytes) -> bytes:
        """Return one event, with the keys `ending` about the whole answer."""
        more = b',"top_tokens":%b' % _encode(self.top_tokens(token)) if self._top_tokens else b""
        return b'data:{"index":%d,"token":%b%b,%b}\n\n' % (
            token.index + 1, _encode(self.token(token)), more, ending
        )  # fmt: skip

    def ending(self, text: str, one: Generated) -> bytes:
        """Return the keys of the last event about the whole answer."""
        details = b"null"
        if self._details:
            told = {"finish_reason": FINISH[one.ending.reason], "generated_tokens": one.ending.generated}
            details = _encode({**told, "seed": one.seed, "input_length": one.stream.prompt_tokens})
        return b'"generated_text":%b,"details":%b' % (_encode(text), details)

    def token(self, token: Token) -> dict[str, Any]:
        special = token.special or token.finish is Finish.EOS
        text = self._text_of(token.id) if special else token.text
        return {"id": token.id, "text": text, "logprob": token.logprob, "special": special}

    def top_tokens(self, token: Token) -> list[dict[str, Any]]:
        """The likeliest in its place. Which of these are special is known of the token itself only."""
        return [
            {
                "id": best,
                "text": self._text_of(best),
                "logprob": logprob,
                "special": best == token.id and token.special,
            }
            for best, logprob in token.best
        ]


class MindieTgiWriter(TgiWriter):
    """Writer of MindIE's compatibility mode: no index, nulls for unknown values, ids in a list where
    configured."""

    def __init__(self, text_of: TextOf, *, details: bool, id_in_list: bool) -> None:
        super().__init__(text_of, top_tokens=False, details=details)
        self._id_in_list, self._frames = id_in_list, MINDIE_FRAMES[id_in_list]

    def whole(self, text: str, first: Generated, others: Sequence[Generated]) -> dict[str, Any]:
        told = {"details": self.details(first)} if self._details else {}
        return {**told, "generated_text": text}

    def details(self, one: Generated) -> dict[str, Any]:
        ids = one.ending.token_ids
        return {
            "prompt_tokens": one.stream.prompt_tokens,
            "finish_reason": FINISH[one.ending.reason],
            "generated_tokens": one.ending.generated,
            "prefill": [],
            "seed": one.stream.seed,
            "tokens": [{"id": token, "logprob": None, "special": None, "text": None} for token in ids],
        }

    def event(self, token: Token, ending: bytes) -> bytes:
        return b'data: {"token":%b,%b}\n\n' % (_encode(self.token(token)), ending)

    def ending(self, text: str, one: Generated) -> bytes:
        details = b"null"
        if self._details:
            details = _encode(
                {
                    "prompt_tokens": one.stream.prompt_tokens,
                    "finish_reason": FINISH[one.ending.reason],
                    "generated_tokens": one.ending.generated,
                    "seed": one.stream.seed,
                }
            )
        return b'"generated_text":%b,"details":%b' % (_encode(text), details)

    def token(self, token: Token) -> dict[str, Any]:
        found = [token.id] if self._id_in_list else token.id
        return {"id": found, "text": token.text, "logprob": None, "special": None}
