"""Loops over many where one that fails costs the others nothing: every place that has one, seen to go on."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fastserve.util.rate_limited_log as each_module
from fastserve._ext.batch_ring import RECORDS
from fastserve._ext.text_tokens import Flowing
from fastserve.engine.text_queue import TextQueue
from fastserve.errors import Kind, ServeError
from fastserve.net.deadlines import CallDeadlines
from fastserve.net.http1.connection import Http1Connection
from fastserve.net.http2.exchange import Http2Shared
from fastserve.net.tls.transport import TlsPort
from fastserve.server.front_pool import FrontLink
from fastserve.util.rate_limited_log import RateLimitedLog, run_all
from fastserve.workers.group import WorkerGroup
from fastserve.workers.liveness import Watchdog
from tests.engine.rig import desk
from tests.net.http2.kit import GET, Peer
from tests.net.kit import Clock, Held, Pipe, client, echo, run, serving


class Broken:
    """Of three, the second fails."""

    def __init__(self, number: int, told: list[int]) -> None:
        self.number, self.told, self.deadline_ns = number, told, 1
        self.cut = False

    def work(self) -> None:
        if self.number == 1:
            raise RuntimeError("the second")
        self.told.append(self.number)

    flush = expire = abandon = work

    def callback_failed(self, error: Exception) -> None:
        self.cut = True


def three() -> tuple[list[Any], list[int]]:
    told: list[int] = []
    return [Broken(number, told) for number in range(3)], told


def test_the_others_have_their_turn_and_it_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    things, told = three()
    run_all(things, Broken.work, Broken.callback_failed)
    assert (told, [thing.cut for thing in things], caplog.records) == ([0, 2], [False, True, False], [])
    monkeypatch.setattr(each_module, "_limited_log", RateLimitedLog(each_module.log))
    run_all(things, Broken.work)
    assert told == [0, 2, 0, 2]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_failure_that_repeats_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(each_module, "_limited_log", RateLimitedLog(each_module.log))
    for _ in range(100):
        run_all(three()[0], Broken.work)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", [TlsPort, Http2Shared])
def test_connections_are_flushed(kind: type[TlsPort] | type[Http2Shared]) -> None:
    things, told = three()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gathering = cast(Any, kind.__new__(kind))
        gathering._loop = gathering.loop = loop
        gathering._listener = SimpleNamespace(fair_queue=SimpleNamespace(loop=loop))
        gathering._flushing, gathering._gathering = [], []
        for thing in things:
            gathering.flush_soon(thing)
        await asyncio.sleep(0)

    run(main())
    assert (told, [thing.cut for thing in things]) == ([0, 2], [False, True, False])


def test_time_limits_hold_for_connections_behind_one_that_cannot_be_looked_at() -> None:
    async def main() -> None:
        serves = serving({"/": echo}, breaks=True)
        async with serves as listener, client(listener) as one, client(listener) as other:
            for peer in (one, other):
                peer.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await peer.reply()).status == 200
            listener.scan()
            cast(Any, next(iter(listener.connections)))._timeouts = cast(Any, None)
            cast(Clock, listener.clock).now += 1000.0
            listener.scan()
            assert await one.rest() == await other.rest() == b""

    run(main())


def test_deadlines_go_on() -> None:
    things, told = three()
    later = Broken(3, told)
    later.deadline_ns = monotonic_ns() + 20_000_000

    async def main() -> None:
        deadlines = CallDeadlines()
        for thing in (*things, later):
            deadlines.add(thing, thing.deadline_ns)
        while len(told) < 3:
            await asyncio.sleep(0.001)
        deadlines.close()

    run(main())
    assert told == [0, 2, 3]


def test_every_stream_of_a_lost_connection_hears_of_it() -> None:
    held = Held()
    peer = Peer({"/echo": held})
    for number in (1, 3, 5):
        peer.h2.send_headers(number, GET, end_stream=True)
    peer.flush()
    logged: list[Any] = []

    def access(*about: object) -> None:
        logged.append(about)
        if len(logged) == 1:
            raise RuntimeError("the disk is full")

    peer.pipe.listener.access_log = access
    peer.connection.connection_lost(None)
    assert held.left == held.calls[1:]
    assert len(logged) == 3
    assert not peer.pipe.listener.connections


def test_pipelined_calls_of_a_lost_connection_all_hear_of_it() -> None:
    held = Held()
    pipe = Pipe(dict.fromkeys(("/", "/a", "/b"), held))
    logged: list[Any] = []

    def access(*about: object) -> None:
        logged.append(about)
        if len(logged) == 1:
            raise RuntimeError("the disk is full")

    pipe.listener.access_log = access
    pipe.feed(b"".join(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path for path in (b"/", b"/a", b"/b")))
    pipe.connection.connection_lost(None)
    assert len(logged) == 3
    assert all(call.gone for call in held.calls[1:])
    assert held.left == held.calls[1:]
    assert not pipe.listener.connections


def test_a_listener_that_closes_cuts_everybody_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[Http1Connection] = []
    abort = Http1Connection.abort

    def failing(connection: Http1Connection) -> None:
        abort(connection)
        cut.append(connection)
        if len(cut) == 1:
            raise RuntimeError("the first")

    async def main() -> None:
        async with serving({"/": echo}) as listener, client(listener) as one, client(listener) as other:
            for peer in (one, other):
                peer.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await peer.reply()).status == 200
            things, told = three()
            listener.on_closed.extend([thing.work for thing in things])
            monkeypatch.setattr(Http1Connection, "abort", failing)
            await listener.close()
            assert (len(cut), told) == (2, [0, 2])
            listener.on_closed.clear()

    run(main())


def test_everybody_in_line_is_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    things, told = three()
    told_what: list[object] = []
    fault = ServeError(Kind.UNAVAILABLE, "closed")

    async def main() -> None:
        async with desk() as it:
            for thing in things:

                def given(place: object, thing: Broken = thing) -> None:
                    told_what.append(place)
                    thing.work()

                it.queue.room.stand(1, given)
            it.queue.room.close(lambda: fault)
            caplog.clear()  # the traceback holds the arena

    run(main())
    assert (told, told_what) == ([0, 2], [fault, fault, fault])


def test_every_worker_of_a_group_is_abandoned() -> None:
    group = cast(Any, WorkerGroup.__new__(WorkerGroup))
    group._instances, told = three()
    group._recorded = -1  # no recorded requests
    group._watchdog = Watchdog("m/1", (), lambda: None)
    group._unhold = []
    group.abandon()
    assert told == [0, 2]


def test_runs_and_slots_of_a_text_queue_are_heard_behind_those_that_cannot_be() -> None:
    runs, told = three()
    slots: list[int] = []

    def hear_one(entry: tuple[int, Any]) -> None:
        slots.append(entry[0])
        if len(slots) == 1:
            raise RuntimeError("the first")

    class Run(Flowing):
        def __init__(self, thing: Broken) -> None:
            self.thing = thing

        def hear(self, records: list[int]) -> None:
            self.thing.work()

    queue = cast(Any, TextQueue.__new__(TextQueue))
    queue.tokens = SimpleNamespace(read=lambda messages: [(Run(thing), messages) for thing in runs])
    queue.hear_one, queue.accounted = hear_one, set()
    queue._hear([(RECORDS, (4096, 10)), (3, 1), (4, 2)])
    assert (told, slots) == ([0, 2], [3, 4])


def test_a_version_closes_though_a_front_has_died() -> None:
    """Rows that the dead front held are reclaimed: nobody is asked, and so nobody is waited for."""

    async def main() -> None:
        link = cast(Any, FrontLink.__new__(FrontLink))
        hosted = cast(Any, SimpleNamespace(version=object()))
        link._given, link._process, link._waiting, link.front = {id(hosted.version)}, None, {}, 1
        await asyncio.wait_for(link.close_version(hosted), 60)

    run(main())


def test_a_batch_is_heard_behind_one_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with desk(max_batch_size=1) as it:
            lost, asked = it.ask(1.0), it.ask(2.0)
            slots = [await it.take(0), await it.take(1)]
            hear = it.queue.hear_one

            def failing(entry: tuple[int, Any]) -> None:
                if entry[0] == slots[0]:
                    raise RuntimeError("the first")
                hear(entry)

            monkeypatch.setattr(it.queue, "hear_one", failing)
            for worker, slot in enumerate(slots):
                it.compute(worker, slot)
                it.workers[worker].publish(slot)
            assert await asyncio.wait_for(asked, 60) == [4.0]
            assert not lost.done()
            it.queue._rescan()
            assert await lost == [2.0]
            caplog.clear()  # the traceback holds the arena

    run(main())


def test_a_lie_about_one_fault_costs_its_batch_no_answers() -> None:
    """A worker says that the words of a fault are longer than their slab."""

    async def main() -> None:
        async with desk() as it:
            asked = [it.ask(1.0), it.ask(2.0)]
            slot = await it.take(0)
            it.compute(0, slot)
            worker = it.workers[0]
            offset = worker.allocate_slab(4)
            worker.answer_lease(slot, 0, Kind.INVALID_ARGUMENT.value, offset, 1 << 30)
            worker.publish(slot)
            told = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
            assert isinstance(told[0], ServeError)
            assert (told[0].kind, told[1]) == (Kind.INTERNAL, [4.0])

    run(main())
