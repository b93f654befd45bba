"""Connections of shared ports: spread evenly over fronts, and never lost with one of them.

All fronts of a test live in its loop, each with its own descriptors, as processes have them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.net import HttpListener
from fastserve.net import accept_balance as balance
from fastserve.net.accept_balance import AcceptBalancer, AcceptState
from fastserve.settings import Limits
from tests import certificates
from tests.effort import examples
from tests.net import kit
from tests.net.tls import kit as tls_kit

ASK = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
BOUND_S = 30.0  # far below any time-out of a client, far above STALL_S


class Fronts:
    """Fronts that listen at one place or more."""

    def __init__(self, balancers: list[AcceptBalancer], listeners: list[list[HttpListener]]) -> None:
        self.balancers, self.listeners = balancers, listeners

    def open_counts(self, port: int = 0) -> list[int]:
        """The connections that each front really has."""
        return [len(listeners[port].connections) for listeners in self.listeners]

    async def connect(self, port: int = 0, context: ssl.SSLContext | None = None) -> kit.Client:
        address, number = self.listeners[0][port].address
        if address.startswith("unix:"):
            return kit.Client(*await asyncio.open_unix_connection(address.removeprefix("unix:")))
        name = "127.0.0.1" if context else None
        return kit.Client(*await asyncio.open_connection(address, number, ssl=context, server_hostname=name))

    async def ask(self, port: int = 0, context: ssl.SSLContext | None = None) -> kit.Client:
        """A connection that was answered."""
        client = await self.connect(port, context)
        await self.answered(client)
        return client

    async def answered(self, client: kit.Client) -> None:
        client.send(ASK)
        assert (await asyncio.wait_for(client.reply(), BOUND_S)).status == 200


@contextlib.asynccontextmanager
async def fronts(
    count: int, *places: str, running: int | None = None, **options: Any
) -> AsyncIterator[Fronts]:
    """`count` fronts, of which the first `running` run. The others count as stopped: the table has them as
    accepting, and they look at nothing."""
    owner = AcceptBalancer.create(count)
    balancers, listeners = [owner], list[list[HttpListener]]()
    numbers = range(1, running or count)
    balancers += [AcceptBalancer(i, count, [os.dup(fd) for fd in owner.fds()]) for i in numbers]
    for balancer in balancers:
        if balancer is not owner:
            balancer.inherit({place: os.dup(fd) for place, fd in owner.places().items()})
        own = list[HttpListener]()
        addresses = [one.address for one in listeners[0]] if listeners else [(p, 0) for p in places]
        for address in addresses or [("127.0.0.1", 0)]:
            dialects = [kit.Paths({"/x": kit.echo})]
            own.append(HttpListener(*address, dialects, Limits(), balancer=balancer, **options))
            await own[-1].open()
        listeners.append(own)
        balancer.open()
    for front in range(running or count, count):
        owner.table.set_state(front, AcceptState.ACCEPTING)
    try:
        yield Fronts(balancers, listeners)
    finally:
        for own in listeners:
            for listener in own:
                await listener.close()
        for balancer in balancers[::-1]:
            balancer.close()


PLACES = {"tcp": "127.0.0.1", "ipv6": "::1", "file": "unix:{folder}/s", "tls": "127.0.0.1"}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_connections_opened_one_by_one_differ_by_one_at_most(kind: str, count: int, tmp_path: Path) -> None:
    async def scene() -> None:
        options: dict[str, Any] = {"tls": tls_kit.credentials()} if kind == "tls" else {}
        context = certificates.trusting() if kind == "tls" else None
        async with fronts(count, PLACES[kind].format(folder=tmp_path), **options) as served:
            clients = []
            for _ in range(2 * count + 1):
                clients.append(await served.ask(context=context))
                counts = served.open_counts()
                assert sum(counts) == len(clients)
                assert max(counts) - min(counts) <= 1, counts
                assert served.balancers[0].table.counts(0) == counts
            for client in clients:
                client.close()

    kit.run(scene())


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=40), st.integers(2, 5))
@examples(50)
def test_each_goes_to_a_front_that_has_fewest(steps: list[int | None], count: int) -> None:
    """A step opens a connection, or closes one of those that are open."""

    async def scene() -> None:
        async with fronts(count) as served:
            clients: list[kit.Client] = []
            for step in steps:
                before = served.open_counts()
                if step is None or not clients:
                    clients.append(await served.ask())
                    (front,) = [i for i, n in enumerate(served.open_counts()) if n > before[i]]
                    assert before[front] == min(before)
                else:
                    clients.pop(step % len(clients)).close()
                    await kit.until(lambda: sum(served.open_counts()) == len(clients))
                assert served.balancers[0].table.counts(0) == served.open_counts()
            for client in clients:
                client.close()

    kit.run(scene())


def test_connections_on_their_way_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front accepts many in one turn, before any other has seen its own."""
    monkeypatch.setattr(balance, "ACCEPTS_A_TURN", 1000)

    async def scene() -> None:
        async with fronts(4) as served:
            links = [socket.create_connection(served.listeners[0][0].address) for _ in range(64)]
            await kit.until(lambda: sum(served.open_counts()) == 64)
            assert served.open_counts() == [16] * 4
            for link in links:
                link.close()

    kit.run(scene())


