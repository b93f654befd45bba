"""Bodies that are put straight into their place: whole however they are cut, and refused as any other."""

from __future__ import annotations

import pytest
from hyperframe.frame import GoAwayFrame, SettingsFrame, WindowUpdateFrame

from fastserve.net.http1.large_bodies import BULK_BYTES
from fastserve.net.http2.connection import LOW_WINDOW
from fastserve.net.http2.exchange import StreamBody
from fastserve.net.http2.settings import CONNECTION_WINDOW
from fastserve.net.request import Call
from fastserve.settings import Limits
from tests.net.http2.kit import POST, Raw

LARGE = bytes(range(251)) * 1000
FRAMES = [LARGE[start : start + 16384] for start in range(0, len(LARGE), 16384)]


class Echo:
    """Keeps the bodies it is given."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, call: Call) -> None:
        self.bodies.append(bytes(call.body))
        call.reply(200, b"")


def begin(raw: Raw, number: int, length: int) -> bytes:
    return raw.headers(number, [*POST, ("content-length", str(length))], "END_HEADERS")


def body(raw: Raw, number: int, frames: list[bytes], *, ends: bool = True) -> bytes:
    sent = [raw.data(number, frame) for frame in frames]
    return b"".join(sent) + (raw.data(number, b"", "END_STREAM") if ends else b"")


@pytest.mark.parametrize("size", [100, 4096, 16393, 50_000, 1 << 18])
def test_bodies_one_after_the_other(size: int) -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    for number in (1, 3, 5):
        raw.feed(begin(raw, number, len(LARGE)) + body(raw, number, FRAMES), size)
        assert raw.pipe.protocol._reader.diverted == 0
    assert echo.bodies == [LARGE] * 3


def test_it_is_put_into_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.feed(begin(raw, 1, len(LARGE)))
    assert raw.pipe.protocol._reader.diverted == 1
    monkeypatch.delattr(StreamBody, "add")  # what came in pieces would be added
    raw.feed(body(raw, 1, FRAMES), 100_000)
    assert echo.bodies == [LARGE]


@pytest.mark.parametrize("length", [BULK_BYTES - 1, BULK_BYTES, BULK_BYTES + 1])
def test_small_ones_are_not_worth_it(length: int) -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.feed(begin(raw, 1, length))
    assert bool(raw.pipe.protocol._reader.diverted) == (length >= BULK_BYTES)
    raw.feed(body(raw, 1, [bytes(1000)] * (length // 1000) + [bytes(length % 1000)]))
    assert echo.bodies == [bytes(length)]


def test_bodies_beside_one_another() -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.feed(begin(raw, 1, len(LARGE)) + begin(raw, 3, len(LARGE)))
    for at, frame in enumerate(FRAMES):
        raw.feed(raw.data(3, frame) + raw.data(1, frame), 5000 + at)
        assert raw.pipe.protocol._reader.diverted == 1  # the other's is told frame by frame, as ever
    raw.feed(raw.data(1, b"", "END_STREAM") + raw.data(3, b"", "END_STREAM"))
    assert echo.bodies == [LARGE, LARGE]
    assert raw.pipe.protocol._reader.diverted == 0


@pytest.mark.parametrize("change", [-1, 1])
def test_a_length_that_is_not_the_bodys(change: int) -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.feed(begin(raw, 1, len(LARGE) + change) + body(raw, 1, FRAMES), 50_000)
    assert [frame.stream_id for frame in raw.frames() if type(frame).__name__ == "RstStreamFrame"] == [1]
    assert (echo.bodies, raw.pipe.protocol._reader.diverted) == ([], 0)
    raw.feed(begin(raw, 3, len(LARGE)) + body(raw, 3, FRAMES), 50_000)
    assert echo.bodies == [LARGE]


def test_a_client_that_gives_up() -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.feed(begin(raw, 1, len(LARGE)) + body(raw, 1, FRAMES[:5], ends=False), 30_000)
    assert raw.pipe.protocol._reader.diverted == 1
    raw.feed(b"\0\0\4\3\0\0\0\0\1\0\0\0\x08")
    assert raw.pipe.protocol._reader.diverted == 0
    raw.feed(begin(raw, 3, len(LARGE)) + body(raw, 3, FRAMES), 30_000)
    assert echo.bodies == [LARGE]


def test_padding_counts() -> None:
    """More of it than a stream's window, which is given back as it comes."""
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.feed(begin(raw, 1, BULK_BYTES))
    for _ in range(BULK_BYTES // 16):
        raw.feed(b"\0\1\x10\0\x08\0\0\0\1\xff" + bytes(16) + bytes(255))
    raw.feed(raw.data(1, b"", "END_STREAM"))
    assert echo.bodies == [bytes(BULK_BYTES)]


@pytest.mark.parametrize("told", [True, False])
def test_a_refusal_that_the_client_does_not_take(told: bool) -> None:
    """Its window is closed: what goes on coming is nobody's, and there is one reply."""
    echo = Echo()
    raw = Raw({"/echo": echo}, Limits(body_bytes=len(LARGE) // 2)).greet()
    raw.feed(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize())
    length = [("content-length", str(len(LARGE)))] if told else []
    raw.feed(raw.headers(1, [*POST, *length], "END_HEADERS") + body(raw, 1, FRAMES), 30_000)
    assert [type(frame).__name__ for frame in raw.frames() if frame.stream_id == 1] == ["HeadersFrame"]
    assert (echo.bodies, raw.pipe.closed) == ([], False)
    raw.feed(begin(raw, 3, 3) + raw.data(3, b"abc", "END_STREAM"))
    assert echo.bodies == [b"abc"]


def test_bodies_of_whole_requests_are_given_back_to_the_connection() -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    connection = raw.pipe.protocol
    connection._credit = LOW_WINDOW + 5
    for number in (1, 3):
        raw.feed(begin(raw, number, 4) + raw.data(number, b"four", "END_STREAM"))
        granted = [frame.window_increment for frame in raw.frames() if isinstance(frame, WindowUpdateFrame)]
        assert granted == ([] if number == 1 else [CONNECTION_WINDOW - LOW_WINDOW + 3])
    assert (echo.bodies, connection._credit) == ([b"four"] * 2, CONNECTION_WINDOW)


def test_whole_requests_beyond_the_connections_window() -> None:
    echo = Echo()
    raw = Raw({"/echo": echo}).greet()
    raw.pipe.protocol._credit = 3
    raw.feed(begin(raw, 1, 4) + raw.data(1, b"four", "END_STREAM"))
    assert [frame.error_code for frame in raw.frames() if isinstance(frame, GoAwayFrame)] == [3]
    assert echo.bodies == []
