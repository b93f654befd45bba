"""Large bodies over HTTP/2 that wait in the socket are read out of it by their endpoint; what comes otherwise
than clients usually send it is answered as if nobody had tried.

A `Line` is a socket pair with a connection at one end that is read by hand. The same bytes go to a connection
without a socket, which never offers a body: both have to say the same.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import Kind, ServeError
from fastserve.net.http1 import large_bodies
from fastserve.net.http2 import connection as connection_module
from fastserve.net.http2 import exchange as exchange_module
from fastserve.net.http2 import settings
from fastserve.net.http2.arrived_bodies import SKIPPED_BODIES, BodyWaits
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.http2.settings import CONNECTION_WINDOW
from tests.net import test_arrived_bodies
from tests.net.http2.kit import POST, PREFACE, Raw, read_frames
from tests.net.test_arrived_bodies import BODY, Rows

FRAME = 16384
GREETING = (
    PREFACE
    + SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 1 << 30}).serialize()
    + SettingsFrame(0, flags=["ACK"]).serialize()
    + WindowUpdateFrame(0, window_increment=1 << 30).serialize()
)
TARGET = [*POST[:-1], (":path", "/rows")]


class Line(test_arrived_bodies.Line):
    """Reads a socket as a loop does, `most` bytes at a time; time passes when the test says so."""

    def __init__(self, endpoint: Any, most: int = 1000) -> None:
        super().__init__(endpoint)
        self._most = most
        self._timers: list[Callable[[], None]] = []
        self.send(GREETING)
        self.pump()

    @property
    def http2(self) -> Http2Connection:
        assert isinstance(self.protocol, Http2Connection)
        return self.protocol

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Line:
        self._timers.append(call)
        return self

    def cancel(self) -> None:
        self._timers.clear()

    def pump(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", lambda: self)
            super().pump()
            self.turn()
            super().pump()

    def wait(self) -> None:
        """The time of the waits passes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", lambda: self)
            for _ in range(2):
                timers, self._timers = self._timers, []
                for timer in timers:
                    timer()
        self.pump()

    def _read_once(self) -> bool:
        low = self.server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        if low > 1 and arrived_bytes(self.server) < low:
            return False  # the kernel would not wake the loop
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            return super()._read_once()
        try:
            got = self.server.recv_into(memoryview(self.protocol.get_buffer(-1))[: self._most])
        except BlockingIOError:
            return False
        if got:
            self.protocol.buffer_updated(got)
            self.turn()
        return bool(got)

    def shut(self) -> None:
        super().shut()
        assert not self.listener.http2.waits


def arrived_bytes(server: socket.socket) -> int:
    return int.from_bytes(large_bodies.ioctl(server.fileno(), large_bodies.FIONREAD, bytes(4)), "little")


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def line(rows: Rows) -> Iterator[Line]:
    opened = Line(rows)
    yield opened
    opened.shut()


def head(number: int, length: int | None = len(BODY), encoder: Encoder | None = None) -> bytes:
    """HEADERS; the block changes no table."""
    told = [] if length is None else [("content-length", str(length))]
    block = (encoder or Encoder()).encode([(name, value, True) for name, value in TARGET + told])
    return len(block).to_bytes(3, "big") + bytes([1, 4]) + number.to_bytes(4, "big") + block


def data(number: int, payload: bytes, *flags: str, pad: int = 0) -> bytes:
    if pad:
        flags = (*flags, "PADDED")
    return bytes(DataFrame(number, data=payload, flags=list(flags), pad_length=pad).serialize())