def test_a_front_that_two_have_chosen_at_once_passes_one_on() -> None:
    async def scene() -> None:
        async with fronts(3) as served:
            clients = list[kit.Client]()
            for _ in range(3):  # all of them for the last one
                ours, theirs = socket.socketpair()
                theirs.setblocking(False)
                assert served.balancers[0]._inboxes[2].send(0, theirs)
                theirs.close()
                clients.append(kit.Client(*await asyncio.open_connection(sock=ours)))
            await asyncio.gather(*map(served.answered, clients))
            assert served.open_counts() == [1, 1, 1]
            for client in clients:
                client.close()

    kit.run(scene())


def test_ports_are_even_each_for_itself_and_then_together() -> None:
    async def scene() -> None:
        async with fronts(3, "127.0.0.1", "127.0.0.1") as served:
            first = [await served.ask(0) for _ in range(4)]
            second = [await served.ask(1) for _ in range(2)]
            assert sorted(served.open_counts(0)) == [1, 1, 2]
            assert sorted(served.open_counts(1)) == [0, 1, 1]
            assert served.balancers[0].table.totals() == [2, 2, 2]
            for client in first + second:
                client.close()

    kit.run(scene())


def test_a_front_that_is_stopped_costs_nobody_an_answer() -> None:
    async def scene() -> None:
        async with fronts(3, running=2) as served:
            table, inbox = served.balancers[0].table, served.balancers[0]._inboxes[2]
            clients = await asyncio.gather(*(served.connect() for _ in range(9)))
            await asyncio.gather(*map(served.answered, clients))
            assert table.states()[2] == AcceptState.STALLED
            assert sorted(served.open_counts()) == [4, 5]
            for _ in range(4):
                clients.append(await served.ask())
                assert inbox.waiting() == 0
            table.set_state(2, AcceptState.ACCEPTING)  # it runs again
            late = await served.connect()
            await kit.until(lambda: inbox.waiting() == 1)
            for client in (*clients, late):
                client.close()

    kit.run(scene())


def test_what_a_dead_front_had_not_taken_goes_to_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "STALL_S", 3600.0)
    monkeypatch.setattr(balance, "BEAT_S", 3600.0)

    async def scene() -> None:
        async with fronts(3, running=2) as served:
            clients = [await served.connect() for _ in range(6)]
            await kit.until(lambda: served.balancers[0]._inboxes[2].waiting() == 2)
            served.balancers[0].bury(2)
            await asyncio.gather(*map(served.answered, clients))
            assert served.open_counts() == [3, 3]
            for client in clients:
                client.close()

    kit.run(scene())


def test_what_a_front_gave_before_it_died_is_found_by_another() -> None:
    async def scene() -> None:
        async with fronts(2, running=1) as served:
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            assert served.balancers[0]._inboxes[1].send(0, theirs)
            theirs.close()
            client = kit.Client(*await asyncio.open_connection(sock=ours))
            await served.answered(client)
            client.close()

    kit.run(scene())


