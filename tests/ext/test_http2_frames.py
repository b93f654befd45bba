"""Frames against the oracle and against hyperframe: any frames, broken ones among them, split anywhere."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import http2_frames as ext
from tests.oracles import http2_frames as oracle
from tests.oracles.http2_frames import PREFACE, Event

MOST_FRAME, MOST_BLOCK, MOST_PARTS = 300, 200, 3
SETTINGS = ext.frame(ext.SETTINGS, 0, 0, b"")

streams = st.sampled_from((0, 1, 1, 1, 2, 3, 5, 0x7FFFFFFF))
sizes = st.sampled_from((0, 1, 4, 5, 6, 8, 12, 40, 199, 250, 300))


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One frame: of any kind and flags, most of them of a length that fits."""
    kind = draw(st.sampled_from((0, 0, 0, 1, 1, 1, 9, 9, 2, 3, 4, 5, 6, 7, 8, 8, 10, 200)))
    fitting = {2: 5, 3: 4, 4: 6, 6: 8, 7: 8, 8: 4}.get(kind)
    size = draw(st.one_of(st.just(fitting), sizes)) if fitting else draw(sizes)
    flags = draw(st.one_of(st.sampled_from((0, 1, 4, 5, 8, 9, 12, 32, 36, 44)), st.integers(0, 255)))
    payload = draw(st.binary(min_size=size, max_size=size))
    if payload and draw(st.booleans()):
        payload = bytes([draw(st.integers(0, 9))]) + payload[1:]
    return size.to_bytes(3, "big") + bytes([kind, flags]) + draw(streams).to_bytes(4, "big") + payload


transcripts = st.builds(
    lambda good, parts, cut: (PREFACE + (SETTINGS if good else b"") + b"".join(parts))[
        : None if cut is None else cut
    ],
    st.sampled_from((True, True, True, False)),
    st.lists(frames(), max_size=12),
    st.one_of(st.none(), st.integers(0, 600)),
)


def joined(events: list[Event]) -> list[Event]:
    """Runs of DATA on one stream as one event: where frames of it begin is not told."""
    found: list[Event] = []
    for event in events:
        if event[0] == ext.DATA and found and found[-1][0] == ext.DATA and found[-1][2] == event[2]:
            last = found[-1]
            if not last[1]:
                found[-1] = (event[0], event[1], event[2], last[3] + event[3], last[4] + event[4])
                continue
        found.append(event)
    return found


@given(transcripts, st.lists(st.integers(0, 4000), max_size=8))
def test_any_frames_split_anywhere(data: bytes, cuts: list[int]) -> None:
    reader = ext.FrameReader(MOST_FRAME, MOST_BLOCK, MOST_PARTS)
    scratch = bytearray(data)
    whole = [plain(event) for event in reader.read(scratch, len(scratch))]
    expected = joined(oracle.read(data, MOST_FRAME, MOST_BLOCK, MOST_PARTS))
    told = joined([one for event in whole for one in event])
    check(told, expected)
    pieces = ext.FrameReader(MOST_FRAME, MOST_BLOCK, MOST_PARTS)
    split: list[Event] = []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        scratch = bytearray(data[start:stop])
        split += [one for event in pieces.read(scratch, len(scratch)) for one in plain(event)]
    assert in_order(split) == in_order(told)


def in_order(events: list[Event]) -> list[object]:
    """Split events by the order that frames promise: that of all heads, and that of each stream, between any
    two frames that are neither HEADERS nor DATA. A REQUEST tells of its DATA where its HEADERS stood."""
    found: list[object] = []
    heads: list[Event] = []
    streams: dict[int, list[Event]] = {}

    def end() -> None:
        found.append((list(heads), {stream: joined(events) for stream, events in streams.items()}))
        heads.clear()
        streams.clear()

    for event in events:
        if event[0] in (ext.HEADERS, ext.DATA):
            heads += [event] * (event[0] == ext.HEADERS)
            streams.setdefault(event[2], []).append(event)
        else:
            end()
            found.append(event)
    end()
    return found


def plain(event: tuple[int, object, int, object, int]) -> list[Event]:
    kind, flags, stream, payload, value = event
    if kind == ext.REQUEST:
        assert isinstance(flags, bytes)
        return [(ext.HEADERS, 0, stream, bytes(payload), 0), (ext.DATA, 1, stream, flags, value)]  # type: ignore[call-overload]
    if kind == ext.FAULT:
        return [(kind, 0, stream, b"", value)]
    return [(kind, int(flags), stream, bytes(payload), value)]  # type: ignore[call-overload]


