"""Floods: work without use is bounded, told ENHANCE_YOUR_CALM, and costs no memory. No case here waits."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    GoAwayFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from fastserve._ext.http2_frames import frame
from fastserve.net.http2 import abuse_budget
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.http2.settings import CONNECTION_WINDOW
from fastserve.net.http2.stream import STREAM_WINDOW, ErrorCode
from tests.net.http2.kit import GET, POST, Peer, Raw
from tests.net.kit import Held, echo, limits

END, HEADS = "END_STREAM", "END_HEADERS"
HELD = [*GET[:3], (":path", "/held")]
BIG = [*GET[:3], (":path", "/big")]
PLAIN_GET = b"\x82\x86\x84\x41\x01a"  # GET http / with an authority that is indexed
Flood = Callable[[Raw], Iterator[bytes]]


def rapid_reset(raw: Raw) -> Iterator[bytes]:
    for number in range(1, 1 << 30, 2):
        reset = RstStreamFrame(number, error_code=8).serialize()
        yield raw.headers(number, HELD, END, HEADS) + reset


def made_to_reset(raw: Raw) -> Iterator[bytes]:
    """The server resets: each request is malformed."""
    for number in range(1, 1 << 30, 2):
        yield raw.headers(number, GET[:3], END, HEADS)


def streams_beyond_the_limit(raw: Raw) -> Iterator[bytes]:
    for number in range(1, 1 << 30, 2):
        yield raw.headers(number, HELD, END, HEADS)


def again_and_again(data: bytes) -> Flood:
    def flood(raw: Raw) -> Iterator[bytes]:
        yield raw.headers(1, [*POST[:3], (":path", "/held")], HEADS)
        while True:
            yield data

    return flood


def endless_continuation(raw: Raw) -> Iterator[bytes]:
    yield raw.headers(1, GET, END)
    while True:
        yield ContinuationFrame(1, data=b"").serialize()


def endless_large_continuation(raw: Raw) -> Iterator[bytes]:
    yield raw.headers(1, GET, END)
    while True:
        yield ContinuationFrame(1, data=b"\0\x01a\x7f\x81\x7f" + bytes(16000)).serialize()


FLOODS: dict[str, Flood] = {
    "rapid reset": rapid_reset,
    "rapid reset by the server": made_to_reset,
    "streams beyond the limit": streams_beyond_the_limit,
    "PING": again_and_again(PingFrame(0, opaque_data=bytes(8)).serialize()),
    "SETTINGS": again_and_again(SettingsFrame(0, settings={4: 65535}).serialize()),
    "SETTINGS of many pairs": again_and_again(
        frame(4, 0, 0, bytes.fromhex("000400000000000400100000") * 1365)
    ),
    "empty DATA": again_and_again(frame(0, 0, 1, b"")),
    "DATA of padding alone": again_and_again(frame(0, 8, 1, b"\x01\0")),
    "GOAWAY": again_and_again(frame(7, 0, 0, bytes(8))),
    "SETTINGS acknowledged that nobody sent": again_and_again(frame(4, 1, 0, b"")),
    "PING answered that nobody asked": again_and_again(frame(6, 1, 0, bytes(8))),
    "PRIORITY": again_and_again(PriorityFrame(1, depends_on=3, stream_weight=1).serialize()),
    "windows byte by byte": again_and_again(WindowUpdateFrame(1, window_increment=1).serialize()),
    "the connection's window byte by byte": again_and_again(
        WindowUpdateFrame(0, window_increment=1).serialize()
    ),
    "frames nobody knows": again_and_again(frame(0xBE, 0, 0, b"")),
    "CONTINUATION": endless_continuation,
    "large CONTINUATION": endless_large_continuation,
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_told_to_calm_down(name: str) -> None:
    raw = Raw({"/held": Held(), "/echo": echo}).greet()
    for sent, data in enumerate(FLOODS[name](raw)):
        raw.feed(data)
        if raw.pipe.ended:
            break
        assert sent <= abuse_budget.BURST + 130, "it goes on"
    goaway = raw.frames()[-1]
    assert isinstance(goaway, GoAwayFrame)
    assert ErrorCode(goaway.error_code) is ErrorCode.ENHANCE_YOUR_CALM
    assert not raw.pipe.protocol.streams
    assert raw.pipe.listener.refusals == {"http2_enhance_your_calm": 1}


def test_a_frame_of_settings_moves_all_windows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it says the window; and never, if the window stays as it was."""
    moved: list[tuple[int, int]] = []
    shift = Http2Connection._shift_windows

    def count(connection: Http2Connection, change: int, largest: int) -> None:
        moved.append((change, largest))
        shift(connection, change, largest)

    monkeypatch.setattr(Http2Connection, "_shift_windows", count)
    raw = Raw({"/held": Held()}).greet()
    for number in range(1, 200, 2):
        raw.feed(raw.headers(number, HELD, END, HEADS))
    moved.clear()
    raw.feed(frame(4, 0, 0, struct.pack(">HI", 5, 20_000) + struct.pack(">HI", 4, 65535)))
    assert moved == []
    raw.feed(
        frame(4, 0, 0, b"".join(struct.pack(">HI", 4, size) for size in [100, 70_000] * 1000 + [65_536]))
    )
    assert moved == [(1, 70_000 - 65_535)]
    assert {stream.window for stream in raw.pipe.protocol.streams.values()} == {65_536}
    assert not raw.pipe.ended


