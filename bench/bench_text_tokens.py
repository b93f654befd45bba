"""A token's way through a front process without its socket: text out of its bytes, and its event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fastserve._ext import text_tokens
from fastserve._ext.text_tokens import EventTemplate, Placeholder, Token
from tests.oracles import text_tokens as oracle

WORDS = [" the", " earth", " and", " heaven", ".", " God", "\n", " said", ",", " light"]
RECORDS = [(i, 0, 4321, b"") for i in range(len(WORDS))]
FORM = (
    *(b'data: {"prefill_time":', Placeholder.PREFILL, b',"decode_time":', Placeholder.DECODE),
    *(b',"token":{"id":', Placeholder.ID, b',"text":', Placeholder.TEXT, b"}}\n\n"),
)
encode = msgspec.json.Encoder().encode


def by_msgspec(tokens: list[Token]) -> bytes:
    return b"".join(
        b"data: %b\n\n"
        % encode(
            {
                "prefill_time": token.ms if token.first else None,
                "decode_time": None if token.first else token.ms,
                "token": {"id": token.id, "text": token.text},
            }
        )
        for token in tokens
    )


def tokens_by(of: Any) -> list[Token]:
    found: list[Token] = []
    table = dict(enumerate(WORDS))
    of.take_plain(RECORDS, of.ByteText(table, WORDS.__getitem__), frozenset(), 0, found, [], [])
    return found


@pytest.mark.parametrize("of", [text_tokens, oracle], ids=["compiled", "python"])
def test_ten_tokens(benchmark: Any, of: Any) -> None:
    tokens = benchmark(tokens_by, of)
    assert [token.text for token in tokens] == WORDS


@pytest.mark.parametrize("write", [EventTemplate(FORM).write, by_msgspec], ids=["compiled", "msgspec"])
def test_ten_events(benchmark: Any, write: Any) -> None:
    written = benchmark(write, tokens_by(text_tokens))
    assert msgspec.json.decode(written.split(b"\n\n")[1][6:])["token"] == {"id": 1, "text": " earth"}
