"""Tokens, the text of byte-level vocabularies, and events, against their oracle."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import text_tokens as ext
from fastserve._ext.text_tokens import EventTemplate, Placeholder, Token
from tests.oracles import text_tokens as oracle

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
TOKENS = st.builds(
    Token,
    id=st.integers(0, (1 << 31) - 1),
    text=TEXT,
    index=st.integers(0, 1 << 40),
    us=st.integers(-1, 1 << 40),
    special=st.booleans(),
    finish=st.sampled_from([0, 2]),
    logprob=st.none() | st.floats(),
)
FORM = st.lists(st.sampled_from(list(Placeholder)) | st.binary(max_size=5), max_size=12)
PIECES = st.binary(max_size=5) | st.text(max_size=2).map(str.encode)
PIECES |= st.sampled_from([b"\xe2", b"\x98", b"\x83", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc3", b"\xff"])


def fields(token: Token) -> tuple[Any, ...]:
    return token.id, token.text, token.index, token.us, token.special, token.finish, token.best, token.logprob


def one_hex_case(data: bytes) -> bytes:
    return re.sub(rb"\\u00..", lambda found: found[0].lower(), data)


@given(pieces=st.lists(PIECES, max_size=30), whole=st.booleans())
def test_bytes_become_the_text_they_are_together(pieces: list[bytes], whole: bool) -> None:
    def look(token: int) -> str | bytes:
        try:
            return pieces[token].decode() if whole else pieces[token]
        except UnicodeDecodeError:
            return pieces[token]

    found, expected = ext.ByteText({}, look), oracle.ByteText({}, look)
    texts = [found.add(i) for i in range(len(pieces))]
    assert texts == [expected.add(i) for i in range(len(pieces))]
    last = found.end()
    assert last == expected.end()
    assert "".join(texts) + last == b"".join(pieces).decode("utf-8", "replace")


def test_a_table_is_filled_once_and_holds_nothing_of_a_sequence() -> None:
    looked: list[int] = []

    def look(token: int) -> bytes:
        looked.append(token)
        return b"\xe2\x98"

    table: dict[int, str | bytes] = {1: "a"}
    first, second = ext.ByteText(table, look), ext.ByteText(table, look)
    assert [first.add(2), first.add(1), second.add(2), second.end(), second.add(1)] == [
        "",
        "\ufffda",
        "",
        "\ufffd",
        "a",
    ]
    assert (looked, table) == ([2], {1: "a", 2: b"\xe2\x98"})


RECORDS = st.tuples(
    st.integers(-1, 300),
    st.sampled_from([0, 0, 0, 0, 2]),
    st.integers(0, 1 << 32),
    st.sampled_from([b"", b"", b"", b"x"]),
)


@given(records=st.lists(RECORDS, max_size=12), before=st.integers(0, 3))
def test_plain_records_are_taken(records: list[tuple[int, int, int, bytes]], before: int) -> None:
    def look(token: int) -> bytes:
        return bytes([token % 256])

    results = []
    for of in (ext, oracle):
        tokens: list[Token] = []
        ids, texts = [7] * before, ["x"] * before
        detokenizer = of.ByteText({}, look)
        taken = of.take_plain(records, detokenizer, frozenset({5}), 0, tokens, ids, texts)
        results.append((taken, [fields(token) for token in tokens], ids, texts, detokenizer.end()))
    assert results[0] == results[1]


class Shouts:
    """A detokenizer in Python."""

    def add(self, token: int) -> str:
        return f"{token}!"


def test_any_detokenizer_will_do() -> None:
    tokens: list[Token] = []
    assert ext.take_plain([(1, 0, 2, b"")], Shouts(), frozenset(), 0, tokens, [], []) == 1
    assert (tokens[0].text, tokens[0].ms, tokens[0].first) == ("1!", 0.002, True)


@given(form=FORM, tokens=st.lists(TOKENS, max_size=4), strip=st.booleans())
def test_events_are_those_of_the_form(
    form: list[bytes | Placeholder], tokens: list[Token], strip: bool
) -> None:
    expected = b"".join(oracle.write_event(form, token, strip=strip) for token in tokens)
    found = EventTemplate(form, strip=strip).write(tokens)
    numbers = [token.logprob for token in tokens if token.logprob is not None]
    if Placeholder.LOGPROB not in form or not numbers:
        assert one_hex_case(found) == one_hex_case(expected)
    else:  # 1e+20 or 1e20: the same number
        assert len(found) <= len(expected) + 8 * len(form) * len(tokens)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_logprobs_read_back_the_same(value: float) -> None:
    found = EventTemplate((Placeholder.LOGPROB,)).write([Token(1, "", 0, 0, logprob=value)])
    assert json.loads(found) == value
    assert type(json.loads(found)) is float


@given(text=TEXT)
def test_texts_read_back_the_same(text: str) -> None:
    assert json.loads(EventTemplate((Placeholder.TEXT,)).write([Token(1, text, 0, 0)])) == text


def test_what_is_left_out() -> None:
    tokens = [Token(1, "a", 0, 0), Token(2, "", 1, 0), Token(3, "b\x01\t", 2, 0, finish=2)]
    form = (Placeholder.ID, b":", Placeholder.TEXT, b" ")
    assert EventTemplate(form).write(tokens) == b'1:"a" 2:"" 3:"b\\u0001\\t" '
    assert EventTemplate(form, bare=True).write(tokens) == b'1:"a" 2:"" '
    assert EventTemplate(form, skip_empty=True, strip=True).write(tokens) == b'1:"a" 3:"b\\t" '
    assert EventTemplate(form).write([]) == b""
    assert EventTemplate(()).write(tokens) == b""


def test_what_is_no_form_or_no_text() -> None:
    with pytest.raises(ValueError, match="7"):
        EventTemplate((7,))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Token(1, None, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        EventTemplate((Placeholder.TEXT,)).write([Token(1, "\ud800", 0, 0)])
    with pytest.raises(TypeError):
        EventTemplate((Placeholder.TEXT,)).write([1])  # type: ignore[list-item]


def test_a_large_text_is_written_beside_the_scratch() -> None:
    text = '"' * (3 << 20)
    assert (
        EventTemplate((Placeholder.TEXT,)).write([Token(1, text, 0, 0)]) == b'"' + b'\\"' * (3 << 20) + b'"'
    )


def test_nothing_is_leaked() -> None:
    text, value = "some text" * 2, -0.25
    frames = EventTemplate((Placeholder.TEXT, Placeholder.LOGPROB))
    before = sys.getrefcount(text), sys.getrefcount(value)
    for _ in range(100):
        frames.write([Token(1, text, 0, 0, logprob=value)])
    assert (sys.getrefcount(text), sys.getrefcount(value)) == before


class Reply:
    """Where tokens go. `breaks`: at its next piece."""

    def __init__(self, *, ready: bool, breaks: bool) -> None:
        self.ready, self.breaks = ready, breaks
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        if self.breaks:
            raise ZeroDivisionError
        self.sent.append(data)


class Reader:
    """A reader that counts the records that were taken."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def taken(self, slot: int, records: int) -> None:
        self.told.append((slot, records))


