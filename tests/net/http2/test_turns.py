"""One turn of the loop: how much of what a client has sent it takes, counted, and what is not lost
between two. What it costs is for tests/faults/test_flood_costs.py, what others feel for `make torture`.
"""

from __future__ import annotations

import asyncio

import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, PingFrame

from fastserve._ext.http2_frames import READ_EVENTS, frame
from fastserve.net import Call
from fastserve.net.http2 import abuse_budget
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.http2.exchange import SCRATCH_BYTES
from fastserve.net.http2.stream import ErrorCode
from tests.faults.flooding import DATA, END_HEADERS, END_STREAM, FLOODS, GREETING, HEADERS, PING, block
from tests.net.http2.kit import Raw
from tests.net.kit import Client, Held, client, echo, run, serving

POST, HELD = block("/echo"), block("/held")
PINGS = frame(PING, 0, 0, bytes(8)) * abuse_budget.A_TURN
DEAREST = abuse_budget.BOMB  # of one frame


class Counted(Raw):
    """How much of one read the loop's turns take."""

    def __init__(self) -> None:
        super().__init__({"/echo": echo, "/held": Held(), "/v2/models/free/infer": Held()})
        self.greet()
        self.connection: Http2Connection = self.pipe.protocol
        self.row = self.pipe.listener.fair_queue

    def read(self, data: bytes) -> None:
        """As the socket does, without a turn for what is put off."""
        assert self.pipe.reading
        with memoryview(self.connection.get_buffer(-1)) as room:
            room[: len(data)] = data
        self.connection.buffer_updated(len(data))

    @property
    def waits(self) -> int:
        """Bytes that are put off."""
        return len(self.connection.backlog) if self.connection.backlog is not None else 0


def one_read(name: str) -> bytes:
    data = bytearray()
    for chunk in FLOODS[name]():
        data += chunk
        if len(data) >= SCRATCH_BYTES:
            break
    return bytes(data[:SCRATCH_BYTES])


@pytest.mark.parametrize("name", FLOODS)
def test_a_turn_spends_no_more_than_its_share(name: str) -> None:
    counted, data = Counted(), one_read(name)
    before, turns = counted.connection._abuse_budget, 1
    counted.read(data)
    while True:
        assert before - counted.connection._abuse_budget <= abuse_budget.A_TURN + DEAREST
        assert counted.pipe.reading is not bool(counted.row)
        if not counted.row:
            break
        before, turns = counted.connection._abuse_budget, turns + 1
        counted.row.turn()
    assert counted.connection.over
    assert turns <= 2 + 2 * abuse_budget.BURST // abuse_budget.A_TURN
    assert counted.connection.backlog is None
    assert counted.pipe.reading  # what the client sends on is read off
    assert isinstance(counted.frames()[-1], GoAwayFrame)


def test_a_turn_takes_so_many_frames_and_no_more() -> None:
    """Of use or not: bytes of a body, one a frame, cost no points."""
    counted, sent = Counted(), 20_000
    counted.read(frame(HEADERS, END_HEADERS, 1, HELD))
    (stream,) = counted.connection.streams.values()
    assert stream.inlet is not None
    counted.read(frame(DATA, 0, 1, b"x") * sent)
    assert stream.inlet.received == READ_EVENTS
    while counted.row:
        taken = stream.inlet.received
        counted.row.turn()
        assert 0 < stream.inlet.received - taken <= READ_EVENTS
    assert stream.inlet.received == sent
    assert not counted.connection.over


def test_nothing_is_lost_or_turned_round_between_turns() -> None:
    """Requests, bodies of many frames that the read lends, and answers, with what is of no use between."""
    body = bytes(range(250)) * 36  # all answers fit the connection's window
    requests = range(1, 15, 2)
    pieces = [body[at : at + 5000] for at in range(0, len(body), 5000)]
    data = b""
    for number in requests:
        data += frame(HEADERS, END_HEADERS, number, POST) + PINGS[: 17 * 40]
        data += b"".join(frame(DATA, 0, number, piece) for piece in pieces)
        data += frame(DATA, END_STREAM, number, b"")
    assert len(data) < SCRATCH_BYTES
    counted = Counted()
    counted.read(data)
    counted.connection.get_buffer(-1)[: len(data)] = b"\xff" * len(data)  # others are read meanwhile
    assert counted.row
    while counted.row:
        counted.row.turn()
    found = counted.frames()
    assert len([one for one in found if isinstance(one, PingFrame)]) == 40 * len(requests)
    for number in requests:
        answer = b"".join(one.data for one in found if isinstance(one, DataFrame) and one.stream_id == number)
        assert answer == b"POST /echo " + body


def test_split_anywhere_it_is_the_same() -> None:
    data = PINGS + frame(HEADERS, END_HEADERS, 1, POST) + PINGS[:170] + frame(DATA, END_STREAM, 1, b"body")
    whole = Counted()
    whole.feed(data)
    expected = whole.pipe.sent
    assert b"POST /echo body" in expected
    for size in (1, 16, 17, 1000):
        split = Counted()
        split.feed(data, size)
        assert split.pipe.sent == expected


def test_what_comes_although_nothing_is_asked_for_waits_too() -> None:
    """TLS has decrypted it already, or HTTP/1.1 has read it before the connection changed."""
    counted = Counted()
    counted.read(PINGS * 2 + frame(HEADERS, END_HEADERS, 1, POST))
    more = frame(DATA, END_STREAM, 1, b"body")
    counted.connection.get_buffer(-1)[: len(more)] = more
    counted.connection.buffer_updated(len(more))
    assert counted.row
    while counted.row:
        counted.row.turn()
    assert b"POST /echo body" in counted.pipe.sent


@pytest.mark.parametrize("ending", ["close", "fail", "lost"])
def test_who_ends_while_something_waits_is_done_with(ending: str) -> None:
    counted = Counted()
    counted.read(PINGS * 3)
    assert counted.waits > 0
    if ending == "close":
        counted.connection.close()
    elif ending == "fail":
        counted.connection.fail(ErrorCode.NO_ERROR, "")
    else:
        counted.pipe.close()
    while counted.row:
        counted.row.turn()
    assert counted.connection.backlog is None
    assert counted.pipe.closed or counted.pipe.reading


def test_somebody_else_is_answered_between_two_turns() -> None:
    """20,000 frames in one read: a few answers come in the midst of them, not before and after alone."""
    seen: list[int] = []

    async def main() -> None:
        links: list[object] = []

        def ask(call: Call) -> None:
            seen.append(sum(count for link in links for count in taken(link)))
            call.reply(200)

        async with (
            serving({"/held": Held(), "/ask": ask}) as listener,
            client(listener) as flood,
            client(listener) as other,
        ):
            flood.send(GREETING + frame(HEADERS, END_HEADERS, 1, HELD))
            while not any(isinstance(link, Http2Connection) for link in links):
                await asked(other)
                links = list(listener.connections)
            flood.send(frame(DATA, 0, 1, b"x") * 20_000)
            while not seen or seen[-1] < 20_000:
                await asked(other)

    run(asyncio.wait_for(main(), 30))
    assert len({count for count in seen if 0 < count < 20_000}) >= 5


def taken(link: object) -> list[int]:
    if not isinstance(link, Http2Connection):
        return []
    return [stream.inlet.received for stream in link.streams.values() if stream.inlet is not None]


async def asked(link: Client) -> None:
    link.send(b"GET /ask HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await link.reply()).status == 200
