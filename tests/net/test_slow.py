"""Slow clients (H5): one scan of the listener at a time that the test chooses. No test here waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastserve.net.limits import Verdict
from tests.net.kit import WAIT_S, Held, Pipe, echo, limits, serving

QUICK = limits(header_timeout_s=10.0, idle_timeout_s=75.0, write_stall_s=30.0, body_bytes_per_s=100)
GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def pipe_at(data: bytes, at: float = 0.0) -> Pipe:
    """A connection that sent `data` and was seen by a scan at that time."""
    pipe = Pipe({"/echo": echo}, QUICK)
    pipe.clock.now = at
    if data:
        pipe.feed(data)
    pipe.scan(at)
    return pipe


@pytest.mark.parametrize("data", [b"", GET, b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"])
def test_an_idle_connection_is_closed_without_a_word(data: bytes) -> None:
    pipe = pipe_at(data)
    sent = pipe.sent
    pipe.scan(74.9)
    assert not pipe.closed
    pipe.scan(75.0)
    assert pipe.closed
    assert pipe.sent == sent
    assert not pipe.listener.connections


class Troubled:
    """A connection whose look fails."""

    looks = 0
    told = ""

    def look(self, now: float) -> Verdict:
        self.looks += 1
        raise OSError("the test's")

    def callback_failed(self, error: Exception) -> None:
        self.told = str(error)


def test_a_look_that_fails_does_not_end_the_looks() -> None:
    async def work() -> None:
        async with serving({"/echo": echo}, limits(idle_timeout_s=0.04)) as listener:
            troubled = Troubled()
            listener.connections.add(troubled)  # type: ignore[arg-type]
            end = asyncio.get_running_loop().time() + WAIT_S
            while troubled.looks < 2 and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
            listener.connections.discard(troubled)  # type: ignore[arg-type]
        assert troubled.looks >= 2
        assert troubled.told == "the test's"

    asyncio.run(work())


def test_a_request_restarts_the_idle_time() -> None:
    pipe = pipe_at(b"")
    pipe.scan(70.0)
    pipe.feed(GET)
    pipe.scan(76.0)
    pipe.scan(150.0)
    assert not pipe.closed
    pipe.scan(151.0)
    assert pipe.closed


@pytest.mark.parametrize("data", [b"G", GET[:-1], b"\r\n"])
def test_an_unfinished_head_gets_408(data: bytes) -> None:
    pipe = pipe_at(data)
    for second in range(1, 10):
        pipe.scan(float(second))
    assert pipe.sent == b""
    pipe.scan(10.0)
    (reply,) = pipe.replies()
    assert (reply.status, reply.closes) == (408, True)
    assert b"limits.header_timeout_s" in reply.body
    assert pipe.listener.refusals == {"header_timeout_s": 1}


def test_dripping_a_head_does_not_win_time() -> None:
    pipe = pipe_at(b"G")
    for second in range(1, 11):
        pipe.feed(GET[second : second + 1])
        pipe.scan(float(second))
    assert [r.status for r in pipe.replies()] == [408]


def test_a_head_after_a_long_idle_time_has_its_full_time() -> None:
    pipe = pipe_at(b"")
    pipe.scan(70.0)
    pipe.feed(GET[:5])
    pipe.scan(76.0)
    pipe.scan(80.0)
    pipe.feed(GET[5:])
    assert [r.status for r in pipe.replies()] == [200]


@pytest.mark.parametrize("data", [POST, CHUNKED, CHUNKED + b"ff\r\n"])
def test_a_body_below_the_least_rate_gets_408(data: bytes) -> None:
    pipe = pipe_at(data)
    for second in range(1, 10):
        pipe.scan(float(second))
        pipe.feed(b"1" if data is not CHUNKED else b"1\r\na\r\n")
    assert pipe.sent == b""
    pipe.scan(10.0)
    (reply,) = pipe.replies()
    assert (reply.status, reply.closes) == (408, True)
    assert b"limits.body_bytes_per_s" in reply.body


def test_a_body_at_the_least_rate_passes() -> None:
    pipe = pipe_at(POST)
    for second in range(1, 51):
        pipe.feed(b"a" * 100)
        pipe.scan(float(second))
    assert [r.status for r in pipe.replies()] == [200]


def test_a_fast_beginning_does_not_pay_for_a_slow_end() -> None:
    pipe = pipe_at(POST)
    pipe.feed(b"a" * 4990)
    pipe.scan(10.0)
    assert pipe.sent == b""
    pipe.scan(20.0)
    assert [r.status for r in pipe.replies()] == [408]


def test_waiting_for_the_model_has_no_time_limit_here() -> None:
    held = Held()
    pipe = Pipe({"/echo": held}, QUICK)
    pipe.feed(GET)
    for second in range(0, 1000, 10):
        pipe.scan(float(second))
    assert not pipe.closed
    held.calls[0].reply(200)
    assert [r.status for r in pipe.replies()] == [200]


def test_a_client_that_does_not_read_is_cut_off() -> None:
    held = Held()
    pipe = Pipe({"/echo": echo, "/held": held}, QUICK)
    pipe.feed(GET + GET.replace(b"/echo", b"/held"))
    pipe.unsent_bytes = 1000
    pipe.scan(1.0)
    pipe.scan(20.0)
    pipe.unsent_bytes = 900  # it did read a little
    pipe.scan(40.0)
    pipe.scan(69.9)
    assert not pipe.closed
    pipe.scan(70.0)
    assert pipe.closed
    assert held.left == held.calls
    assert pipe.listener.refusals == {"write_stall_s": 1}


def test_a_client_that_never_hangs_up_is_closed_after_lingering() -> None:
    pipe = pipe_at(b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert pipe.ended
    pipe.unsent_bytes = 10  # the reply itself is still on its way
    pipe.scan(0.9)
    pipe.scan(2.0)
    pipe.unsent_bytes = 0
    pipe.scan(2.5)
    assert not pipe.closed
    pipe.scan(3.5)
    assert pipe.closed


def test_refused_input_is_dropped_while_lingering() -> None:
    pipe = pipe_at(b"nonsense\n")
    sent = pipe.sent
    pipe.feed(GET * 100)
    assert pipe.sent == sent
    assert not pipe.connection._buffer
    pipe.scan(1.0)
    assert pipe.closed


def test_a_thousand_connections_are_scanned_in_one_go() -> None:
    pipe = Pipe({"/echo": echo}, QUICK)
    pipe.feed(GET)
    others = []
    for _ in range(999):
        other = Pipe({})
        other.listener = pipe.listener
        other.connection = other.protocol = type(pipe.connection)(pipe.listener)
        other.connection.connection_made(other)
        others.append(other)
    pipe.scan(0.0)
    pipe.scan(75.0)
    assert all(other.closed for other in others)
    assert not pipe.listener.connections


def test_many_connections_are_looked_at_in_parts() -> None:
    """Of 5000 connections no turn of the loop looks at all, and each is looked at again and again."""

    class Quiet:
        looks = 0

        def look(self, now: float) -> Verdict:
            self.looks += 1
            return Verdict.FINE

        def abort(self) -> None:
            connections.discard(self)

    async def main() -> None:
        async with serving({"/echo": echo}, limits(header_timeout_s=0.2)) as listener:
            connections.update(Quiet() for _ in range(5000))
            listener.connections = connections
            every = list(connections)
            gone = every[0]
            most = seen = 0
            while min(one.looks for one in every[1:]) < 2:
                now = sum(one.looks for one in every)
                most, seen = max(most, now - seen), now
                if now:
                    connections.discard(gone)
                await asyncio.sleep(0)
            assert 0 < most <= 1000
            assert gone.looks <= 1

    connections: set[Any] = set()
    asyncio.run(asyncio.wait_for(main(), WAIT_S))