def test_a_full_inbox_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "STALL_S", 3600.0)
    monkeypatch.setattr(balance, "BEAT_S", 3600.0)

    async def scene() -> None:
        async with fronts(2, running=1) as served:
            inbox = served.balancers[0]._inboxes[1]
            with socket.socket() as any_socket:
                while inbox.send(0, any_socket):
                    pass
            served.balancers[0]._take[0] = lambda accepted: taken.append(accepted)
            taken: list[socket.socket] = []
            links = [socket.create_connection(served.listeners[0][0].address)]
            table = served.balancers[0].table
            table.set_count(0, 0, 10_000)  # so that the full one would be chosen
            await kit.until(lambda: taken)
            assert table.states()[1] == AcceptState.STALLED
            for link in (*links, *taken):
                link.close()

    kit.run(scene())


def test_a_draining_front_answers_what_was_given_to_it_and_gets_no_more() -> None:
    async def scene() -> None:
        async with fronts(2) as served:
            one, other = served.balancers
            clients = [await served.ask() for _ in range(2)]
            ours, theirs = socket.socketpair()
            other.retire()
            draining = asyncio.ensure_future(served.listeners[1][0].drain(BOUND_S))
            await kit.until(lambda: not other._listening)
            assert one._inboxes[1].send(0, theirs)  # chosen a moment before
            theirs.close()
            given = kit.Client(*await asyncio.open_connection(sock=ours))
            await served.answered(given)
            assert served.open_counts() == [1, 2]
            clients += [await served.ask() for _ in range(3)]
            assert served.open_counts()[0] == 4
            for client in (*clients, given):
                client.close()
            assert await draining == 0

    kit.run(scene())


def test_a_drain_loses_nothing_that_has_begun() -> None:
    async def scene() -> None:
        async with fronts(3) as served:
            clients = [await served.connect() for _ in range(12)]
            for client in clients:
                client.send(ASK)
            for balancer in served.balancers:
                balancer.retire()
            draining = [asyncio.ensure_future(own[0].drain(BOUND_S)) for own in served.listeners]
            replies = await asyncio.gather(*(client.reply() for client in clients))
            assert [reply.status for reply in replies] == [200] * 12
            for client in clients:
                client.close()
            assert await asyncio.gather(*draining) == [0, 0, 0]

    kit.run(scene())


class NoDescriptors:
    """A listening socket of a process that has no descriptor left."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening

    def fileno(self) -> int:
        return self._listening.fileno()

    def accept(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_front_without_descriptors_leaves_connections_to_the_others() -> None:
    async def scene() -> None:
        async with fronts(2) as served:
            poor, rich = served.balancers
            listening = poor._listening[0]
            asyncio.get_running_loop().remove_reader(listening.fileno())
            poor._listening[0] = NoDescriptors(listening)  # type: ignore[assignment]
            poor._read(0)
            clients = [await served.connect() for _ in range(3)]
            await asyncio.gather(*map(served.answered, clients))
            assert served.open_counts() == [0, 3]
            asyncio.get_running_loop().remove_reader(listening.fileno())
            poor._listening[0] = listening
            await kit.until(lambda: poor._resting is None)
            clients.append(await served.ask())
            assert served.open_counts() == [1, 3]
            for client in clients:
                client.close()
            assert rich.table.states() == [AcceptState.ACCEPTING] * 2

    kit.run(scene())


def test_a_shared_connection_sends_small_replies_at_once() -> None:
    async def scene() -> None:
        async with fronts(2) as served:
            client = await served.ask()
            (connection,) = [one for own in served.listeners for one in own[0].connections]
            link = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()

    kit.run(scene())


def test_more_ports_than_one_message_carries_are_refused() -> None:
    async def scene() -> None:
        owner = AcceptBalancer.create(2)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            owner._places = {str(i): i for i in range(balance.MOST_PORTS)}
            with pytest.raises(OSError, match="at most 100 with several front processes"):
                owner.attach("one more", listening, lambda accepted: None)
        owner.close()

    kit.run(scene())
