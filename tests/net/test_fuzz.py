"""Noise, and good requests cut, joined and damaged: no 2xx, no crash, the same answer for every split."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.net.kit import Pipe, client, echo, read_replies, run, serving
from tests.net.test_refusals import SMALL

PIECES = [
    *(
        b"GET ",
        b"POST ",
        b"/echo",
        b" HTTP/1.1",
        b" HTTP/1.0",
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b" ",
        b"\t",
    ),
    *(
        b"Host: a\r\n",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n",
        b"0",
        b"1",
        b"5\r\n",
        b"a",
        b":",
    ),
    *(
        b"0\r\n\r\n",
        b"hello",
        b"\0",
        b"\xff",
        b",",
        b";",
        b"Connection: close\r\n",
        b"Expect: 100-continue\r\n",
    ),
]
GOOD = (
    b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x\r\nhel\r\n2\r\nlo\r\n0\r\nT: 1\r\n\r\n",
)
soup = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


def answers(data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    """Statuses and bodies of what a connection answers when input comes in these pieces."""
    pipe = Pipe({"/echo": echo}, SMALL)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, end in pairwise(ends):
        pipe.feed(data[start:end])
    found = [(r.status, r.body) for r in read_replies(pipe.sent)]
    assert len(pipe.connection._buffer) <= len(data)
    assert pipe.connection._current is None
    return [answer for answer in found if answer[0] != 100]


@given(st.binary(max_size=300))
def test_noise_is_never_served(data: bytes) -> None:
    assume(not data.startswith(b"PRI * HTTP/2.0"))  # which is spoken here too
    assert all(status >= 400 for status, _ in answers(data, []))


@given(soup, st.lists(st.integers(0, 300), max_size=20))
def test_soup_is_read_alike_in_every_split(data: bytes, cuts: list[int]) -> None:
    whole = answers(data, [])
    bytewise = answers(data, list(range(len(data))))
    pieces = answers(data, cuts)
    good = [answer for answer in whole if answer[0] == 200]
    for other in (bytewise, pieces):
        assert [answer for answer in other if answer[0] == 200] == good
        assert len(other) == len(whole)


@given(st.lists(st.sampled_from(GOOD), min_size=1, max_size=6), st.lists(st.integers(0, 500), max_size=20))
def test_good_requests_are_all_served_in_every_split(requests: list[bytes], cuts: list[int]) -> None:
    assert [status for status, _ in answers(b"".join(requests), cuts)] == [200] * len(requests)


@given(
    st.sampled_from(GOOD), st.integers(0, 200), st.integers(0, 255), st.lists(st.integers(0, 200), max_size=5)
)
def test_one_damaged_byte(request: bytes, place: int, value: int, cuts: list[int]) -> None:
    place %= len(request)
    damaged = request[:place] + bytes([value]) + request[place + 1 :]
    assert answers(damaged + GOOD[0], []) == answers(damaged + GOOD[0], cuts) or _is_early(damaged)
    assert all(status in {200, 400, 404, 413, 414, 417, 431, 501} for status, _ in answers(damaged, []))


def _is_early(damaged: bytes) -> bool:
    """A fault may be seen before the head is whole, and then be named by another rule."""
    whole = answers(damaged + GOOD[0], [])
    bytewise = answers(damaged + GOOD[0], list(range(300)))
    return [s for s, _ in whole if s == 200] == [s for s, _ in bytewise if s == 200]


def test_the_server_lives_through_noise_over_sockets() -> None:
    noise = random.Random(7)

    async def main() -> None:
        async with serving({"/echo": echo}, SMALL) as listener:
            for i in range(300):
                async with client(listener) as peer:
                    data = noise.randbytes(noise.randrange(1, 400))
                    if i % 3 == 0:
                        data = b"".join(noise.choices(PIECES, k=20))
                    peer.send(data)
                    peer.writer.write_eof()
                    for reply in read_replies(await peer.rest()):
                        assert reply.status >= 400 or i % 3 == 0
            async with client(listener) as peer:
                peer.send(GOOD[1])
                assert (await peer.reply()).status == 200
            while len(listener.connections) > 1:
                await asyncio.sleep(0)

    run(main())


def test_fuzzed_errors_name_no_place_of_the_server() -> None:
    noise = random.Random(8)
    told: set[bytes] = set()
    for _ in range(5_000):
        pipe = Pipe({"/echo": echo}, SMALL)
        pipe.feed(noise.choice(GOOD)[: noise.randrange(100)] + b"".join(noise.choices(PIECES, k=15)))
        told.update(r.body for r in read_replies(pipe.sent) if r.status >= 400)
    assert len(told) > 10
    for body in told:
        for word in (b"/root", b"/home", b".py", b"Traceback", b"0x", b"object at", b"Error("):
            assert word not in body