PLAIN = st.tuples(st.integers(0, 300), st.just(0), st.integers(0, 1 << 32), st.just(b""))
STEP = st.none() | st.lists(PLAIN, min_size=1, max_size=3) | st.lists(RECORDS, min_size=1, max_size=3)
SEQUENCES = st.lists(
    st.fixed_dictionaries(
        {name: st.sampled_from([True, True, True, False]) for name in ("flows", "open", "begun", "ready")}
        | {name: st.sampled_from([False, False, False, True]) for name in ("ended", "breaks")}
    ),
    max_size=5,
)


@given(
    sequences=SEQUENCES,
    steps=st.lists(st.lists(st.tuples(st.integers(0, 4), STEP), max_size=5, unique_by=lambda one: one[0])),
)
def test_a_step_is_passed_on(sequences: list[dict[str, bool]], steps: list[Any]) -> None:
    """Taken, or no trace; whose reply breaks is told, and the others of the step go on."""

    assert play(ext, sequences, steps) == play(oracle, sequences, steps)


def play(of: Any, sequences: list[dict[str, bool]], steps: list[Any]) -> Any:
    """All that can be seen of these steps."""
    reader, gaps, failed = Reader(), list[int](), list[str]()
    runs, kept = [], []
    for slot, one in enumerate(sequences):
        run = ext.Flowing() if of is ext else SimpleNamespace(flow=None, held=0)
        run.slot, run.begun, run.ended = slot, one["begun"], one["ended"]
        ids, texts, reply = list[int](), list[str](), Reply(ready=one["ready"], breaks=one["breaks"])
        flow = of.Flow(
            of.ByteText({}, lambda token: bytes([token % 256])),
            frozenset({5}),
            0,
            ids,
            texts,
            EventTemplate((Placeholder.ID, Placeholder.TEXT, b" "), skip_empty=True),
            reply,
            lambda error: failed.append(type(error).__name__),
        )
        flow.open = one["open"]
        run.flow = flow if one["flows"] else None
        runs.append(run)
        kept.append((ids, texts, reply.sent, flow, run))
    lefts = []
    for now_ns, step in enumerate(steps):
        told = [(runs[slot], records) for slot, records in step if slot < len(runs)]
        left = of.pass_on(told, reader, gaps, now_ns)
        lefts.append([(run.slot, records) for run, records in left])
    states = [(ids, texts, sent, flow.open, flow.taken_ns, run.held) for ids, texts, sent, flow, run in kept]
    return lefts, reader.told, gaps, failed, states