def check(told: list[Event], expected: list[Event]) -> None:
    """Equal, but that an unfinished DATA frame at the end is told as far as it goes."""
    if told and told[-1][0] == ext.DATA and told != expected:
        last = told[-1]
        if expected and len(expected) == len(told):
            assert expected[-1][0] == ext.DATA
            assert last[3].startswith(expected[-1][3])
        told, expected = told[:-1], expected[: len(told) - 1]
    assert in_order(told) == in_order(expected)


def parts(count: int, last: bool = True) -> bytes:
    more = [ext.frame(ext.CONTINUATION, 4 if last and i == count - 1 else 0, 1, b"b") for i in range(count)]
    return ext.frame(ext.HEADERS, 0, 1, b"a") + b"".join(more)


# Each rule at its bound, and one beyond it.
BOUNDS = {
    "padding is all of DATA": ext.frame(ext.DATA, 8, 1, b"\x04abcd"),
    "padding is more than DATA": ext.frame(ext.DATA, 8, 1, b"\x05abcd"),
    "padding is all of HEADERS": ext.frame(ext.HEADERS, 12, 1, b"\x04abcd"),
    "padding is more than HEADERS": ext.frame(ext.HEADERS, 12, 1, b"\x05abcd"),
    "HEADERS is priority alone": ext.frame(ext.HEADERS, 36, 1, b"\0\0\0\x03\x10"),
    "HEADERS is less than priority": ext.frame(ext.HEADERS, 36, 1, b"\0\0\0\x03"),
    "HEADERS is padding and priority": ext.frame(ext.HEADERS, 44, 1, b"\x01\0\0\0\x03\x10-"),
    "HEADERS depends on itself": ext.frame(ext.HEADERS, 36, 1, b"\x80\0\0\x01\x10block"),
    "as many parts as may be": parts(MOST_PARTS),
    "a part too many": parts(MOST_PARTS + 1),
    "as long a block as may be": ext.frame(ext.HEADERS, 4, 1, bytes(MOST_BLOCK)),
    "a block too long": ext.frame(ext.HEADERS, 4, 1, bytes(MOST_BLOCK + 1)),
    "a block too long in parts": ext.frame(ext.HEADERS, 0, 1, bytes(MOST_BLOCK)) + ext.frame(9, 4, 1, b"b"),
    "as long a frame as may be": ext.frame(ext.DATA, 0, 1, bytes(MOST_FRAME)),
    "a frame too long": ext.frame(ext.DATA, 0, 1, bytes(MOST_FRAME + 1)),
    "PRIORITY on itself": ext.frame(ext.PRIORITY, 0, 1, b"\0\0\0\x01\x10"),
    "PRIORITY too short": ext.frame(ext.PRIORITY, 0, 1, b"\0\0\0\x03"),
    "GOAWAY as short as may be": ext.frame(ext.GOAWAY, 0, 0, bytes(8)),
    "GOAWAY too short": ext.frame(ext.GOAWAY, 0, 0, bytes(7)),
    "no increment of a stream": ext.frame(ext.WINDOW_UPDATE, 0, 1, b"\x80\0\0\0"),
    "no increment of the connection": ext.frame(ext.WINDOW_UPDATE, 0, 0, b"\x80\0\0\0"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str) -> None:
    data = PREFACE + SETTINGS + BOUNDS[name] + ext.frame(ext.PING, 0, 0, bytes(8))
    expected = oracle.read(data, MOST_FRAME, MOST_BLOCK, MOST_PARTS)
    assert len(expected) > 1
    for size in (len(data), 1, 5):
        reader = ext.FrameReader(MOST_FRAME, MOST_BLOCK, MOST_PARTS)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        told = [one for piece in pieces for event in reader.read(piece, len(piece)) for one in plain(event)]
        assert in_order(told) == in_order(expected)


def post(stream: int, *, data: bool = True, head: bool = True) -> bytes:
    number = b"%d" % stream
    frames = [ext.frame(ext.HEADERS, 4, stream, b"head" + number), ext.frame(ext.DATA, 1, stream, number)]
    return frames[0] * head + frames[1] * data


def request(stream: int) -> tuple[int, bytes, int, bytes, int]:
    number = b"%d" % stream
    return (ext.REQUEST, number, stream, b"head" + number, len(number))


def head(stream: int) -> tuple[int, int, int, bytes, int]:
    return (ext.HEADERS, 0, stream, b"head%d" % stream, 0)


def body(stream: int) -> tuple[int, int, int, bytes, int]:
    return (ext.DATA, 1, stream, b"%d" % stream, len(b"%d" % stream))


HEADS = b"".join(post(stream, data=False) for stream in (1, 3, 5))
PINGED, PING = (ext.PING, 0, 0, bytes(8), 0), ext.frame(ext.PING, 0, 0, bytes(8))
TOGETHER = {
    "one after the other": (post(1) + post(3), [request(1), request(3)]),
    "heads, then bodies": (
        HEADS + b"".join(post(stream, head=False) for stream in (1, 3, 5)),
        [request(1), request(3), request(5)],
    ),
    "a body is missing": (HEADS + post(1, head=False), [request(1), head(3), head(5)]),
    "the first body is missing": (HEADS + post(3, head=False), [head(1), head(3), head(5), body(3)]),
    "a request behind a head": (
        HEADS + post(7) + post(1, head=False),
        [request(1), head(3), head(5), request(7)],
    ),
    "a frame between": (HEADS + PING + post(1, head=False), [head(1), head(3), head(5), PINGED, body(1)]),
    "a reset between": (
        HEADS + ext.frame(ext.RST_STREAM, 0, 1, bytes(4)) + post(1, head=False),
        [head(1), head(3), head(5), (ext.RST_STREAM, 0, 1, b"", 0), body(1)],
    ),
    "a body in two frames": (
        HEADS + ext.frame(ext.DATA, 0, 1, b"1") + post(1, head=False) + post(3, head=False),
        [head(1), head(3), head(5), (ext.DATA, 0, 1, b"1", 1), body(1), body(3)],
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_requests_that_come_together(name: str) -> None:
    data, expected = TOGETHER[name]
    reader = ext.FrameReader(16384, 65536, 16)
    reader.read(PREFACE + SETTINGS, len(PREFACE + SETTINGS))
    assert reader.read(data, len(data)) == expected


@pytest.mark.parametrize("size", [1, 2, 9, 10, 23, 24, 25, 100])
def test_a_request_in_one_piece_and_in_many(size: int) -> None:
    headers = HeadersFrame(1, data=b"block", flags=["END_HEADERS"]).serialize()
    data = PREFACE + SETTINGS + headers + DataFrame(1, data=b"body", flags=["END_STREAM"]).serialize()
    reader = ext.FrameReader(16384, 65536, 16)
    whole = reader.read(data, len(data))
    assert whole == [(ext.SETTINGS, 0, 0, b"", 0), (ext.REQUEST, b"body", 1, b"block", 4)]
    reader = ext.FrameReader(16384, 65536, 16)
    told = [
        e for i in range(0, len(data), size) for e in reader.read(data[i : i + size], len(data[i : i + size]))
    ]
    assert [one for event in told for one in plain(event) if one[0] == ext.HEADERS] == [
        (1, 0, 1, b"block", 0)
    ]
    assert b"".join(one[3] for event in told for one in plain(event) if one[0] == ext.DATA) == b"body"
    assert not reader.waits


def test_so_many_frames_are_told_and_the_rest_is_left() -> None:
    """Heads wait for their bodies across it: it is a bound for one read, not for what is read."""
    pings = [ext.frame(ext.PING, 0, 0, number.to_bytes(8, "big")) for number in range(1000)]
    data = b"".join(pings) + post(1)
    reader = ext.FrameReader(16384, 65536, 16)
    reader.read(PREFACE + SETTINGS, len(PREFACE + SETTINGS))
    told: list[Event] = []
    view = memoryview(data + bytes(17))
    for count in (ext.READ_EVENTS, ext.READ_EVENTS, ext.READ_EVENTS, 1000 - 3 * ext.READ_EVENTS + 1):
        some = reader.read(view, len(data))
        assert len(some) == count
        told += some
        data = data[len(data) - reader.left :]
        view = memoryview(data)
    assert reader.left == 0
    assert told[-1] == request(1)
    assert [int.from_bytes(one[3], "big") for one in told[:-1]] == list(range(1000))


def test_large_pieces_are_borrowed() -> None:
    data = bytearray(PREFACE + SETTINGS + ext.frame(ext.DATA, 0, 1, bytes(5000)))
    (_, (kind, _, _, payload, value)) = ext.FrameReader(16384, 65536, 16).read(data, len(data))
    assert (kind, value) == (ext.DATA, 5000)
    assert isinstance(payload, memoryview)
    assert payload.obj is data


@given(st.integers(0, 9), st.integers(0, 255), streams, st.binary(max_size=300))
def test_frames_are_written_as_hyperframe_reads_them(
    kind: int, flags: int, stream: int, payload: bytes
) -> None:
    written = ext.frame(kind, flags, stream, payload)
    assert written == ext.frame_head(len(payload), kind, flags, stream) + payload
    assert int.from_bytes(written[:3], "big") == len(payload)
    assert (written[3], written[4], int.from_bytes(written[5:9], "big")) == (kind, flags, stream)


@pytest.mark.parametrize("body", [b"", b"body"])
@pytest.mark.parametrize("trailers", [b"", b"trailers"])
def test_replies(body: bytes, trailers: bytes) -> None:
    data = ext.reply_frames(7, b"block", body, trailers)
    found = []
    while data:
        frame, size = Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + size]))
        found.append((type(frame).__name__, frame.stream_id, sorted(frame.flags), frame.data))
        data = data[9 + size :]
    end = ["END_STREAM"]
    expected = [
        ("HeadersFrame", 7, sorted(["END_HEADERS", *(end if not body and not trailers else [])]), b"block")
    ]
    if body:
        expected.append(("DataFrame", 7, [] if trailers else end, body))
    if trailers:
        expected.append(("HeadersFrame", 7, ["END_HEADERS", "END_STREAM"], trailers))
    assert found == expected


