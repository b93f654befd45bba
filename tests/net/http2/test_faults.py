"""Faults of clients, by section of RFC 9113: each broken rule, and how far its consequence reaches.

Every case is sent whole and byte by byte. A fault of a stream leaves the connection usable; a fault of the
connection is told with GOAWAY, and then the connection is closed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    Frame,
    GoAwayFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)  # fmt: skip

from fastserve._ext.http2_frames import frame
from fastserve.net.http2.stream import ErrorCode
from tests.net.http2.kit import GET, POST, PREFACE, Raw
from tests.net.kit import Held, echo

E = ErrorCode
Case = Callable[[Raw], bytes]
END, HEADS = "END_STREAM", "END_HEADERS"


def whole(raw: Raw, number: int = 1, headers: list[tuple[str, str]] = GET) -> bytes:
    return raw.headers(number, headers, END, HEADS)


def held(raw: Raw, number: int = 1) -> bytes:
    """A whole request that stays open: half-closed (remote)."""
    return whole(raw, number, [*GET[:3], (":path", "/held")])


def opened(raw: Raw, number: int = 1) -> bytes:
    return raw.headers(number, POST, HEADS)


def with_header(*fields: tuple[str, str]) -> Case:
    return lambda raw: raw.headers(1, [*GET, *fields], END, HEADS)


def only(*fields: tuple[str, str]) -> Case:
    return lambda raw: raw.headers(1, list(fields), END, HEADS)


def setting(name: int, value: int) -> Case:
    return lambda raw: SettingsFrame(0, settings={name: value}).serialize()


OF_CONNECTION: dict[str, tuple[ErrorCode, Case]] = {
    "4.2 a frame above the limit": (E.FRAME_SIZE_ERROR, lambda r: opened(r) + frame(0, 0, 1, bytes(16385))),
    "4.2 HEADERS above the limit": (E.FRAME_SIZE_ERROR, lambda r: frame(1, 4, 1, bytes(16385))),
    "4.3 a block that is none": (E.COMPRESSION_ERROR, lambda r: r.headers(1, [], END, HEADS, block=b"\xff")),
    "4.3 trailers that are none": (
        E.COMPRESSION_ERROR, lambda r: opened(r) + r.headers(1, [], END, HEADS, block=b"\x80")
    ),
    "5.1 idle: DATA": (E.PROTOCOL_ERROR, lambda r: r.data(1, b"x")),
    "5.1 idle: RST_STREAM": (E.PROTOCOL_ERROR, lambda r: RstStreamFrame(1).serialize()),
    "5.1 idle: WINDOW_UPDATE": (
        E.PROTOCOL_ERROR, lambda r: WindowUpdateFrame(1, window_increment=1).serialize()
    ),
    "5.1 idle: CONTINUATION": (E.PROTOCOL_ERROR, lambda r: ContinuationFrame(1, data=b"x").serialize()),
    "5.1 closed: DATA": (E.STREAM_CLOSED, lambda r: whole(r) + r.data(1, b"x")),
    "5.1 closed: HEADERS": (E.STREAM_CLOSED, lambda r: whole(r) + whole(r)),
    "5.1 closed by RST_STREAM: DATA": (
        E.STREAM_CLOSED, lambda r: opened(r) + RstStreamFrame(1, error_code=8).serialize() + r.data(1, b"x")
    ),
    "5.1 closed by RST_STREAM: HEADERS": (
        E.STREAM_CLOSED, lambda r: opened(r) + RstStreamFrame(1, error_code=8).serialize() + whole(r)
    ),
    "5.1.1 an even number": (E.PROTOCOL_ERROR, lambda r: whole(r, 2)),
    "5.1.1 a number below the last": (E.PROTOCOL_ERROR, lambda r: whole(r, 5) + whole(r, 3)),
    "6.1 DATA on the connection": (E.PROTOCOL_ERROR, lambda r: frame(0, 0, 0, b"x")),
    "6.1 more padding than payload": (E.PROTOCOL_ERROR, lambda r: opened(r) + frame(0, 8, 1, b"\x05abcd")),
    "6.1 padding that is not there": (E.FRAME_SIZE_ERROR, lambda r: opened(r) + frame(0, 8, 1, b"")),
    "6.2 HEADERS on the connection": (E.PROTOCOL_ERROR, lambda r: frame(1, 5, 0, b"")),
    "6.2 more padding than payload": (E.PROTOCOL_ERROR, lambda r: frame(1, 13, 1, b"\x05abcd")),
    "6.2 another frame within a block": (
        E.PROTOCOL_ERROR, lambda r: r.headers(1, GET, END) + PriorityFrame(3).serialize()
    ),
    "6.2 DATA within a block": (E.PROTOCOL_ERROR, lambda r: r.headers(1, POST) + r.data(1, b"x")),
    "6.2 another stream's block within": (E.PROTOCOL_ERROR, lambda r: r.headers(1, GET, END) + whole(r, 3)),
    "6.3 PRIORITY on the connection": (E.PROTOCOL_ERROR, lambda r: frame(2, 0, 0, bytes(5))),
    "6.4 RST_STREAM on the connection": (E.PROTOCOL_ERROR, lambda r: frame(3, 0, 0, bytes(4))),
    "6.4 RST_STREAM of another length": (E.FRAME_SIZE_ERROR, lambda r: opened(r) + frame(3, 0, 1, bytes(3))),
    "6.5 SETTINGS on a stream": (E.PROTOCOL_ERROR, lambda r: frame(4, 0, 1, b"")),
    "6.5 SETTINGS ACK with something": (E.FRAME_SIZE_ERROR, lambda r: frame(4, 1, 0, bytes(6))),
    "6.5 SETTINGS of another length": (E.FRAME_SIZE_ERROR, lambda r: frame(4, 0, 0, bytes(3))),
    "6.5.2 ENABLE_PUSH": (E.PROTOCOL_ERROR, setting(2, 2)),
    "6.5.2 INITIAL_WINDOW_SIZE": (E.FLOW_CONTROL_ERROR, setting(4, 1 << 31)),
    "6.5.2 MAX_FRAME_SIZE below": (E.PROTOCOL_ERROR, setting(5, 16383)),
    "6.5.2 MAX_FRAME_SIZE above": (E.PROTOCOL_ERROR, setting(5, 1 << 24)),
    "6.6 PUSH_PROMISE": (
        E.PROTOCOL_ERROR, lambda r: PushPromiseFrame(1, promised_stream_id=2, flags=[HEADS]).serialize()
    ),
    "6.7 PING on a stream": (E.PROTOCOL_ERROR, lambda r: frame(6, 0, 1, bytes(8))),
    "6.7 PING of another length": (E.FRAME_SIZE_ERROR, lambda r: frame(6, 0, 0, bytes(6))),
    "6.8 GOAWAY on a stream": (E.PROTOCOL_ERROR, lambda r: frame(7, 0, 1, bytes(8))),
    "6.8 GOAWAY too short": (E.FRAME_SIZE_ERROR, lambda r: frame(7, 0, 0, bytes(7))),
    "6.9 an increment of 0": (E.PROTOCOL_ERROR, lambda r: frame(8, 0, 0, bytes(4))),
    "6.9 WINDOW_UPDATE of another length": (E.FRAME_SIZE_ERROR, lambda r: frame(8, 0, 0, bytes(3))),
    "6.9.1 the connection's window above 2^31-1": (
        E.FLOW_CONTROL_ERROR, lambda r: WindowUpdateFrame(0, window_increment=(1 << 31) - 1).serialize()
    ),
    "6.9.2 SETTINGS push a window above 2^31-1": (
        E.FLOW_CONTROL_ERROR,
        lambda r: held(r) + WindowUpdateFrame(1, window_increment=(1 << 31) - 65536).serialize()
        + SettingsFrame(0, settings={4: 65536}).serialize(),
    ),
    "6.10 CONTINUATION after END_HEADERS": (
        E.PROTOCOL_ERROR, lambda r: opened(r) + ContinuationFrame(1, data=b"x", flags=[HEADS]).serialize()
    ),
    "6.10 CONTINUATION on the connection": (
        E.PROTOCOL_ERROR, lambda r: r.headers(1, GET) + frame(9, 4, 0, b"")
    ),
    "6.10 CONTINUATION of another stream": (
        E.PROTOCOL_ERROR, lambda r: r.headers(1, GET) + frame(9, 4, 3, b"")
    ),
}  # fmt: skip

OF_STREAM: dict[str, tuple[ErrorCode, Case]] = {
    "5.1 half-closed: DATA": (E.STREAM_CLOSED, lambda r: held(r) + r.data(1, b"x")),
    "5.1 half-closed: HEADERS": (E.STREAM_CLOSED, lambda r: held(r) + whole(r)),
    "5.1.2 too many streams": (E.REFUSED_STREAM, lambda r: b"".join(held(r, n) for n in range(1, 259, 2))),
    "5.3.1 a stream that depends on itself": (
        E.PROTOCOL_ERROR, lambda r: frame(1, 0x25, 1, b"\0\0\0\x01\x10" + r.encoder.encode(GET))
    ),
    "6.3 PRIORITY of another length": (E.FRAME_SIZE_ERROR, lambda r: held(r) + frame(2, 0, 1, bytes(4))),
    "6.9 an increment of 0": (E.PROTOCOL_ERROR, lambda r: held(r) + frame(8, 0, 1, bytes(4))),
    "6.9.1 a window above 2^31-1": (
        E.FLOW_CONTROL_ERROR,
        lambda r: held(r) + WindowUpdateFrame(1, window_increment=(1 << 31) - 1).serialize(),
    ),
    "8.1 trailers without END_STREAM": (
        E.PROTOCOL_ERROR, lambda r: opened(r) + r.headers(1, [("a", "b")], HEADS)
    ),
    "8.1 a pseudo-header in trailers": (
        E.PROTOCOL_ERROR, lambda r: opened(r) + r.headers(1, [(":path", "/")], END, HEADS)
    ),
    "8.1.1 DATA short of content-length": (
        E.PROTOCOL_ERROR,
        lambda r: r.headers(1, [*POST, ("content-length", "2")], HEADS) + r.data(1, b"x", END),
    ),
    "8.1.1 DATA in two beyond content-length": (
        E.PROTOCOL_ERROR,
        lambda r: r.headers(1, [*POST, ("content-length", "2")], HEADS)
        + r.data(1, b"xx") + r.data(1, b"x", END),
    ),
    "8.1.1 content-length without DATA": (E.PROTOCOL_ERROR, with_header(("content-length", "1"))),
    "8.1.1 trailers before content-length": (
        E.PROTOCOL_ERROR,
        lambda r: r.headers(1, [*POST, ("content-length", "1")], HEADS)
        + r.headers(1, [("a", "b")], END, HEADS),
    ),
    "8.1.1 content-length that is no number": (E.PROTOCOL_ERROR, with_header(("content-length", "+0"))),
    "8.1.1 two lengths": (E.PROTOCOL_ERROR, with_header(("content-length", "0"), ("content-length", "0"))),
    "8.2.1 a name in upper case": (
        E.PROTOCOL_ERROR,
        lambda r: r.headers(1, [], END, HEADS, block=r.encoder.encode(GET) + b"\0\x02Ab\x01c"),
    ),
    "8.2.1 a name with a colon": (E.PROTOCOL_ERROR, with_header(("a:b", "c"))),
    "8.2.1 an empty name": (E.PROTOCOL_ERROR, with_header(("", "c"))),
    "8.2.1 a value with a line feed": (E.PROTOCOL_ERROR, with_header(("a", "b\nc"))),
    "8.2.1 a value with NUL": (E.PROTOCOL_ERROR, with_header(("a", "b\0c"))),
    "8.2.1 a value that begins with a space": (E.PROTOCOL_ERROR, with_header(("a", " b"))),
    "8.2.2 connection": (E.PROTOCOL_ERROR, with_header(("connection", "close"))),
    "8.2.2 transfer-encoding": (E.PROTOCOL_ERROR, with_header(("transfer-encoding", "chunked"))),
    "8.2.2 te": (E.PROTOCOL_ERROR, with_header(("te", "gzip"))),
    "8.3 an unknown pseudo-header": (E.PROTOCOL_ERROR, only(*GET, (":test", "ok"))),
    "8.3 one of replies": (E.PROTOCOL_ERROR, only(*GET, (":status", "200"))),
    "8.3 one behind a header": (E.PROTOCOL_ERROR, only(*GET[:3], ("a", "b"), GET[3])),
    "8.3.1 no :method": (E.PROTOCOL_ERROR, only(*GET[1:])),
    "8.3.1 no :scheme": (E.PROTOCOL_ERROR, only(GET[0], *GET[2:])),
    "8.3.1 no :path": (E.PROTOCOL_ERROR, only(*GET[:3])),
    "8.3.1 an empty :path": (E.PROTOCOL_ERROR, only(*GET[:3], (":path", ""))),
    "8.3.1 a :path that is none": (E.PROTOCOL_ERROR, only(*GET[:3], (":path", "echo"))),
    "8.3.1 :path with a space": (E.PROTOCOL_ERROR, only(*GET[:3], (":path", "/a b"))),
    "8.3.1 two of one": (E.PROTOCOL_ERROR, only(GET[0], *GET)),
    "8.3.1 another host": (E.PROTOCOL_ERROR, with_header(("host", "b"))),
}  # fmt: skip


def answers(case: Case, size: int) -> tuple[Raw, list[Frame]]:
    raw = Raw({"/echo": echo, "/held": Held()}).greet()
    raw.feed(case(raw), size)
    return raw, raw.frames()


@pytest.mark.parametrize("size", [0, 1], ids=["whole", "bytewise"])
@pytest.mark.parametrize("name", OF_CONNECTION)
def test_faults_of_the_connection(name: str, size: int) -> None:
    code, case = OF_CONNECTION[name]
    raw, frames = answers(case, size)
    (goaway,) = (one for one in frames if isinstance(one, GoAwayFrame))
    assert ErrorCode(goaway.error_code) is code
    assert frames[-1] is goaway
    assert raw.pipe.ended
    raw.feed(PingFrame(0, opaque_data=bytes(8)).serialize())
    assert not raw.frames()
    assert raw.pipe.listener.refusals == {f"http2_{code.name.lower()}": 1}
    raw.pipe.scan(0.0)
    raw.pipe.scan(1.0)
    assert raw.pipe.closed
    assert not raw.pipe.listener.connections


@pytest.mark.parametrize("size", [0, 1], ids=["whole", "bytewise"])
@pytest.mark.parametrize("name", OF_STREAM)
def test_faults_of_a_stream(name: str, size: int) -> None:
    code, case = OF_STREAM[name]
    raw, frames = answers(case, size)
    (reset,) = (one for one in frames if isinstance(one, RstStreamFrame))
    assert ErrorCode(reset.error_code) is code
    assert not any(isinstance(one, GoAwayFrame) for one in frames)
    protocol = raw.pipe.protocol
    raw.feed(whole(raw, 1001))
    assert any(one.stream_id == 1001 for one in raw.frames()) or len(protocol.streams) == 128


@pytest.mark.parametrize("data", [b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", PREFACE + PingFrame(0).serialize()])
def test_a_preface_that_is_none(data: bytes) -> None:
    for size in (0, 1):
        raw = Raw({})
        raw.feed(data, size)
        assert isinstance(raw.frames()[-1], GoAwayFrame)
        assert raw.pipe.ended


def test_what_comes_late_for_a_stream_that_the_server_has_closed() -> None:
    raw = Raw({"/echo": echo}).greet()
    raw.feed(raw.headers(1, [*POST, ("expect", "nothing")], HEADS))
    kinds = [(type(one).__name__, getattr(one, "error_code", None)) for one in raw.frames()]
    assert kinds == [("HeadersFrame", None), ("DataFrame", None), ("RstStreamFrame", 0)]
    raw.feed(raw.data(1, bytes(100)) + raw.headers(1, [("a", "b")], END, HEADS) + whole(raw, 3))
    assert {one.stream_id for one in raw.frames()} == {3}


def test_what_is_ignored() -> None:
    raw = Raw({"/echo": echo}).greet()
    raw.feed(frame(0xBE, 0xFF, 0, b"anything") + frame(0xBE, 0, 77, b"") + frame(7, 0, 0, bytes(20)))
    raw.feed(frame(2, 0, 7, b"\0\0\0\x01\x10") + SettingsFrame(0, settings={0xABC: 1}).serialize())
    raw.feed(whole(raw))
    assert [one.stream_id for one in raw.frames()] == [0, 1, 1]
