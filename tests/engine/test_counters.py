"""Counters of a version against the calls that were made."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastserve.engine.counters import MOST_RESPONSES, RequestCounters, Took, counters_of, counts_of
from fastserve.errors import Kind, ServeError
from fastserve.metrics import names
from tests.engine.rig import deadlines_pass, desk, run


def test_answers_by_request_and_runs_by_size():
    async def work():
        async with desk() as at:
            asked = [at.ask(1), at.ask(2)]
            await at.answer(0)
            await asyncio.gather(*asked)
            last = at.ask(3)
            slot = await at.take(0)
            at.workers[0].start_run(slot)
            at.compute(0, slot)
            at.workers[0].end_run(slot)
            at.workers[0].publish(slot)
            await last
            counts = counts_of(at.version)
            assert (counts.success.count, counts.inferences, counts.fail.count) == (3, 3, 0)
            assert counts.success.ns >= counts.queue.ns > 0
            [batch] = counts.batches
            assert (batch.rows, batch.runs, counts.executions) == (1, 1, 1), "the first batch never began"
            assert counts.compute_infer.ns >= batch.infer_ns > 0
            assert abs(time.time_ns() // 1_000_000 - counts.last_ms) < 10_000

    run(work())


def test_every_end_has_its_reason():
    async def work():
        async with desk(max_queue_rows=2) as at:
            failing, leaving = at.ask(1), at.ask(2)
            while counts_of(at.version).pending < 2:
                await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            slot = await at.take(0)
            at.workers[0].fail(slot, Kind.INTERNAL.value, "no")
            at.workers[0].publish(slot)
            with pytest.raises(ServeError, match="no"):
                await failing
            late = at.ask(3, deadline_ns=time.monotonic_ns() + 1)
            with pytest.raises(ServeError, match="waited in the queue"):
                await late
            running = at.ask(4, deadline_ns=time.monotonic_ns() + 60_000_000_000)
            slot = await at.take(0)
            taken_ns = time.monotonic_ns()
            await asyncio.sleep(0.02)
            ran_ns = time.monotonic_ns() - taken_ns
            with deadlines_pass([at.queue]), pytest.raises(ServeError, match="took longer"):
                await running
            at.workers[0].publish(slot)
            counts = counts_of(at.version)
            assert {reason: took.count for reason, took in counts.failures.items()} == {
                "REJECTED": 1,
                "CANCELED": 2,
                "BACKEND": 1,
                "OTHER": 0,
            }
            assert counts.failures["CANCELED"].ns >= ran_ns
            assert counts.fail == Took(4, sum(took.ns for took in counts.failures.values()))
            assert (counts.success.count, counts.last_ms, counts.pending) == (0, 0, 0)

    run(work())


def test_a_full_queue_is_a_rejection():
    async def work():
        async with desk(max_queue_rows=1, max_batch_size=1) as at:
            held = []
            while (lease := at.queue.ring.reserve(1)) >= 0:
                held.append(lease)
            with pytest.raises(ServeError, match="queue of this model is full"):
                await at.ask(1)
            assert counts_of(at.version).failures["REJECTED"].count == 1
            for lease in held:
                at.queue.abandon(lease, 1)

    run(work())


def test_what_no_queue_ran_adds_up_with_what_lanes_ran():
    async def work():
        async with desk() as at:
            asked = at.ask(1)
            slot = await at.take(0)
            at.workers[0].start_run(slot)
            at.compute(0, slot)
            at.workers[0].publish(slot)
            await asked
            before = counts_of(at.version)
            counters_of(at.version).serve(4, 1000, 600)
            counts = counts_of(at.version)
            assert counts.success == Took(2, before.success.ns + 1000)
            assert counts.compute_infer == Took(2, before.compute_infer.ns + 600)
            assert [(b.rows, b.runs) for b in counts.batches] == [(1, 1), (4, 1)]
            assert (counts.inferences, counts.executions) == (5, 2)

    run(work())


def test_a_closed_queue_is_forgotten():
    async def work():
        async with desk() as at:
            asked = at.ask(1)
            await at.answer(0)
            await asked
            counters = counters_of(at.version)
            counters.waiting = lambda: 3
            counters.close(at.queue)
            assert (counters.queues, counts_of(at.version).pending) == ([], 0)
            assert counts_of(at.version).success.count == 1, "what it has counted stays"

    run(work())


def test_endless_responses_take_bounded_room():
    counters = RequestCounters()
    for index in range(10_000):
        counters.response(index).success.add(1)
    responses = counters.read().responses
    assert len(responses) == MOST_RESPONSES
    assert responses[MOST_RESPONSES - 1].success.count == 10_000 - MOST_RESPONSES + 1


def test_forming_a_batch_is_not_all_that_it_waited():
    """It was full at once, and its worker came later."""

    async def work():
        async with desk() as it:
            asked = [it.ask(1.0), it.ask(2.0)]
            await asyncio.sleep(0.05)
            await it.answer(0)
            await asyncio.gather(*asked)
            found = it.registry.read(names.QUEUE_DURATION, names.BATCH_FORM_DURATION)
            (queued,), (formed,) = ([sum_of[-1] for sum_of in one.values()] for one in found)
            assert queued - formed >= 0.04

    run(work())
