"""Requests that are reset in the read that brings them never begin; the connection is as after any reset."""

from __future__ import annotations

from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, RstStreamFrame
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.http2_frames import DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame
from fastserve.net.http2.connection import Http2Connection
from tests.effort import examples
from tests.net.http2.kit import GET, POST, Raw
from tests.net.kit import Held

HELD = [*POST[:3], (":path", "/held"), ("x-more", "than the table knew")]
ECHO = [*GET, ("x-again", "and again")]
END, HEADS = "END_STREAM", "END_HEADERS"
CANCEL = (8).to_bytes(4, "big")
PARTS = {
    "body": lambda n: frame(DATA, 0, n, b"some"),
    "end": lambda n: frame(DATA, 1, n, b"more"),
    "empty": lambda n: frame(DATA, 0, n, b""),
    "padding": lambda n: frame(DATA, 8, n, b"\x03\0\0\0"),
    "window": lambda n: frame(WINDOW_UPDATE, 0, n, b"\0\0\0\x07"),
    "priority": lambda n: frame(PRIORITY, 0, n, b"\0\0\0\0\x10"),
    "settings": lambda n: frame(SETTINGS, 0, 0, b""),
}


def state(raw: Raw) -> tuple[object, ...]:
    connection = raw.pipe.protocol
    assert isinstance(connection, Http2Connection)
    return (
        connection._abuse_budget, connection._credit, connection.last, list(connection.streams),
        connection.over,
    )  # fmt: skip


def send(pieces: list[list[str]], *, at_once: bool) -> tuple[Raw, Held]:
    """Requests of these parts, each reset, and one more that is answered; in one read, or a read a frame."""
    held = Held()
    raw = Raw({"/held": held, "/echo": lambda call: call.reply(200, b"fine", b"text/plain")}).greet()
    frames, number = list[bytes](), -1
    for parts in pieces:
        number += 2
        frames.append(raw.headers(number, HELD, HEADS))
        ended = False
        for part in parts:
            if not (ended and part in ("body", "end", "empty", "padding")):
                frames.append(PARTS[part](number))
            ended = ended or part == "end"
        frames.append(frame(RST_STREAM, 0, number, CANCEL))
    for data in [b"".join(frames)] if at_once else frames:
        raw.feed(data)
    raw.feed(raw.headers(number + 2, ECHO, END, HEADS))
    return raw, held


@examples(60)
@given(st.lists(st.lists(st.sampled_from(sorted(PARTS)), max_size=5), min_size=1, max_size=6))
def test_a_connection_is_as_after_any_reset(pieces: list[list[str]]) -> None:
    whole, never = send(pieces, at_once=True)
    offload, begun = send(pieces, at_once=False)
    assert state(whole) == state(offload)
    assert not never.calls
    assert len(begun.calls) == sum("end" in parts for parts in pieces)
    for raw in (whole, offload):
        frames = raw.frames()
        assert [one.data for one in frames if isinstance(one, DataFrame)] == [b"fine"]
        assert len([one for one in frames if isinstance(one, HeadersFrame)]) == 1
        assert not [one for one in frames if isinstance(one, GoAwayFrame)]


def test_a_stream_that_depends_on_itself_is_refused_all_the_same() -> None:
    raw = Raw({"/held": Held()}).greet()
    block = raw.encoder.encode(HELD)
    raw.feed(frame(HEADERS, 0x24, 1, b"\0\0\0\1\x10" + block) + frame(RST_STREAM, 0, 1, CANCEL))
    assert [(one.stream_id, one.error_code) for one in raw.frames() if isinstance(one, RstStreamFrame)] == [
        (1, 1)
    ]