def frames_of(number: int, body: bytes = BODY, size: int = FRAME) -> list[bytes]:
    """Frames as clients send them."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    last = len(pieces) - 1
    return [data(number, piece, *["END_STREAM"] * (at == last)) for at, piece in enumerate(pieces)]


def usual(number: int, body: bytes = BODY) -> bytes:
    return head(number, len(body)) + b"".join(frames_of(number, body))


def answers(sent: bytes) -> list[tuple[int, bytes]]:
    """The bodies of the replies, by their streams."""
    found: dict[int, bytes] = {}
    for frame in read_frames(sent):
        if isinstance(frame, DataFrame):
            found[frame.stream_id] = found.get(frame.stream_id, b"") + frame.data
    return list(found.items())


def said(sent: bytes) -> list[tuple[Any, ...]]:
    """What the server has said, without the sizes of its frames."""
    return [
        (type(frame).__name__, frame.stream_id, sorted(frame.flags), getattr(frame, "error_code", None))
        for frame in read_frames(sent)
        if not isinstance(frame, DataFrame)
    ]


def untried(pieces: list[bytes], rows: Rows) -> Raw:
    """The same input to a connection without a socket."""
    raw = Raw({"/rows": rows})
    raw.pipe.breaks = True
    for piece in (GREETING, *pieces):
        raw.feed(piece)
    return raw


def test_a_body_that_has_come_is_the_endpoints_to_read(line: Line, rows: Rows) -> None:
    for count in range(1, 4):
        line.send(usual(2 * count - 1))
        line.pump()
        assert rows.taken == count
        assert not line.http2.streams
        assert (line.http2.arriving, line.http2._reader.diverted, line.http2.held) == (None, 0, 0)
        assert line.http2._credit == CONNECTION_WINDOW - count * len(BODY)
    assert rows.called == 0
    line.send(head(7, 2) + data(7, b"xy", "END_STREAM"))
    line.pump()
    assert answers(line.sent) == [(1, BODY), (3, BODY), (5, BODY), (7, b"xy")]


def test_what_follows_the_body_is_the_next_input(line: Line, rows: Rows) -> None:
    line.send(usual(1) + usual(3) + head(5, 2) + data(5, b"xy", "END_STREAM"))
    line.pump()
    assert answers(line.sent) == [(1, BODY), (3, BODY), (5, b"xy")]
    assert (rows.taken, rows.called) == (2, 1)


def test_an_endpoint_that_leaves_it_is_called_with_all_of_it(line: Line, rows: Rows) -> None:
    for number, willing in ((1, False), (3, True)):
        rows.willing = willing
        line.send(usual(number))
        line.pump()
    assert answers(line.sent) == [(1, BODY), (3, BODY)]
    assert (rows.taken, rows.called) == (1, 1)


@pytest.mark.parametrize("name", ["fault", "fault_after"])
def test_a_failure_is_answered_and_the_connection_goes_on(name: str) -> None:
    rows = Rows()
    line = Line(rows)
    line.breaks = True
    setattr(rows, name, RuntimeError("a secret"))
    line.send(usual(1))
    line.pump()
    setattr(rows, name, None)
    line.send(usual(3))
    line.pump()
    assert b"a secret" not in line.sent
    assert answers(line.sent)[-1] == (3, BODY)
    assert (rows.taken, rows.called, len(line.http2.streams)) == (1, 0, 0)
    line.shut()


def test_a_client_that_shapes_frames_otherwise_is_not_tried_again_soon(line: Line, rows: Rows) -> None:
    odd = head(1) + b"".join(frames_of(1, size=10_000))
    line.send(odd)
    line.pump()
    assert (rows.taken, rows.called) == (0, 1)
    for count in range(1, SKIPPED_BODIES + 3):
        line.send(usual(1 + 2 * count))
        line.pump()
    assert (rows.taken, rows.called) == (2, 1 + SKIPPED_BODIES)


@pytest.mark.parametrize("why", ["tls", "closing"])
def test_a_socket_that_cannot_be_read_so(rows: Rows, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Line.get_extra_info
    monkeypatch.setattr(
        Line,
        "get_extra_info",
        lambda self, name, default=None: (
            self.server if why == "tls" and name == "ssl_object" else found(self, name, default)
        ),
    )
    line = Line(rows)
    assert (line.http2._file < 0) == (why == "tls")
    if why == "closing":
        line.is_closing = lambda: True  # type: ignore[method-assign]
    line.send(usual(1))
    line.pump()
    assert rows.taken == 0
    line.is_closing = lambda: False  # type: ignore[method-assign]
    line.shut()


# --- frames that are not as expected ---------------------------------

PING = PingFrame(0, opaque_data=b"12345678").serialize()
UPDATE = WindowUpdateFrame(0, window_increment=5).serialize()
RESET = RstStreamFrame(1, error_code=8).serialize()
USUAL = frames_of(1)
MIDDLE = len(USUAL) // 2


def within(*frames: bytes, at: int = MIDDLE) -> list[bytes]:
    """These frames between those of the body."""
    return [*USUAL[:at], *frames, *USUAL[at:]]


ODD = {
    "another stream's request": within(head(3, 2) + data(3, b"xy", "END_STREAM")),
    "another stream's DATA": within(data(3, b"xy")),
    "PING": within(PING),
    "WINDOW_UPDATE": within(UPDATE),
    "PRIORITY": within(PriorityFrame(1, depends_on=5).serialize()),
    "CONTINUATION": within(b"\0\0\1\x09\4\0\0\0\1x"),
    "a block in two": within(
        head(3, 2)[:4] + b"\0" + head(3, 2)[5:] + b"\0\0\0\x09\4\0\0\0\3" + data(3, b"xy", "END_STREAM")
    ),
    "RST_STREAM": [*USUAL[:MIDDLE], RESET, usual(3)],
    "RST_STREAM, and more of it": within(RESET),
    "END_STREAM too early": [*USUAL[:MIDDLE], data(1, b"x" * FRAME, "END_STREAM"), *USUAL[MIDDLE + 1 :]],
    "no END_STREAM": [*USUAL[:-1], data(1, BODY[-(len(BODY) % FRAME) :]), PING],
    "END_STREAM apart": [*USUAL[:-1], data(1, BODY[-(len(BODY) % FRAME) :]), data(1, b"", "END_STREAM")],
    "trailers": [
        *USUAL[:-1],
        data(1, BODY[-(len(BODY) % FRAME) :]),
        b"\0\0\x05\1\5\0\0\0\1" + b"\x10\x01a\x01b",
    ],
    "PADDED": [*USUAL[:MIDDLE], data(1, BODY[MIDDLE * FRAME : (MIDDLE + 1) * FRAME - 300], pad=9),
               data(1, BODY[(MIDDLE + 1) * FRAME - 300 : (MIDDLE + 1) * FRAME]), *USUAL[MIDDLE + 1 :]],
    "an empty frame": within(data(1, b"")),
    "frames of odd sizes": frames_of(1, size=9_999),
    "one frame in two": [
        *USUAL[:MIDDLE],
        *frames_of(1, BODY[MIDDLE * FRAME : (MIDDLE + 1) * FRAME] + b"x", FRAME // 2)[:2],
        *USUAL[MIDDLE + 1 :],
    ],
    "too long": [*USUAL[:-1], data(1, BODY[-(len(BODY) % FRAME) :] + b"more", "END_STREAM")],
    "too short": [*USUAL[:-1], data(1, b"x", "END_STREAM")],
    "a frame over the limit": [*USUAL[:MIDDLE], data(1, b"x" * (FRAME + 1)), *USUAL[MIDDLE + 1 :]],
    "the last frame first": [USUAL[0], *USUAL[-1:], *USUAL[1:-1]],
}  # fmt: skip


@pytest.mark.parametrize("begun", [0, 1, 5_000, FRAME + 9, FRAME + 15])
@pytest.mark.parametrize("name", ODD)
def test_frames_that_are_not_as_expected(name: str, begun: int) -> None:
    """Wherever the read before has ended, and whatever comes behind."""
    pieces = [head(1) + b"".join(ODD[name])[:begun], b"".join(ODD[name])[begun:], usual(101)]
    here, there = Rows(), Rows()
    line = Line(here, most=len(pieces[0]))
    for piece in pieces:
        line.send(piece)
        if not line.closed:
            line.pump()
    expected = untried(pieces, there)
    assert answers(line.sent) == answers(expected.pipe.sent)
    assert said(line.sent) == said(expected.pipe.sent)
    assert line.http2.held == expected.pipe.protocol.held
    assert here.taken + here.called == there.called
    line.shut()


@given(st.data())
def test_any_frames_split_anywhere(data_of: st.DataObject) -> None:
    """Frames of 64 bytes count as full, and bodies of 4 bytes as large."""
    pieces = data_of.draw(st.lists(ACTIONS, min_size=1, max_size=8))
    stream = b"".join(action(2 * at + 1) if callable(action) else action for at, action in enumerate(pieces))
    cuts = sorted(data_of.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    edges = [0, *cuts, len(stream)]
    chunks = [stream[low:high] for low, high in itertools.pairwise(edges) if low < high]
    here, there = Rows(), Rows()
    here.willing = data_of.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "FRAME_BYTES", 64)
        patch.setattr(connection_module, "BULK_BYTES", 4)
        patch.setattr(exchange_module, "BULK_BYTES", 4)
        patch.setattr(connection_module, "SKIPPED_BODIES", data_of.draw(st.sampled_from([0, 1])))
        expected = untried(chunks, there)
        line = Line(here, data_of.draw(st.sampled_from([1, 20, 60, 4096])))
        line.breaks = True
        for chunk in chunks:
            if not line.closed:
                line.send(chunk)
                line.pump()
                line.wait()
        assert answers(line.sent) == answers(expected.pipe.sent)
        assert said(line.sent) == said(expected.pipe.sent)
        assert here.taken + here.called == there.called
        line.shut()


BODIES = st.binary(min_size=1, max_size=300)


def shaped(body: bytes, sizes: list[int], between: bytes, pad: int, ends: bool) -> Callable[[int], bytes]:
    """A request whose frames have these sizes, again and again; `between` stands behind the first."""

    def build(number: int) -> bytes:
        out, at = [head(number, len(body))], 0
        for size in itertools.cycle(sizes):
            piece, at = body[at : at + size], at + size
            last = at >= len(body)
            out.append(
                data(number, piece, *["END_STREAM"] * (last and ends), pad=pad if len(out) == 2 else 0)
            )
            out.append(between if len(out) == 2 else b"")
            if last:
                break
        return b"".join(out) + (b"" if ends else data(number, b"", "END_STREAM"))

    return build


def shape_usual(body: bytes, missing: int) -> Callable[[int], bytes]:
    """A request as clients send it; `missing` more bytes are told than come."""

    def build(number: int) -> bytes:
        return head(number, len(body) + missing) + b"".join(frames_of(number, body, 64))

    return build


ACTIONS = st.one_of(
    st.builds(shape_usual, BODIES, st.just(0)),
    st.builds(
        shaped,
        BODIES,
        st.sampled_from([[64], [63], [1, 64], [64, 32], [64, 64, 1]]),
        st.sampled_from([b"", PING, UPDATE]),
        st.sampled_from([0, 3]),
        st.booleans(),
    ),
    st.builds(shape_usual, BODIES, st.just(1)),
    st.sampled_from([PING, UPDATE]),
)  # fmt: skip


# --- sockets that have less than they say, and waits ---------------------------------


@pytest.mark.parametrize("more", [1, 8, 9, 1000, FRAME + 4, 100_000])
def test_a_socket_that_has_less_than_it_says(
    line: Line, rows: Rows, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "FrameReader", None)
    stream = usual(1)
    monkeypatch.setattr(
        Http2Connection, "_await_rest", lambda self, nbytes: self._take_arrived(*taking(self))
    )
    line.send(stream[:-more])
    line.pump()
    assert not rows.taken
    line.send(stream[-more:])
    line.pump()
    assert answers(line.sent) == [(1, BODY)]


def taking(connection: Http2Connection) -> tuple[Any, Any, int]:
    stream = connection.arriving
    assert stream is not None
    assert stream.inlet is not None
    assert stream.inlet.taker is not None
    return stream, stream.inlet.taker, stream.inlet.taker.missing()


def low(line: Line) -> int:
    """From how many bytes on the socket counts as readable."""
    return line.server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_body_on_its_way_is_awaited_and_taken(line: Line, rows: Rows) -> None:
    stream = usual(1)
    line.send(stream[:500])
    line.pump()
    assert low(line) > len(BODY) - 500
    assert len(line.listener.http2.waits) == 1
    line.send(stream[500:100_000])
    line.pump()
    assert arrived_bytes(line.server) == 99_500  # nothing is read in pieces
    line.send(stream[100_000:])
    line.pump()
    assert (rows.taken, rows.called, low(line)) == (1, 0, 1)
    assert not line.listener.http2.waits


def test_a_body_that_is_too_slow_is_read_as_it_comes_and_the_next_ones_are_not_awaited(
    line: Line, rows: Rows
) -> None:
    """A client that has stopped in the middle keeps no rows, and how slow it is can be seen."""
    stream = usual(1)
    line.send(stream[:100_000])
    line.pump()
    assert low(line) > 1
    line.wait()
    assert (low(line), arrived_bytes(line.server), rows.taken) == (1, 0, 0)
    line.send(stream[100_000:])
    line.pump()
    assert (rows.taken, rows.called) == (0, 1)
    for count in range(1, SKIPPED_BODIES + 2):
        stream = usual(1 + 2 * count)
        line.send(stream[:500])
        line.pump()
        assert (low(line) > 1) == (count > SKIPPED_BODIES)
        line.send(stream[500:])
        line.pump()
    assert rows.called + rows.taken == SKIPPED_BODIES + 2


def test_a_stream_behind_a_body_on_its_way_waits_no_longer_than_the_body_is_awaited(
    line: Line, rows: Rows
) -> None:
    line.send(usual(1)[:100_000])
    line.pump()
    assert low(line) > 1
    other = head(3, 2) + data(3, b"xy", "END_STREAM")
    frames = b"".join(frames_of(1))
    whole = [frame for frame in USUAL if len(frame) == FRAME + 9]
    cut = len(head(1)) + 7 * len(whole[0])
    line.send(usual(1)[100_000:cut] + other)
    line.pump()
    assert answers(line.sent) == []
    line.wait()
    assert answers(line.sent) == [(3, b"xy")]
    line.send(frames[cut - len(head(1)) :])
    line.pump()
    assert answers(line.sent) == [(3, b"xy"), (1, BODY)]


def test_nobody_waits_beside_another_stream(line: Line, rows: Rows) -> None:
    line.send(head(1, 2))  # its body is on its way too
    line.pump()
    line.send(usual(3)[:1000])
    line.pump()
    assert low(line) == 1
    line.send(usual(3)[1000:] + data(1, b"xy", "END_STREAM"))
    line.pump()
    assert answers(line.sent) == [(3, BODY), (1, b"xy")]
    assert rows.taken == 0


def test_a_stream_that_is_begun_within_a_body_ends_its_wait(line: Line, rows: Rows) -> None:
    """The wait is not begun anew beside it, and the body is read as it comes."""
    line.send(usual(1)[: len(head(1)) + 2 * (FRAME + 9)])
    line.pump()
    line.wait()
    line.http2._awaits, line.http2._unawaited = True, 0
    line.send(head(3, 2))
    line.pump()
    assert (low(line), line.http2.arriving) == (1, None)
    line.send(b"".join(USUAL[2:]) + data(3, b"xy", "END_STREAM"))
    line.pump()
    assert answers(line.sent) == [(1, BODY), (3, b"xy")]
    assert rows.taken == 0


@pytest.mark.parametrize("how", ["close", "eof", "reset", "goaway", "too slow", "no room"])
def test_a_wait_ends_with_its_stream(line: Line, rows: Rows, how: str) -> None:
    line.send(usual(1)[:100_000])
    line.pump()
    assert len(line.listener.http2.waits) == 1
    connection, stream = line.http2, line.http2.streams[1]
    if how == "close":
        line.close()
    elif how == "eof":
        line.hangups = None
        connection._cut_off_streams()
    elif how == "reset":
        connection._take_reset(1)
    elif how == "goaway":
        connection.fail(connection_module.ErrorCode.INTERNAL_ERROR, "the end")
    elif how == "too slow":
        stream.service.too_slow(stream)
    else:
        stream.service.no_room(stream, ServeError(Kind.UNAVAILABLE, "full"))
    assert not line.listener.http2.waits
    assert (connection.arriving, connection._awaited) == (None, False)
    assert rows.taken == rows.called == 0
    if not line.closed:
        assert low(line) == 1
        assert connection.held == 0


def test_bodies_that_are_not_awaited(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MOST_AWAITED_BYTES", len(BODY) - 1000)
    line = Line(rows, most=500)
    line.send(usual(1)[:500])
    line.pump()
    assert low(line) == 1
    line.shut()


def test_a_timer_ends_the_waits_that_are_older_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait lasts a look at least and two at most; a failure stops none of the others."""
    timers: list[Callable[[], None]] = []

    class Waiting:
        def __init__(self, fault: Exception | None = None) -> None:
            self.given_up, self.fault, self.failed = 0, fault, 0

        def give_up_awaiting(self) -> None:
            self.given_up += 1
            waits.remove(self)
            if self.fault is not None:
                raise self.fault

        def callback_failed(self, error: Exception) -> None:
            self.failed += 1

    class Loop:
        cancelled = 0

        def call_later(self, delay_s: float, call: Callable[[], None]) -> Loop:
            timers.append(call)
            return self

        def cancel(self) -> None:
            self.cancelled += 1

    loop, waits = Loop(), BodyWaits()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    broken, first, second, left = Waiting(RuntimeError("x")), Waiting(), Waiting(), Waiting()
    for one in (broken, first, left):
        waits.add(one)
    assert len(timers) == 1
    timers.pop()()
    assert first.given_up == 0
    waits.add(second)
    waits.remove(left)
    assert len(timers) == 1
    timers.pop()()
    assert [one.given_up for one in (broken, first, second, left)] == [1, 1, 0, 0]
    assert (broken.failed, len(waits)) == (1, 1)
    waits.close()
    assert loop.cancelled == 1
    waits.remove(second)
    assert not waits
