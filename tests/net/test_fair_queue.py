"""Turns of connections that are behind, and how much of one read of HTTP/1.1 a turn takes."""

from __future__ import annotations

import asyncio

import pytest

from fastserve.net import Call
from fastserve.net.fair_queue import KEPT_BYTES, FairQueue
from fastserve.net.http1.connection import TURN_STEPS
from tests.net.kit import Held, Pipe, client, echo, limits, run, serving

READ_BYTES = 256_000  # of one socket, by uvloop
GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class One:
    """Behind for so many turns."""

    def __init__(self, row: FairQueue, turns: int, kept: int = 0, *, fails: bool = False) -> None:
        self._row, self.turns, self._kept, self._fails = row, turns, kept, fails
        self.aborted = False
        row.join(self, kept)

    def catch_up(self) -> None:
        if self._fails:
            raise RuntimeError("as planned")
        self.turns -= 1
        if self.turns:
            self._row.join(self, self._kept)

    def callback_failed(self, error: Exception) -> None:
        self.aborted = True


def test_one_goes_on_in_a_turn_and_the_next_in_the_next() -> None:
    row = FairQueue()
    some = [One(row, 3) for _ in range(4)]
    for left in (3, 2, 1):
        for one in some:
            assert one.turns == left
            row.turn()
            assert one.turns == left - 1
    assert not row
    row.turn()


def test_more_of_them_go_on_where_much_is_kept() -> None:
    row = FairQueue()
    some = [One(row, 1, KEPT_BYTES // 4) for _ in range(40)]
    row.turn()
    assert sum(one.turns == 0 for one in some) == 11
    while row:
        row.turn()
    small = [One(row, 1) for _ in range(2)]
    row.turn()
    assert [one.turns for one in small] == [0, 1]


def test_one_that_fails_is_cut_off_and_keeps_nobody() -> None:
    async def main() -> None:
        row = FairQueue()
        row.loop = asyncio.get_running_loop()
        some = [One(row, 2, fails=number == 1) for number in range(4)]
        while row:
            await asyncio.sleep(0)
        assert [one.turns for one in some] == [0, 2, 0, 0]
        assert [one.aborted for one in some] == [False, True, False, False]

    run(main())


# ---- HTTP/1.1


class Counted(Pipe):
    """A connection whose turns are the test's."""

    def __init__(self) -> None:
        super().__init__({"/echo": self.count, "/held": Held()}, limits(pipelined_calls=10_000))
        self.counted = 0

    def count(self, call: Call) -> None:
        self.counted += 1
        echo(call)

    def read(self, data: bytes) -> None:
        assert self.reading
        self.protocol.data_received(data)


def many(one: bytes) -> bytes:
    return one * (READ_BYTES // len(one))


REQUESTS = {
    "the same": (many(GET), 1),
    "of different heads": (
        b"".join(GET.replace(b": a", b": a%d" % number) for number in range(7000)),
        1,
    ),
    "with bodies": (many(POST + b"Content-Length: 4\r\n\r\nbody"), 2),
    "in chunks": (many(CHUNKED + b"4\r\nbody\r\n0\r\n\r\n"), 2),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_turn_takes_so_many_requests(name: str) -> None:
    data, steps = REQUESTS[name]
    counted = Counted()
    counted.read(data)
    assert counted.counted == TURN_STEPS // steps
    while counted.listener.fair_queue:
        assert not counted.reading
        before = counted.counted
        counted.listener.fair_queue.turn()
        assert 0 <= counted.counted - before <= TURN_STEPS // steps + 1
    assert counted.reading
    assert counted.counted == data.count(b" /echo ")
    assert len(counted.replies()) == counted.counted


def test_a_turn_takes_so_many_chunks() -> None:
    counted = Counted()
    size, turns = 40_000, 1
    counted.read(CHUNKED + b"1\r\nx\r\n" * size)
    while counted.listener.fair_queue:
        turns += 1
        counted.listener.fair_queue.turn()
    assert turns >= size // (2 * TURN_STEPS)
    counted.read(b"0\r\n\r\n" + GET)
    assert counted.counted == 2
    assert [reply.body for reply in counted.replies()] == [b"POST /echo " + b"x" * size, b"GET /echo "]


def test_answers_that_come_meanwhile_are_no_turns() -> None:
    """The loop bounds a connection's turn, not its clients."""
    held = Held()
    pipe = Pipe({"/held": held, "/echo": echo}, limits(pipelined_calls=10_000))
    pipe.protocol.data_received(GET.replace(b"echo", b"held") * 200)
    assert len(held.calls) == TURN_STEPS
    for call in held.calls[:TURN_STEPS]:
        call.reply(200)
    assert len(held.calls) == TURN_STEPS
    assert not pipe.reading
    pipe.turn()
    for call in held.calls[TURN_STEPS:]:
        call.reply(200)
    assert len(pipe.replies()) == 200
    assert pipe.reading


def test_who_is_gone_or_refused_while_something_waits_is_done_with() -> None:
    for ending in (Pipe.close, lambda pipe: pipe.protocol.close(), lambda pipe: pipe.protocol._shut()):
        pipe = Pipe({"/echo": echo})
        pipe.protocol.data_received(GET * 1000)
        sent = len(pipe.sent)
        ending(pipe)
        pipe.turn()
        assert len(pipe.sent) == sent


def test_a_bad_request_behind_many_good_ones_is_answered_in_its_place() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.protocol.data_received(GET * 500 + b"BAD\r\n\r\n")
    pipe.turn()
    assert [reply.status for reply in pipe.replies()] == [200] * 500 + [400]


def test_somebody_else_is_answered_between_two_turns() -> None:
    seen: list[int] = []
    taken = 0

    def take(call: Call) -> None:
        nonlocal taken
        taken += 1
        call.reply(200)

    def ask(call: Call) -> None:
        seen.append(taken)
        call.reply(200)

    async def main() -> None:
        async with (
            serving({"/echo": take, "/ask": ask}) as listener,
            client(listener) as many_calls,
            client(listener) as other,
        ):
            many_calls.send(GET * 6000)
            while not seen or seen[-1] < 6000:
                other.send(GET.replace(b"echo", b"ask"))
                assert (await other.reply()).status == 200
                await asyncio.sleep(0)

    run(main())
    assert len({count for count in seen if 0 < count < 6000}) >= 5
