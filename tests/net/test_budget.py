"""The memory budget over HTTP/1.1, HTTP/2 and gRPC: bodies wait unread, one at a time goes on, who has waited
in vain is refused in its dialect's words, and everything held is given back. Time is a number."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from fastserve.errors import ServeError
from fastserve.net import Call, HttpListener
from fastserve.net.compression import inflate, inflate_offloaded
from fastserve.net.http2.connection import QUANTUM_BYTES
from fastserve.net.request import RequestHead
from fastserve.util.memory_budget import ALLOWANCE_BYTES, PATIENCE_S, MemoryBudget
from fastserve.util.offload import Offload
from tests.net.grpc import peer as grpc_peer
from tests.net.http2.kit import POST, Peer, Raw
from tests.net.kit import Held, Pipe, client, echo, limits, run, serving, until

KB, MB = 1 << 10, 1 << 20
SMALL = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"


def post(size: int, *more: bytes) -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Host: a", b"Content-Length: %d" % size, *more]
    return b"\r\n".join([*lines, b"", b""])


def beside(pipe: Pipe) -> Pipe:
    """Another connection of the same listener."""
    other = Pipe({})
    other.connection.connection_lost(None)
    other.listener, other.clock = pipe.listener, pipe.clock
    other.connection = type(pipe.connection)(pipe.listener)
    other.protocol = other.connection
    other.connection.connection_made(other)
    return other


def account(pipe: Pipe) -> MemoryBudget:
    return pipe.listener.budget


def test_small_requests_have_no_claim() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(SMALL * 3)
    assert account(pipe).used == account(pipe).peak == ALLOWANCE_BYTES
    pipe.close()
    assert account(pipe).used == 0


def test_a_body_is_on_the_account_as_it_comes() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(post(400 * KB))
    assert account(pipe).used == ALLOWANCE_BYTES
    pipe.feed(bytes(100 * KB))
    assert account(pipe).used == 100 * KB
    pipe.feed(bytes(200 * KB), 10_000)
    assert account(pipe).used == 300 * KB
    pipe.feed(bytes(100 * KB))
    assert account(pipe).used == ALLOWANCE_BYTES
    assert [reply.status for reply in pipe.replies()] == [200]


def test_a_chunked_body_is_on_the_account_as_it_comes() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n20000\r\n")
    pipe.feed(bytes(0x10000))
    assert account(pipe).used == 0x10000
    pipe.feed(bytes(0x10000) + b"\r\n0\r\n\r\n")
    assert account(pipe).used == ALLOWANCE_BYTES
    assert [reply.status for reply in pipe.replies()] == [200]


@pytest.mark.parametrize("ends", ["answered", "gone"])
def test_a_body_is_held_until_its_answer(ends: str) -> None:
    held = Held()
    pipe = Pipe({"/echo": held})
    pipe.feed(post(100 * KB) + bytes(100 * KB))
    assert account(pipe).used == 100 * KB
    if ends == "gone":
        pipe.close()
        assert account(pipe).used == 0
    else:
        held.calls[0].reply(200)
        assert account(pipe).used == ALLOWANCE_BYTES


def test_replies_that_wait_for_their_turn_are_held() -> None:
    held = Held()
    pipe = Pipe({"/echo": held})
    pipe.feed(SMALL * 2)
    held.calls[1].reply(200, bytes(MB))
    assert account(pipe).used > MB
    held.calls[0].reply(200)
    assert account(pipe).used == ALLOWANCE_BYTES


def test_replies_that_are_not_read_are_held() -> None:
    pipe = Pipe({"/echo": echo})
    pipe.unsent_bytes = 5 * MB
    pipe.connection.pause_writing()
    assert account(pipe).used == 5 * MB
    pipe.unsent_bytes = 3 * MB
    pipe.scan(1.0)
    assert account(pipe).used == 3 * MB
    pipe.unsent_bytes = 0
    pipe.connection.resume_writing()
    assert account(pipe).used == ALLOWANCE_BYTES


def filled(endpoint: Any = echo, room: int = MB) -> Pipe:
    """A connection whose budget is used up by a reply that its client does not read."""
    pipe = Pipe({"/echo": endpoint}, limits(memory_bytes=room, body_bytes=room))
    hog = beside(pipe)
    hog.feed(SMALL)
    hog.unsent_bytes = room - room // 8
    hog.connection.pause_writing()
    pipe.hog = hog  # type: ignore[attr-defined]
    return pipe


def test_bodies_wait_unread_and_go_on_in_their_order() -> None:
    first = filled()
    others = [beside(first) for _ in range(3)]
    for pipe in (first, *others):
        pipe.feed(post(100 * KB) + bytes(30 * KB))
    assert [pipe.reading for pipe in (first, *others)] == [True, False, False, False]
    first.feed(bytes(70 * KB))  # done: the next one is the one that goes on
    assert [pipe.reading for pipe in others] == [True, False, False]
    others[0].feed(bytes(70 * KB))
    others[1].feed(bytes(70 * KB))
    assert not any(pipe.closed for pipe in others)
    hog: Pipe = first.hog  # type: ignore[attr-defined]
    hog.close()
    others[2].feed(bytes(70 * KB))
    assert [reply.status for pipe in (first, *others) for reply in pipe.replies()] == [200] * 4
    assert account(first).waiting == 0


def test_a_body_that_has_waited_in_vain_is_refused_by_its_dialect() -> None:
    pipe = filled()
    other = beside(pipe)
    pipe.feed(post(100 * KB) + bytes(30 * KB))
    other.feed(post(100 * KB) + bytes(30 * KB))
    pipe.scan(1.0)
    for at in (PATIENCE_S / 2, PATIENCE_S):
        assert not other.sent
        pipe.feed(bytes(10 * KB))
        pipe.scan(at)
    (reply,) = other.replies()
    assert reply.status == 503
    assert reply.headers["content-type"] == "text/plain"  # the words of `Paths`
    assert b"limits.memory_bytes" in reply.body
    assert reply.closes
    assert pipe.listener.refusals["memory_bytes"] == 1
    other.feed(bytes(70 * KB))  # read off, and kept nowhere
    assert other.connection._claim is None


def test_the_pause_is_not_blamed_on_the_client() -> None:
    pipe = filled()
    other = beside(pipe)
    pipe.listener.budget.patience_s = 1e9
    other.feed(post(100 * KB) + bytes(30 * KB))
    pipe.feed(post(100 * KB) + bytes(30 * KB))
    assert not pipe.reading
    for second in range(60):
        pipe.connection.look(float(second))
    assert not pipe.sent
    assert not pipe.closed


@pytest.mark.parametrize("waits", [True, False])
def test_slow_clients_have_less_time_while_others_wait(waits: bool) -> None:
    """One that reads nothing, and one that sends 10 KB in 5 s."""
    pipe = Pipe({"/echo": echo}, limits(memory_bytes=MB))
    account(pipe).charge(900 * KB if waits else 0)
    slow, stalled = beside(pipe), beside(pipe)
    stalled.feed(SMALL)
    stalled.unsent_bytes = 30 * KB
    stalled.connection.pause_writing()
    slow.feed(post(100 * KB) + bytes(30 * KB))
    pipe.scan(0.5)
    slow.feed(bytes(10 * KB))
    pipe.scan(0.5 + PATIENCE_S)
    assert stalled.closed == waits
    assert [reply.status for reply in slow.replies()] == ([408] if waits else [])


def test_small_requests_are_answered_whatever_waits() -> None:
    pipe = filled()
    for _ in range(3):
        beside(pipe).feed(post(100 * KB) + bytes(30 * KB))
    pipe.feed(SMALL)
    assert [reply.status for reply in pipe.replies()] == [200]


def test_a_whole_body_is_refused_when_nothing_is_left() -> None:
    pipe = filled()
    account(pipe).charge(MB)
    first, second = beside(pipe), beside(pipe)
    first.feed(post(1000 * KB) + bytes(50 * KB))  # the one that goes on
    second.feed(post(50 * KB) + bytes(50 * KB))
    assert [reply.status for reply in second.replies()] == [503]
    second.feed(SMALL)
    assert [reply.status for reply in second.replies()] == [503, 200]


def test_coroutines_wait_for_the_memory_of_their_work() -> None:
    """Reading a body of 100 KB takes twice as much again."""

    async def main() -> None:
        seen = []

        async def work(call: Call) -> None:
            seen.append(call._connection.listener.budget.used)
            call.reply(200)

        budget = MemoryBudget(MB)
        async with serving({"/echo": work}, budget=budget) as listener, client(listener) as peer:
            peer.send(post(100 * KB) + bytes(100 * KB))
            assert (await peer.reply()).status == 200
            assert seen == [300 * KB]
            assert budget.used == ALLOWANCE_BYTES
            budget.charge(900 * KB)
            async with client(listener) as other:
                other.send(post(100 * KB) + bytes(100 * KB))
                assert (await other.reply()).status == 200  # alone: nobody works beside it
        assert budget.used == 900 * KB

    run(main())


def test_a_coroutine_that_waits_in_vain_is_refused() -> None:
    async def main() -> None:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work(call: Call) -> None:
            await gate
            call.reply(200)

        budget = MemoryBudget(MB, patience_s=0.0)
        async with (
            serving({"/echo": work}, budget=budget) as listener,
            client(listener) as first,
            client(listener) as second,
        ):
            first.send(post(400 * KB) + bytes(400 * KB))
            await until(lambda: budget.workers)
            second.send(post(100 * KB) + bytes(100 * KB))
            await until(lambda: budget.waiting or listener.refusals)
            listener.scan()
            reply = await second.reply()
            assert (reply.status, reply.closes) == (503, False)
            gate.set_result(None)
            assert (await first.reply()).status == 200
            second.send(post(100 * KB) + bytes(100 * KB))
            assert (await second.reply()).status == 200

    run(main())


def test_inflated_bytes_are_charged_before_they_exist() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener:
            call = Call(_Connection(listener), RequestHead(b""), b"")
            within = limits(inflated_bytes=10 * MB)
            body = gzip.compress(bytes(3 * MB)) + gzip.compress(b"") * 700
            during = []

            def work() -> bytes:
                during.append(listener.budget.used)
                return inflate(body, within)

            inflated = await inflate_offloaded(call.claim, Offload(), len(body), within, work)
            assert len(inflated) == 3 * MB
            assert during == [3 * 200 * len(body)]
            assert listener.budget.used == 3 * len(inflated)
            call.claim.release()
            assert listener.budget.used == 0

    run(main())


class _Connection:
    def __init__(self, listener: HttpListener) -> None:
        self.listener = listener


def test_what_cannot_be_inflated_holds_nothing() -> None:
    async def main() -> None:
        async with serving({"/echo": echo}) as listener:
            call = Call(_Connection(listener), RequestHead(b""), b"")
            with pytest.raises(ServeError):
                await inflate_offloaded(call.claim, Offload(), 4, limits(), inflate, b"none", limits())
            assert listener.budget.used == 0

    run(main())


def test_a_task_that_is_cancelled_leaves_no_circle() -> None:
    """Bodies of clients that had left were kept until a search for garbage: 6 MB each."""
    import gc
    import weakref

    class Echoes:
        """Something that the task has, as it has the body."""

    async def main() -> None:
        left: list[weakref.ref[Echoes]] = []

        async def work(call: Call) -> None:
            body = Echoes()
            left.append(weakref.ref(body))
            await asyncio.get_running_loop().create_future()

        async with serving({"/echo": work}) as listener:
            gc.disable()
            try:
                async with client(listener) as peer:
                    peer.send(SMALL)
                    await until(lambda: left)
                await until(lambda: not listener.connections)
                await until(lambda: left[0]() is None)
            finally:
                gc.enable()

    run(main())


# ---- HTTP/2


def test_streams_share_what_their_connection_has() -> None:
    held = Held()
    peer = Peer({"/echo": held})
    for _ in range(10):
        peer.send(POST, bytes(10 * KB))
        peer.flush()
    budget = account(peer.pipe)
    assert budget.used - ALLOWANCE_BYTES >= 84 * KB
    for call in held.calls:
        call.reply(200)
    assert budget.used == ALLOWANCE_BYTES
    peer.pipe.close()
    assert budget.used == 0


@pytest.mark.parametrize("used", [0, 400 * KB])
def test_a_connection_keeps_a_quantum_between_requests_while_there_is_much_room(used: int) -> None:
    """With 1 MB, of which 768 KB may be used without waiting: kept below 384 KB, given back above."""
    held = Held()
    peer = Peer({"/echo": held})
    budget = account(peer.pipe)
    budget.limit, budget.room = MB, MB * 3 // 4
    for turn in range(3):
        budget.charge(used)
        peer.send(POST, bytes(30 * KB))
        peer.flush()
        charged = budget.used
        assert charged == used + ALLOWANCE_BYTES + QUANTUM_BYTES
        held.calls[turn].reply(200)
        assert budget.used == (used + ALLOWANCE_BYTES if used else charged)
        budget.charge(-used)
    peer.pipe.scan(1.0)
    assert budget.used == ALLOWANCE_BYTES


def test_a_stream_that_is_reset_holds_nothing() -> None:
    peer = Peer({"/echo": echo})
    peer.flush()
    number = peer.send(POST, bytes(200 * KB), end=False)
    peer.flush()
    assert account(peer.pipe).used >= 200 * KB
    peer.h2.reset_stream(number)
    peer.flush()
    assert account(peer.pipe).used == ALLOWANCE_BYTES


def test_replies_without_a_window_are_held() -> None:
    held = Held()
    peer = Peer({"/echo": held})
    peer.send(POST, b"hi")
    peer.flush()
    held.calls[0].reply(200, bytes(2 * MB))
    assert account(peer.pipe).used > MB
    peer.hear()
    while peer.h2.outbound_flow_control_window and not peer.answers[1].ended:
        peer.h2.increment_flow_control_window(MB)
        peer.flush()
    assert account(peer.pipe).used == ALLOWANCE_BYTES


def test_a_connection_of_http2_waits_unread_and_is_refused() -> None:
    budget = MemoryBudget(MB)
    budget.charge(MB - 300 * KB)
    first, second = (Peer({"/echo": echo}, budget=budget) for _ in range(2))
    for peer in (first, second):
        number = peer.h2.get_next_available_stream_id()
        peer.h2.send_headers(number, POST)
        peer.flush()
        peer.h2.send_data(number, bytes(16 * KB))
        peer.h2.send_data(number, bytes(16 * KB))
        data = peer.h2.data_to_send()
        peer.pipe.arrive(data)
    assert (first.pipe.reading, second.pipe.reading) == (True, False)
    second.connection.look(100.0)
    second.connection.look(200.0)  # the client is not blamed
    budget.patience_s = 0.0
    second.pipe.scan(0.0)
    second.hear()
    assert second.answers[1].status == 503
    assert b"limits.memory_bytes" in second.answers[1].body
    assert second.pipe.reading
    assert second.ask(POST, b"hi").status == 200  # the connection goes on


def test_bodies_that_no_memory_is_left_for_are_refused_at_once() -> None:
    budget = MemoryBudget(MB)
    first, second = Raw({"/echo": echo}, budget=budget).greet(), Peer({"/echo": echo}, budget=budget)
    second.flush()
    budget.charge(2 * MB)
    assert budget.exhausted
    first.feed(first.headers(1, POST, "END_HEADERS") + first.data(1, bytes(16384)) * 1)
    first.feed(first.data(1, bytes(16384)))
    number = second.send(POST, bytes(100 * KB), end=False)
    second.pipe.arrive(second.h2.data_to_send())
    second.hear()
    assert second.answers[number].status == 503


# ---- gRPC


def test_messages_of_grpc_are_held_and_given_back() -> None:
    async def main() -> None:
        async with grpc_peer.serving() as (listener, peer):
            budget: MemoryBudget = listener._transport.listener.budget  # type: ignore[union-attr]
            packed = grpc_peer.frame(gzip.compress(bytes(MB)), 1)
            answer = await peer.ask("/t.T/Echo", packed, ("grpc-encoding", "gzip"))
            assert answer.messages == [bytes(MB)]
            assert budget.peak > 3 * MB  # also what reading takes
            number = peer.begin("/t.T/Double", ("grpc-encoding", "gzip"))
            for _ in range(3):
                peer.send(number, packed)
            peer.send(number, grpc_peer.frame(b"end"), ends=True)
            answer = await peer.finish(number)
            assert [len(one) for one in answer.messages] == [2 * MB] * 3 + [6]
            await until(lambda: budget.used == ALLOWANCE_BYTES)
            assert budget.workers == 0

    run(main())


def test_a_message_that_waits_in_vain_is_refused_with_the_time_to_wait() -> None:
    async def main() -> None:
        async with grpc_peer.serving() as (listener, peer):
            http: HttpListener = listener._transport.listener  # type: ignore[union-attr]
            budget = http.budget
            budget.limit = budget.room = 1
            budget.patience_s = 0.0
            budget.workers += 1  # somebody works
            async with grpc_peer.looked_at_often(listener):
                answer = await peer.ask(
                    "/t.T/Echo", grpc_peer.frame(gzip.compress(bytes(MB)), 1), ("grpc-encoding", "gzip")
                )
            assert answer.status[0] == 14
            assert "limits.memory_bytes" in answer.status[1]
            assert "grpc-retry-pushback-ms" in answer.headers[-1]
            assert "grpc-status-details-bin" in answer.headers[-1]
            budget.workers -= 1
            answer = await peer.ask("/t.T/Echo", grpc_peer.frame(b"small"))
            assert answer.messages == [b"small"]

    run(main())