def test_what_cannot_be_framed() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        ext.frame_head(1 << 24, 0, 0, 1)
    with pytest.raises(ValueError, match="5 bytes of 4"):
        ext.FrameReader(16384, 65536, 16).read(b"four", 5)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[low:high] for low, high in pairwise(edges)]


BODY_FRAMES = st.tuples(st.sampled_from((1, 3)), st.binary(max_size=40), st.booleans())


@given(
    st.lists(BODY_FRAMES, min_size=1, max_size=12),
    st.lists(st.integers(0, 1 << 16), max_size=8),
    st.integers(0, 200),
)  # fmt: skip
def test_a_diverted_body_is_the_same_body(
    frames: list[tuple[int, bytes, bool]], cuts: list[int], room: int
) -> None:
    """Told as a number or as bytes: in order, with the same ends and the same counts."""
    data = b"".join(
        DataFrame(stream, data=body, pad_length=3 if padded else 0, flags=["PADDED"] * padded).serialize()
        for stream, body, padded in frames
    )
    data += DataFrame(1, data=b"last", flags=["END_STREAM"]).serialize()
    reader = ext.FrameReader(16384, 65536, 16)
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
    reader.read(greeting, len(greeting))
    place, at, counted, ends = bytearray(1000), 0, {1: 0, 3: 0}, []
    bodies, placed = {1: b"", 3: b""}, 0
    for piece in split(data, cuts):
        reader.divert(1, memoryview(place)[at : max(at, room)])
        for kind, flags, stream, payload, value in reader.read(piece, len(piece)):
            if kind == ext.PLACED:
                assert stream == 1
                payload, placed = place[at : at + payload], placed + 1
            else:
                assert kind == ext.DATA
            if stream == 1:  # what came as bytes stands before what comes next, whichever way that goes
                place[at : at + len(payload)] = payload
                at += len(payload)
            bodies[stream] += bytes(payload)
            counted[stream] += value
            ends += [stream] * bool(flags)
    bodies[1] = bytes(place[:at])
    for stream in (1, 3):
        sent = [(body, padded) for number, body, padded in frames if number == stream]
        tail = b"last" if stream == 1 else b""
        assert bodies[stream] == b"".join(body for body, _ in sent) + tail
        assert counted[stream] == sum(len(body) + 4 * padded for body, padded in sent) + len(tail)
    assert ends == [1]
    assert reader.diverted == 1
    if room >= 200 and not cuts and all(stream == 1 for stream, _, _ in frames) and len(bodies[1]) <= room:
        assert placed <= 1 + sum(not body for _, body, _ in frames)  # one event for one read
    reader.divert(0, place)
    assert reader.diverted == 0


