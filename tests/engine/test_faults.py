"""A worker that dies at each step of a batch's way: every caller is answered once, with its own rows."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastserve.errors import DeadlineError, Kind, ServeError
from tests.engine.rig import DIED, Desk, deadlines_pass, desk, run

STEPS = ("taken", "written", "published", "told")


async def die_after(at: Desk, step: str) -> int:
    """Worker 0 takes a batch and gets as far as `step`."""
    slot = await at.take(0)
    if step == "taken":
        return slot
    at.compute(0, slot)
    if step == "published":
        at.workers[0].publish(slot)
        at.queue.ring.drain()  # the word that would have told the front is lost, and its doorbell with it
    elif step == "told":
        at.workers[0].publish(slot)
    return slot


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("alone", [False, True])
def test_worker_dies(step, alone):
    async def work() -> None:
        async with desk() as at:
            asking = [at.ask(1.0), at.ask(2.0)]
            await die_after(at, step)
            answered = step in ("published", "told")
            assert at.die(0, alone=alone) == ((0, 0) if answered else (0, 1) if alone else (1, 0))
            if not answered and not alone:
                assert await at.answer(1) == [1.0, 2.0]
            if answered or not alone:
                assert await asyncio.gather(*asking) == [[2.0], [4.0]]
                return
            for task in asking:
                with pytest.raises(ServeError, match=DIED) as caught:
                    await task
                assert caught.value.kind is Kind.UNAVAILABLE

    run(work())


@pytest.mark.parametrize("step", STEPS)
def test_worker_dies_and_so_does_its_successor(step):
    async def work() -> None:
        async with desk() as at:
            asking = at.ask(1.0, 2.0)
            await die_after(at, "taken")
            at.die(0)
            slot = await at.take(1)
            answered = step in ("published", "told")
            if answered:
                at.compute(1, slot)
                at.workers[1].publish(slot)
            at.die(1)
            if answered:
                assert await asking == [2.0, 4.0]
            else:
                with pytest.raises(ServeError, match=DIED):
                    await asking

    run(work())


@pytest.mark.parametrize("when", ["open", "ready", "running", "answered"])
def test_a_caller_leaves(when):
    """Its rows are dropped; who shares its batch is answered all the same."""

    async def work() -> None:
        async with desk(max_queue_delay_us=0 if when == "ready" else 1) as at:
            leaving, staying = at.ask(1.0), at.ask(2.0)
            await asyncio.sleep(0)
            if when == "open":
                leaving.cancel()
                await asyncio.sleep(0)
            slot = -1
            if when in ("running", "answered"):
                slot = await at.take(0)
            if when == "answered":
                at.compute(0, slot)
                at.workers[0].publish(slot)
            leaving.cancel()
            await asyncio.sleep(0)
            if when == "running":
                at.compute(0, slot)
                at.workers[0].publish(slot)
            elif when != "answered":
                await at.answer(0)
            assert await staying == [4.0]
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await at.queue.drain()

    run(work())


def test_a_batch_that_only_the_gone_were_in_is_not_run():
    async def work() -> None:
        async with desk() as at:
            for taken in (False, True):
                leaving = at.ask(1.0, 2.0)
                slot = await at.take(0) if taken else -1
                await asyncio.sleep(0)
                leaving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await leaving
                assert at.queue.ring.queued() == 0
                if taken:
                    assert at.workers[0].leases(slot) == []
                    assert not at.workers[0].publish(slot)
                assert at.workers[0].take() == -1

    run(work())


@pytest.mark.parametrize("queued", [True, False])
def test_deadlines_say_whether_it_ran(queued):
    async def work() -> None:
        async with desk() as at:
            late = at.ask(1.0, deadline_ns=time.monotonic_ns() + 60_000_000_000)
            other = at.ask(2.0)
            while at.queue.waiting < 2:
                await asyncio.sleep(0)
            slot = -1 if queued else await at.take(0)
            with deadlines_pass([at.queue]), pytest.raises(DeadlineError) as caught:
                await late
            assert caught.value.queued is queued
            if queued:
                slot = await at.take(0)
            at.compute(0, slot)
            at.workers[0].publish(slot)
            assert await other == [4.0]

    run(work())


def test_nobody_looks_for_who_is_late_before_anybody_can_be():
    async def work() -> None:
        async with desk() as at:
            far_ns = time.monotonic_ns() + 600_000_000_000
            patient = at.ask(1.0, deadline_ns=far_ns)
            await asyncio.sleep(0)
            assert at.queue.alarm_ns == far_ns
            late = at.ask(2.0, deadline_ns=far_ns - 500_000_000_000)  # after whom it is looked sooner
            await asyncio.sleep(0)
            assert at.queue.alarm_ns < far_ns
            with deadlines_pass([at.queue], 200), pytest.raises(DeadlineError):
                await late
            assert at.queue.alarm_ns == far_ns
            await at.answer(0)
            assert await patient == [2.0]

    run(work())


def test_a_full_queue_refuses_and_recovers():
    async def work() -> None:
        async with desk() as at:
            asking = [at.ask(float(n), float(n)) for n in range(at.queue.ring.rows_left() // 2)]
            await asyncio.sleep(0)
            with pytest.raises(ServeError, match="queue of this model is full") as caught:
                await at.ask(9.0)
            assert caught.value.kind is Kind.UNAVAILABLE
            assert caught.value.retry_after_s == 1.0
            for _ in asking:
                await at.answer(0)
            assert await asyncio.gather(*asking) == [[2.0 * n] * 2 for n in range(len(asking))]

    run(work())


@pytest.mark.parametrize("fault", ["none", "death", "cancel", "full"])
def test_a_split_request(fault):
    async def work() -> None:
        async with desk() as at:
            room = at.queue.ring.rows_left() // 2
            ahead = [at.ask(50.0, 50.0) for _ in range(room if fault == "full" else room - 1)]
            await asyncio.sleep(0)
            rows = [float(n) for n in range(1, 12)]
            large = at.ask(*rows)
            await asyncio.sleep(0)
            if fault == "full":
                with pytest.raises(ServeError, match="queue of this model is full"):
                    await large
            if fault == "cancel":
                large.cancel()
            if fault == "death":
                await at.take(0)
                at.die(0, alone=True)
            while not (
                large.done() and all(task.done() for task in ahead) and at.queue.ring.outstanding() == 0
            ):
                slot = at.workers[1].take()
                if slot >= 0:
                    at.compute(1, slot)
                    at.workers[1].publish(slot)
                await asyncio.sleep(0)
            if fault in ("none", "death"):
                assert await large == [2 * row for row in rows]
            await asyncio.gather(large, *ahead, return_exceptions=True)

    run(work())


def test_a_piece_that_fails_fails_the_request_and_frees_the_others():
    async def work() -> None:
        async with desk() as at:
            large = at.ask(*range(1, 7))
            slots = [await at.take(0) for _ in range(3)]
            at.workers[0].fail(slots[1], Kind.INTERNAL.value, "no")
            for slot in slots:
                at.compute(0, slot)
                at.workers[0].publish(slot)
            with pytest.raises(ServeError, match="no"):
                await large
            while at.queue.ring.outstanding():
                await asyncio.sleep(0)

    run(work())


def test_closing_tells_those_who_wait():
    async def work() -> None:
        async with desk() as at:
            waiting = at.ask(1.0)
            await asyncio.sleep(0)
            at.queue.close()
            with pytest.raises(ServeError, match="unloaded"):
                await waiting
            await at.answer(0)
            at.queue.ring.release(0, 1)

    run(work())


def test_fail_ready_reaches_everybody():
    async def work() -> None:
        async with desk() as at:
            asking = [at.ask(1.0), at.ask(2.0), at.ask(3.0)]
            await asyncio.sleep(0)
            assert at.queue.ring.fail_ready(Kind.UNAVAILABLE.value, "nobody") == 2
            for task in asking:
                with pytest.raises(ServeError, match="nobody"):
                    await task

    run(work())
