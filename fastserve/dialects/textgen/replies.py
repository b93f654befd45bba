"""MindIE's replies of /infer as bytes (spec 2): compact JSON, raw UTF-8, keys in its order.

    data: {"prefill_time":45.540,"decode_time":null,"token":{"id":626,"text":"am"}}

Times are milliseconds. Control characters of a text are left out, as there, but for tab and line ends.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from fastserve._ext.text_tokens import Frames, Hole
from fastserve.codec.text import Finish
from fastserve.config import TextgenOptions
from fastserve.serving.text import Ending, Token

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
_find_control = _CONTROL.search
_encode = msgspec.json.Encoder().encode
FINISH_REASON = {
    Finish.EOS: "eos_token",
    Finish.STOP: "eos_token",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "stop_sequence",
    Finish.TIMEOUT: "stop_sequence",
    Finish.FAILED: "stop_sequence",
}


def quote(text: str) -> bytes:
    """A text as JSON."""
    return _encode(text if _find_control(text) is None else _CONTROL.sub("", text))


def milliseconds(index: int, ms: float) -> tuple[bytes, bytes]:
    """What a token took, as the first one or another: prefill_time and decode_time."""
    return (b"%.3f" % ms, b"null") if index == 0 else (b"null", b"%.3f" % ms)


def details_of(ending: Ending, seed: int, options: TextgenOptions) -> bytes:
    """The object `details`."""
    ids = b""
    if options.generated_token_ids:
        ids = b',"generated_token_ids":%b' % _encode(ending.token_ids)
    return b'{"finish_reason":"%b","generated_tokens":%d%b,"seed":%d}' % (
        FINISH_REASON[ending.reason].encode(),
        ending.generated,
        ids,
        seed,
    )


def write_answer(ending: Ending, details: bytes) -> bytes:
    """The reply of a call that wants no stream; `details` b"" for none."""
    more = b',"details":%b' % details if details else b""
    return b'{"generated_text":%b%b}' % (quote(ending.text), more)


@lru_cache(maxsize=2)
def frames_of(style: str) -> Frames:
    """The events of all tokens but the last."""
    before, after = (b"[", b"]") if style == "list" else (b"", b"")
    head = (b'data: {"prefill_time":', Hole.PREFILL, b',"decode_time":', Hole.DECODE)
    token = (b',"token":{"id":' + before, Hole.ID, after + b',"text":', Hole.TEXT, b"}}\n\n")
    return Frames((*head, *token), bare=True, strip=True)


class EventWriter:
    """The events of one stream."""

    def __init__(self, options: TextgenOptions) -> None:
        self._frames = frames_of(options.token_id_style)
        self.frames = None if options.full_text else self._frames
        """What `tokens` makes of them, where an event knows nothing of those before."""
        self._id = b"[%d]" if options.token_id_style == "list" else b"%d"
        self._whole = options.full_text
        self._text = ""

    def tokens(self, tokens: list[Token]) -> bytes:
        """An event for each token, but for one that ends the sequence."""
        if self._whole:
            for token in tokens:
                self._text += token.text
                token.text = self._text
        return self._frames.write(tokens)

    def last(self, ending: Ending, token: Token | None, details: bytes) -> bytes:
        """The event that ends a stream; without a token of its own it has the id of the one before."""
        ms, index = (0.0, ending.generated) if token is None else (token.ms, token.index)
        first, other = milliseconds(index, ms)
        last = ending.token_ids[-1] if ending.token_ids else 0
        event = (
            b'data: {"prefill_time":%b,"decode_time":%b,"generated_text":%b,"details":%b,'
            b'"token":{"id":' + self._id + b',"text":null}}\n\n'
        )
        return event % (first, other, quote(ending.text), details or b"null", last)