def test_a_place_that_is_none() -> None:
    reader = ext.FrameReader(16384, 65536, 16)
    reader.divert(1, b"read only")
    with pytest.raises(BufferError):
        reader.read(b"PRI", 3)


ONE_FRAME = 64
SHAPES = st.one_of(
    st.just(None),
    st.lists(st.tuples(st.integers(0, ONE_FRAME), st.sampled_from("dddddppwroe")), min_size=1, max_size=8),
)


def shape_body(body: bytes, shape: list[tuple[int, str]] | None) -> list[bytes]:
    """Frames of a body on stream 1: as clients send them, or with these sizes and others between."""
    found, at = [], 0
    for size, kind in shape or []:
        piece, at = body[at : at + size], at + size
        if kind == "w":
            found.append(ext.frame(ext.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
        elif kind == "r":
            found.append(ext.frame(ext.RST_STREAM, 0, 1, bytes(4)))
        elif kind == "o":
            found.append(ext.frame(ext.DATA, 0, 3, b"another's"))
        padded = kind == "p" and len(piece) < 60
        payload = b"\3" + piece + bytes(3) if padded else piece
        found.append(ext.frame(ext.DATA, 8 * padded + (kind == "e"), 1, payload))
    return found + [
        ext.frame(ext.DATA, start + ONE_FRAME >= len(body), 1, body[start : start + ONE_FRAME])
        for start in range(at, len(body), ONE_FRAME)
    ]


@given(st.binary(min_size=1, max_size=400), SHAPES, st.data())
def test_a_body_that_waits_in_the_socket_is_the_same_body(
    body: bytes, shape: list[tuple[int, str]] | None, data: st.DataObject
) -> None:
    """Read into its places by one call, or told as ever from the first frame on that is not as expected."""
    stream = b"".join(shape_body(body, shape)) + PING
    begun = data.draw(st.integers(0, len(stream)))
    there = data.draw(st.integers(begun, len(stream)))
    expected = ext.FrameReader(ONE_FRAME, 100, 3)
    reader = ext.FrameReader(ONE_FRAME, 100, 3)
    for one in (expected, reader):
        one.read(PREFACE + SETTINGS, len(PREFACE + SETTINGS))
    wanted = [one for event in expected.read(stream, len(stream)) for one in plain(event)]
    told = [one for event in reader.read(stream[:begun], begun) for one in plain(event)]
    before = sum(len(one[3]) for one in told if one[0] == ext.DATA and one[2] == 1)
    rest = len(body) - before
    client, server = socket.socketpair()
    with client, server:
        for end in (client, server):
            end.setblocking(False)
        client.sendall(stream[begun:there])
        missing = reader.missing_of(server.fileno(), 1, rest)
        if missing >= 0:
            cuts = sorted(data.draw(st.lists(st.integers(0, rest), max_size=3)))
            places = [memoryview(bytearray(high - low)) for low, high in pairwise([0, *cuts, rest])]
            got, odd = reader.receive(server.fileno(), 1, places)
            assert 0 <= got <= rest
            if got:
                told.append((ext.DATA, int(got == rest), 1, b"".join(places)[:got], got))
            if got == rest:
                assert (missing, odd) == (0, b"")
            elif not missing:
                assert odd
        else:
            odd = b""
        odd += server.recv(1 << 16) if there > begun and has_bytes(server) else b""
        odd += stream[there:]
        told += [one for event in reader.read(odd, len(odd)) for one in plain(event)]
    assert joined(told) == joined(wanted)
    if shape is None and begun < 9 and there == len(stream):
        assert missing == 0 or begun


def has_bytes(server: socket.socket) -> bool:
    try:
        return bool(server.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@pytest.mark.parametrize("rest", [0, -1, 1 << 24])
def test_rests_that_are_none_or_too_much(rest: int) -> None:
    reader = ext.FrameReader(ONE_FRAME, 100, 3)
    reader.read(PREFACE + SETTINGS, len(PREFACE + SETTINGS))
    assert reader.missing_of(0, 1, rest) == -1


def test_a_file_that_is_none() -> None:
    reader = ext.FrameReader(ONE_FRAME, 100, 3)
    reader.read(PREFACE + SETTINGS, len(PREFACE + SETTINGS))
    assert reader.missing_of(-1, 1, 100) == -1
    assert reader.receive(-1, 1, [memoryview(bytearray(100))]) == (0, b"")
    with pytest.raises(BufferError):
        reader.receive(-1, 1, [memoryview(b"read only")])
