"""Large bodies are read straight into their place, whatever the pieces and whatever comes behind them."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from fastserve.net.http1.large_bodies import BULK_BYTES, CLAIMED_BYTES, ShortReads
from tests.net.kit import Pipe

BODY = bytes(i % 251 for i in range(4 * BULK_BYTES))
HEAD = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


def summarise(call):
    call.reply(200, b"%d %d" % (len(call.body), bytes(call.body) == BODY))


@pytest.mark.parametrize("size", [1000, 4096, BULK_BYTES, BULK_BYTES + 1, 3 * BULK_BYTES, 1 << 20])
def test_the_body_is_whole_for_every_size_of_read(size):
    pipe = Pipe({"/echo": summarise})
    pipe.feed(HEAD % len(BODY) + BODY, size)
    assert [reply.body for reply in pipe.replies()] == [b"%d 1" % len(BODY)]


def test_the_next_request_is_read_as_usual():
    pipe = Pipe({"/echo": summarise})
    pipe.feed((HEAD % len(BODY) + BODY) * 2 + HEAD % 2 + b"xy", 10_000)
    assert [reply.body for reply in pipe.replies()] == [b"%d 1" % len(BODY)] * 2 + [b"2 0"]


def test_the_socket_is_handed_over_only_for_large_bodies():
    pipe = Pipe({"/echo": summarise})
    pipe.feed(HEAD % (BULK_BYTES - 1) + b"x")
    assert pipe.protocol is pipe.connection
    pipe = Pipe({"/echo": summarise})
    pipe.feed(HEAD % (BULK_BYTES + 2) + b"x")
    assert isinstance(pipe.protocol, asyncio.BufferedProtocol)
    pipe.feed(bytes(BULK_BYTES + 1))
    assert pipe.protocol is not pipe.connection
    pipe.feed(HEAD % 2)
    assert pipe.protocol is pipe.connection
    pipe.feed(b"xy")
    assert [reply.body for reply in pipe.replies()][1:] == [b"2 0"]


@pytest.mark.parametrize("size", [5000, 100_000])
def test_large_bodies_one_after_another_are_read_by_bites_of_their_heads(size):
    pipe = Pipe({"/echo": summarise})
    for count in range(1, 4):
        pipe.feed(HEAD % len(BODY) + BODY, size)
        assert isinstance(pipe.protocol, ShortReads)
        assert [reply.body for reply in pipe.replies()] == [b"%d 1" % len(BODY)] * count
    pipe.protocol.connection_lost(None)
    assert not pipe.listener.connections


def test_a_claimed_length_alone_takes_no_memory():
    """More than CLAIMED_BYTES is taken as the bytes come, and no more than as much again."""
    pipe = Pipe({"/echo": lambda call: call.reply(200, b"%d" % len(call.body))})
    total = 3 * CLAIMED_BYTES + 10
    tracemalloc.start()
    try:
        pipe.feed(HEAD % total + b"x")
        claimed = tracemalloc.get_traced_memory()[0]
        pipe.feed(bytes(CLAIMED_BYTES))
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert claimed < 1.1 * CLAIMED_BYTES
    assert grown < 2.2 * CLAIMED_BYTES + CLAIMED_BYTES  # with what was fed
    pipe.feed(bytes(total - 1 - CLAIMED_BYTES))
    assert [reply.body for reply in pipe.replies()] == [b"%d" % total]


def test_a_body_that_grows_is_whole():
    body = BODY * (2 * CLAIMED_BYTES // len(BODY) + 1)
    pipe = Pipe({"/echo": lambda call: call.reply(200, b"%d" % (bytes(call.body) == body))})
    pipe.feed(HEAD % len(body) + body, 1 << 20)
    assert [reply.body for reply in pipe.replies()] == [b"1"]


def test_a_client_that_leaves_in_the_middle_starts_nothing():
    calls = []
    pipe = Pipe({"/echo": calls.append})
    pipe.feed(HEAD % len(BODY) + BODY[:-1], 5000)
    pipe.protocol.connection_lost(None)
    assert calls == []
    assert not pipe.listener.connections