def test_a_window_beyond_its_bound_for_a_moment_is_told() -> None:
    """Also where the same frame takes it back (RFC 9113 6.5.3: settings hold in their order)."""
    raw = Raw({"/held": Held()}).greet()
    raw.feed(raw.headers(1, HELD, END, HEADS) + WindowUpdateFrame(1, window_increment=1).serialize())
    raw.feed(frame(4, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1) + struct.pack(">HI", 4, 65535)))
    goaway = raw.frames()[-1]
    assert isinstance(goaway, GoAwayFrame)
    assert ErrorCode(goaway.error_code) is ErrorCode.FLOW_CONTROL_ERROR


def test_a_flood_that_goes_on_after_the_end_is_cut_off() -> None:
    raw = Raw({"/echo": echo}).greet()
    raw.feed(frame(6, 0, 1, bytes(8)))
    assert raw.pipe.ended
    raw.feed(bytes(1 << 20))
    assert not raw.pipe.closed
    raw.feed(bytes(1))
    assert raw.pipe.closed


def test_a_client_that_works_may_do_all_of_that_for_good() -> None:
    peer = Peer({"/echo": echo})
    for _ in range(2000):
        peer.h2.ping(bytes(8))
        number = peer.send(POST, b"body")
        peer.h2.increment_flow_control_window(15)
        peer.flush()
        assert peer.answers.pop(number).ended
    assert peer.goaway is None


def test_what_was_spent_comes_back_with_time() -> None:
    raw = Raw({"/held": Held()}).greet()
    for second in range(50):
        raw.feed(PingFrame(0, opaque_data=bytes(8)).serialize() * abuse_budget.PER_LOOK)
        raw.pipe.scan(float(second) / 10)
    assert not raw.pipe.ended


