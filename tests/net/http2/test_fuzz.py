"""Any frames in any order, replies at any moment: the connection answers or ends, and never fails itself."""

from __future__ import annotations

import pytest
from hyperframe.frame import GoAwayFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.http2_frames import frame
from fastserve.net.http2.stream import ErrorCode
from tests.net.http2.kit import GET, POST, PREFACE, Raw, read_frames
from tests.net.kit import Held, echo, limits

GREETING = PREFACE + SettingsFrame(0).serialize() + SettingsFrame(0, flags=["ACK"]).serialize()
ENDPOINTS = ("/echo", "/held", "/big")
numbers = st.sampled_from((1, 1, 1, 3, 3, 5, 7, 9, 0, 2))
flags = st.sampled_from((0, 1, 4, 5, 8, 9, 36))


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, bytes]:
    """(what, a number, bytes to send)."""
    kind = draw(
        st.sampled_from(("request", "request", "data", "data", "window", "reset", "any", "reply", "choke"))
    )
    number = draw(numbers)
    if kind == "request":
        headers = [
            draw(st.sampled_from((GET, POST)))[0],
            *GET[1:3],
            (":path", draw(st.sampled_from(ENDPOINTS))),
        ]
        headers += draw(st.sampled_from(([], [("content-length", "5")], [("expect", "100-continue")])))
        raw = Raw({})
        return kind, number, frame(1, draw(st.sampled_from((4, 5))), number or 1, raw.encoder.encode(headers))
    if kind == "data":
        return kind, number, frame(0, draw(st.sampled_from((0, 1))), number, draw(st.binary(max_size=6)))
    if kind == "window":
        change = draw(st.sampled_from((1, 100, 1 << 20, (1 << 31) - 1)))
        return kind, number, frame(8, 0, number, change.to_bytes(4, "big"))
    if kind == "reset":
        return kind, number, frame(3, 0, number, b"\0\0\0\x08")
    if kind == "any":
        settings = frame(
            4, 0, 0, b"\0\x04" + draw(st.sampled_from((0, 1, 65535, 1 << 30))).to_bytes(4, "big")
        )
        other = frame(draw(st.integers(0, 11)), draw(flags), number, draw(st.binary(max_size=9)))
        return kind, number, draw(st.sampled_from((settings, settings, other)))
    return kind, number, b""


@given(st.lists(steps(), max_size=30), st.integers(0, 40))
def test_any_frames(script: list[tuple[str, int, bytes]], size: int) -> None:
    held = Held()
    endpoints = {"/echo": echo, "/held": held, "/big": lambda call: call.reply(200, bytes(200_000))}
    raw = Raw(endpoints, limits(streams=3))
    raw.feed(GREETING)
    protocol = raw.pipe.protocol
    for what, number, data in script:
        if what == "reply" and held.calls:
            held.calls.pop(number % len(held.calls)).reply(200, bytes(number * 10_000))
        elif what == "choke":
            (protocol.pause_writing if number & 2 else protocol.resume_writing)()
        elif data:
            raw.feed(data, size)
    frames = read_frames(raw.pipe.sent)
    over = [one for one in frames if isinstance(one, GoAwayFrame)]
    assert len(over) == raw.pipe.ended
    assert all(one.error_code != ErrorCode.INTERNAL_ERROR for one in over)
    intake, sending = protocol, protocol.sending
    assert len(intake.streams) <= 3
    assert not (intake.streams and over)
    queued = sum(stream.outbox.nbytes for stream in intake.streams.values() if stream.outbox is not None)
    assert sending.queued == queued
    assert protocol.growth._out == sum(
        stream.inlet.grown for stream in intake.streams.values() if stream.inlet is not None
    )
    raw.pipe.close()
    assert not intake.streams
    assert not raw.pipe.listener.connections
    assert sending.queued == 0


@pytest.mark.parametrize("kind", ["small", "large", "continued"])
def test_a_transcript_cut_at_every_byte(kind: str) -> None:
    parts = transcript(kind)
    whole = replies(parts)
    assert whole.count("HeadersFrame") == 3
    for at, part in enumerate(parts):
        for cut in range(1, len(part), 17 if kind == "large" else 1):
            assert replies([*parts[:at], part[:cut], part[cut:], *parts[at + 1 :]]) == whole, cut


def transcript(kind: str) -> list[bytes]:
    """Three requests; in parts where the client has to wait for an answer between them."""
    raw = Raw({})
    path = [(":method", "POST"), *GET[1:]]
    body = bytes(5000) if kind == "large" else b"body"
    block = raw.encoder.encode(path)
    first = frame(1, 4, 1, block) + raw.data(1, body, "END_STREAM")
    if kind == "continued":
        first = frame(1, 0, 1, block[:5]) + frame(9, 0, 1, b"") + frame(9, 4, 1, block[5:])
        first += raw.data(1, body, "END_STREAM")
    rest = b"".join(
        raw.headers(number, path, "END_HEADERS")
        + raw.data(number, body[:2])
        + raw.data(number, body[2:], "END_STREAM")
        for number in (3, 5)
    )
    return [GREETING + first + rest]


def replies(parts: list[bytes]) -> list[str]:
    raw = Raw({"/echo": echo})
    for part in parts:
        raw.feed(part)
    return [type(one).__name__ for one in read_frames(raw.pipe.sent) if one.stream_id]
