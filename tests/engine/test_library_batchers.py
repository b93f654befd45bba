"""Turns at the places of a full queue: callers in the order they came, whoever leaves in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.codec.safe_msgpack import decode, encode
from fastserve.engine.library_batchers import SLAB_BYTES, SLAB_PAGE, ElementBatcher
from fastserve.errors import Kind, ServeError
from tests.effort import examples
from tests.engine.rig import run


class Sizes:
    """One slot more than `max_queue_size`, each of `max_batch_size` rows."""

    timeout_seconds = 0.0
    instances = 1

    def __init__(self, rows: int, slots: int) -> None:
        self.max_batch_size, self.max_queue_size = rows, slots - 1


class Alive:
    alive, trouble = 1, ""


class Bench:
    """A batcher whose worker is a ring the test moves by hand; `served` is what it was given, in order."""

    def __init__(self, rows: int, slots: int) -> None:
        self.batcher = ElementBatcher(Sizes(rows, slots))
        arena = self.batcher.make_arena({}, {})
        self.worker = arena.ring(worker=0)
        self.served: list[Any] = []

    async def ask(self, *elements: Any) -> list[asyncio.Task[Any]]:
        """Callers, come in this order; returns once each has a place or stands in the queue."""
        tasks = [asyncio.ensure_future(self.batcher.do_one(x)) for x in elements]
        await self.settle()
        return tasks

    async def settle(self) -> None:
        """Everything that can happen without the worker has happened."""
        for _ in range(50):
            await asyncio.sleep(0)

    def serve(self) -> bool:
        """The worker answers one batch with its own elements; False when there is none."""
        slot = self.worker.take()
        if slot < 0:
            return False
        for row, _, offset, nbytes in self.worker.leases(slot):
            element = decode(bytes(self.worker.slab(offset, nbytes)))
            self.served.append(element)
            payload = encode(element)
            answer = self.worker.allocate_slab(len(payload))
            self.worker.slab(answer, len(payload), True)[:] = payload
            self.worker.answer_lease(slot, row, 0, answer, len(payload))
        self.worker.publish(slot)
        return True

    async def serve_all(self) -> None:
        while self.serve():
            await self.bell()

    async def bell(self) -> None:
        """The front has heard of what was published."""
        self.batcher.queue._on_doorbell()
        await self.settle()

    @property
    def queued(self) -> int:
        return len(list(self.room._lines))


@contextlib.asynccontextmanager
async def bench(rows: int, slots: int) -> AsyncIterator[Bench]:
    made = Bench(rows, slots)
    made.batcher.open(Alive())
    made.room = made.batcher.queue.room
    ring = made.batcher.queue.ring
    try:
        yield made
        assert (ring.outstanding(), ring.slab_pages_used(), made.queued) == (0, 0, 0)
    finally:
        made.batcher.close()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_callers_are_served_in_the_order_they_came(rows):
    async def work() -> None:
        async with bench(rows, 2) as at:
            tasks = await at.ask(*range(20))
            assert at.queued == 20 - 2 * rows
            await at.serve_all()
            assert at.served == list(range(20))
            assert await asyncio.gather(*tasks) == list(range(20))

    run(work())


def test_who_comes_as_a_place_becomes_free_does_not_overtake():
    """The newcomer asks between the release of the place and the moment the first in the queue looks."""

    async def work() -> None:
        async with bench(1, 1) as at:
            await at.ask("runs", "waits")
            at.serve()
            at.batcher.queue._on_doorbell()
            newcomer = asyncio.ensure_future(at.batcher.do_one("newcomer"))
            await at.settle()
            await at.serve_all()
            assert at.served == ["runs", "waits", "newcomer"]
            await newcomer

    run(work())


def test_who_looks_in_vain_keeps_its_turn():
    """A caller that leaves lets the first in the queue look, though its place is not free yet."""

    async def work() -> None:
        async with bench(2, 1) as at:
            leaving, _ = await at.ask("leaving", "stays")
            tasks = await at.ask("a", "b", "c")
            at.worker.take()
            leaving.cancel()
            await at.settle()
            assert at.queued == 3, "the batch of the one that left still runs"
            at.worker.worker_died(0, 2, Kind.UNAVAILABLE.value, "gone")
            await at.serve_all()
            assert at.served == ["stays", "a", "b", "c"]
            await asyncio.gather(*tasks)

    run(work())


@pytest.mark.parametrize("leaves", [{0}, {1}, {3}, {0, 1}, {0, 2, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("when", ["waiting", "as its turn comes"])
def test_who_has_left_is_passed_over(leaves, when):
    async def work() -> None:
        async with bench(1, 1) as at:
            await at.ask("runs")
            tasks = await at.ask(0, 1, 2, 3)
            if when == "as its turn comes":
                at.serve()
                at.batcher.queue._on_doorbell()  # the first in the queue is told, and has not looked yet
            for number in leaves:
                tasks[number].cancel()
            await at.settle()
            await at.serve_all()
            assert at.served == ["runs", *(n for n in range(4) if n not in leaves)]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(f, asyncio.CancelledError) for f in found] == [n in leaves for n in range(4)]

    run(work())


def test_who_cannot_be_written_lets_the_next_try():
    """A place that is given back without ever running goes to the next in the queue."""

    async def work() -> None:
        async with bench(1, 1) as at:
            ring, pages = at.batcher.queue.ring, SLAB_BYTES // SLAB_PAGE
            tasks = await at.ask("runs", "no room", "no room either")
            slot, hogs = at.worker.take(), [ring.allocate_slab((pages - 1) * SLAB_PAGE)]
            at.worker.fail(slot, Kind.INTERNAL.value, "failed")
            at.worker.publish(slot)
            at.batcher.queue._on_doorbell()
            hogs.append(ring.allocate_slab(SLAB_PAGE))  # the page of the batch that failed
            await at.settle()
            await at.serve_all()
            found: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
            assert [error.kind for error in found] == [Kind.INTERNAL, *[Kind.RESOURCE_EXHAUSTED] * 2]
            for offset in hogs:
                ring.free_slab(offset)
            (task,) = await at.ask("fits")
            await at.serve_all()
            assert await task == "fits"

    run(work())


def test_a_batch_that_everybody_left_makes_room():
    """Nobody is answered when it ends: those in the queue hear of it all the same."""

    async def work() -> None:
        async with bench(2, 1) as at:
            leaving = await at.ask("leaves", "leaves too")
            tasks = await at.ask("waits", "waits too")
            slot = at.worker.take()
            for task in leaving:
                task.cancel()
            await at.settle()
            at.worker.publish(slot)
            await at.bell()
            assert at.queued == 0
            await at.serve_all()
            assert await asyncio.gather(*tasks) == ["waits", "waits too"]

    run(work())


def test_closing_tells_those_in_the_queue():
    async def work() -> None:
        at = Bench(1, 1)
        at.batcher.open(Alive())
        at.room = at.batcher.queue.room
        tasks = await at.ask("runs", "waits", "waits too")
        at.batcher.close()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, ServeError)
            assert found.kind is Kind.UNAVAILABLE
        assert at.queued == 0

    run(work())


EVENTS = st.lists(
    st.one_of(
        st.just(("ask", 0)),
        st.just(("ask", 0)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.just(("serve", 0)),
        st.just(("serve at once", 0)),
    ),
    max_size=40,
)


@examples(60)
@given(rows=st.integers(1, 3), slots=st.integers(1, 2), events=EVENTS)
def test_whatever_happens_the_order_is_kept_and_nobody_is_forgotten(rows, slots, events):
    async def work() -> None:
        async with bench(rows, slots) as at:
            tasks: list[asyncio.Task[Any]] = []
            for verb, number in events:
                if verb == "ask":
                    tasks.append(asyncio.ensure_future(at.batcher.do_one(len(tasks))))
                elif verb == "cancel" and number < len(tasks):
                    tasks[number].cancel()
                elif verb.startswith("serve") and at.serve():
                    at.batcher.queue._on_doorbell()
                if verb != "serve at once":
                    await at.settle()
            await at.settle()
            while at.serve():
                await at.bell()
            assert at.served == sorted(at.served)
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in enumerate(found):
                assert result == number or isinstance(result, asyncio.CancelledError)

    run(work())