def test_thirty_thousand_streams_one_after_the_other_leave_nothing() -> None:
    raw = Raw({"/echo": lambda call: call.reply(200)}).greet()
    raw.feed(raw.headers(1, GET, END, HEADS))
    block = raw.encoder.encode(GET)

    def send(first: int, count: int) -> None:
        for start in range(first, first + 2 * count, 2000):
            raw.feed(b"".join(frame(1, 5, number, block) for number in range(start, start + 2000, 2)))
            raw.pipe.sent = b""

    send(3, 10_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    send(20_003, 30_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert not raw.pipe.ended
    assert not raw.pipe.protocol.streams
    assert grown < 300_000


def test_a_bomb_of_indexed_headers_is_431_and_holds_little() -> None:
    """16 MB of header lists in 64 KB of blocks: the list is bounded before it is made."""
    raw = Raw({"/echo": echo}, limits(streams=1000)).greet()
    raw.feed(raw.headers(1, [*GET, ("x", "y" * 3900)], END, HEADS))
    raw.frames()
    (index,) = (bytes([0x80 | number]) for number in (62,))
    tracemalloc.start()
    for number in range(3, 303, 2):
        raw.feed(raw.headers(number, [], END, HEADS, block=raw.encoder.encode(GET) + index * 4000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    frames = raw.frames()
    assert len([one for one in frames if type(one).__name__ == "HeadersFrame"]) == 10
    assert frames[-1].error_code == ErrorCode.ENHANCE_YOUR_CALM


def test_a_bomb_that_stays_in_the_table() -> None:
    raw = Raw({"/echo": echo}).greet()
    raw.feed(raw.headers(1, GET, END, HEADS))
    block = raw.encoder.encode(GET)
    tracemalloc.start()
    for number in range(3, 1203, 2):
        entry = b"\x40\x05x%04d\x7f\xa1\x1e" % number + b"y" * 4000  # a name, 4000 octets, to be indexed
        raw.feed(raw.headers(number, [], END, HEADS, block=(block if number == 3 else PLAIN_GET) + entry))
        raw.pipe.sent = b""
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert not raw.pipe.ended
    assert grown < 100_000


def test_a_client_that_does_not_read_is_answered_no_more() -> None:
    """Its window is shut: replies are queued up to a bound, and then nothing more is begun."""
    peer = Peer({"/big": lambda call: call.reply(200, bytes(8 << 20))})
    peer.credits = False
    for _ in range(20):
        peer.send(BIG)
    peer.flush()
    sending = peer.connection.sending
    assert sending.queued <= 72 << 20
    refused = [answer for answer in peer.answers.values() if answer.reset == ErrorCode.REFUSED_STREAM]
    assert len(refused) == 20 - 9
    peer.pipe.close()
    assert sending.queued == 0


def test_answers_nobody_reads_end_the_connection() -> None:
    raw = Raw({"/echo": echo}).greet()
    raw.pipe.protocol.pause_writing()
    for _ in range(40):
        raw.feed(PingFrame(0, opaque_data=bytes(8)).serialize() * 30)
        raw.pipe.scan(raw.pipe.clock.now + 0.001)
    assert isinstance(raw.frames()[-1], GoAwayFrame)


def test_resets_nobody_reads_fail_no_endpoint() -> None:
    """Early replies make resets too, from wherever the endpoint replies."""
    raw = Raw({"/held": Held()}, limits(streams=5000)).greet()
    protocol = raw.pipe.protocol
    for number in range(1, 2400, 2):
        raw.feed(raw.headers(number, HELD, HEADS))
    streams = list(protocol.streams.values())
    assert len(streams) == 1200
    protocol.pause_writing()
    for stream in streams:
        stream.reset(ErrorCode.INTERNAL_ERROR)
    assert raw.pipe.ended
    assert raw.pipe.listener.refusals == {"http2_enhance_your_calm": 1}


def test_a_stalled_reader_is_cut_off() -> None:
    with_limits = limits(write_stall_s=30.0, reply_bytes_per_s=0)
    peer = Peer({"/big": lambda call: call.reply(200, bytes(1 << 20))}, with_limits)
    peer.credits = False
    peer.send(BIG)
    peer.flush()
    peer.pipe.scan(0.0)
    peer.pipe.scan(29.0)
    assert not peer.pipe.closed
    peer.pipe.scan(31.0)
    assert peer.pipe.closed
    assert peer.pipe.listener.refusals == {"write_stall_s": 1}


def test_more_than_a_window_is_an_error() -> None:
    raw = Raw({"/held": Held()}).greet()
    raw.feed(raw.headers(1, [*POST[:3], (":path", "/held"), ("content-length", str(STREAM_WINDOW))], HEADS))
    for _ in range(STREAM_WINDOW // 16384):
        raw.feed(raw.data(1, bytes(16384)))
    assert not any(isinstance(one, RstStreamFrame | GoAwayFrame) for one in raw.frames())
    raw.feed(raw.data(1, b"x"))
    (reset,) = (one for one in raw.frames() if isinstance(one, RstStreamFrame))
    assert reset.error_code in (ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.PROTOCOL_ERROR)


def test_large_bodies_grow_their_windows_one_after_the_other() -> None:
    """Ten bodies of 16 MB at once: two may come beyond their first megabyte, the others wait for them."""
    raw = Raw({"/held": Held()}).greet()
    size = 16 << 20
    head = [*POST[:3], (":path", "/held"), ("content-length", str(size))]
    for number in range(1, 21, 2):
        raw.feed(raw.headers(number, head, HEADS))
    widened = [one.stream_id for one in raw.frames() if isinstance(one, WindowUpdateFrame)]
    assert widened == [1, 3]
    for number in range(1, 21, 2):
        for start in range(0, size, 16384):
            raw.feed(raw.data(number, bytes(16384), *([END] if start + 16384 == size else [])))
        raw.pipe.sent = raw.pipe.sent[-1 << 16 :]
        raw._seen = len(raw.pipe.sent)
    assert [len(call.body) for call in raw.pipe.listener.router._dialects[0].endpoints["/held"].calls] == [
        size
    ] * 10
    assert raw.pipe.protocol._credit > CONNECTION_WINDOW // 2 - 16384


def test_of_bodies_whose_length_is_not_told_one_can_always_be_completed() -> None:
    """Two that grow side by side until the budget of both is spent: the older one goes on."""
    raw = Raw({"/held": Held()}).greet()
    total, sent, window = 30 << 20, {1: 0, 3: 0}, {1: STREAM_WINDOW, 3: STREAM_WINDOW}
    piece = bytes(16384)
    for number in sent:
        raw.feed(raw.headers(number, [*POST[:3], (":path", "/held")], HEADS))
    while any(window[number] for number in sent if sent[number] < total):
        for number in [number for number in sent if window[number] and sent[number] < total]:
            sent[number], window[number] = sent[number] + len(piece), window[number] - len(piece)
            raw.feed(raw.data(number, piece, *([END] if sent[number] == total else [])))
            for one in raw.frames():
                if isinstance(one, WindowUpdateFrame) and one.stream_id:
                    window[one.stream_id] += one.window_increment
            raw.pipe.sent, raw._seen = b"", 0
    assert sent == {1: total, 3: total}
    assert raw.pipe.protocol.growth._out == 0


def test_who_waits_for_a_larger_window_waits_once() -> None:
    """However small the pieces its body comes in, and not at all once it is reset."""
    raw = Raw({"/held": Held()}).greet()
    head = [*POST[:3], (":path", "/held")]
    raw.feed(raw.headers(1, [*head, ("content-length", str(64 << 20))], HEADS) + raw.headers(3, head, HEADS))
    for _ in range(40):
        raw.feed(raw.data(3, bytes(16384)))
    raw.feed(b"".join(raw.data(3, b"x") for _ in range(1000)))
    growth = raw.pipe.protocol.growth
    assert len(growth._waiting) == 1
    raw.feed(RstStreamFrame(3, error_code=ErrorCode.CANCEL).serialize())
    assert not growth._waiting
