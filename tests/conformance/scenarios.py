"""Lives of requests in a server that works: each of these is played for each way in.

A scenario is a coroutine that plays it, checks what clients are told, and says what must have been counted
meanwhile (`books.Told`). `SCENARIOS` at the end is the table: for which forms of a model and which ways.
What fails where is in `steps.py` and test_failures.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from fastserve.engine.engine import scheduler_of
from tests.conformance.books import Told, count_cause
from tests.conformance.models import FORMS, PATHS, POLICY_ROWS, QUEUE_ROWS
from tests.conformance.rig import Rig, is_right
from tests.conformance.ways import (
    FULL,
    FULL_BYTES,
    LOST,
    POLICY_FULL,
    POLICY_LATE,
    QUEUED_LATE,
    RAN_LATE,
    Line,
    Way,
)

WIDE = 8000  # numbers of a row, some of which fill models.QUEUE_BYTES


@dataclass
class Asked:
    """One request that was sent."""

    case: Case
    line: Line
    rows: list[float]

    async def is_right(self) -> bool:
        """Whether it is answered, and well."""
        return is_right(await self.line.reply(), self.case.way, self.rows)

    async def is_told(self, event: str) -> bool:
        """Whether it is answered with the words for this event."""
        answer = await self.line.reply()
        assert self.case.way.is_told(answer, event), (event, answer)
        return True


class Case:
    """One way, one model; of client memory the places from `slot` on."""

    def __init__(self, rig: Rig, way: Way, model: str, slot: int = 0) -> None:
        self.rig, self.way, self.model = rig, way, model
        self.queue = rig.queue(model)
        self._slots = slot

    async def send(self, rows: list[float] | None = None, columns: int = 2) -> Asked:
        """A request on a line of its own; of one row with a fresh number unless others are given."""
        given = [self.rig.fresh()] if rows is None else rows
        line = await self.way.open(self.rig)
        line.send(self.way.build(self.model, given, columns=columns, slot=self._slots))
        self._slots += 1
        return Asked(self, line, given)

    def turned_away(self, cause: str) -> int:
        """How many requests were, so far."""
        return count_cause(self.rig, self.model, cause)

    async def is_well(self) -> bool:
        """Whether a request is answered as ever."""
        return await (await self.send()).is_right()

    @contextlib.asynccontextmanager
    async def running(self, value: float | None = None) -> AsyncIterator[Asked]:
        """A request that runs until the block ends."""
        held = self.rig.fresh_hold() if value is None else value
        with self.rig.holding(self.model):
            asked = await self.send([held])
            await self.rig.until_running(self.model, held)
            yield asked

    async def waiting(self, rows: int) -> None:
        """Until so many rows wait."""
        await self.rig.until(lambda: self.queue.ring.queued() == rows)


async def answered(case: Case) -> Told:
    most = [case.rig.fresh() for _ in range(case.way.most_rows)]
    assert await case.is_well()
    assert await (await case.send(most)).is_right()
    return Told(OK=2)


async def left(case: Case) -> Told:
    """A client leaves whose request waits, and one whose request runs."""
    async with case.running() as running:
        waits = await case.send()
        await case.waiting(1)
        waits.line.leave()
        await case.rig.until(lambda: case.queue.waiting == 1)
        running.line.leave()
        await case.rig.until(lambda: case.queue.waiting == 0)
    assert await case.is_well()
    return Told(OK=1, queued=1, running=1, CANCELED=2)


async def late(case: Case) -> Told:
    """Time is up for a request that runs and for one that waits."""
    async with case.running() as running:
        waits = await case.send()
        await case.waiting(1)
        with case.rig.deadlines_pass():
            assert await running.is_told(RAN_LATE)
            assert await waits.is_told(QUEUED_LATE)
    assert await case.is_well()
    return Told(OK=1, DEADLINE_EXCEEDED=2, deadline=2, REJECTED=1, CANCELED=1)


async def late_already(case: Case) -> Told:
    """Time is up before there is a place."""
    async with case.running() as running:
        with case.rig.deadlines_pass():
            assert await running.is_told(RAN_LATE)
            assert await (await case.send()).is_told(QUEUED_LATE)
    assert await case.is_well()
    return Told(OK=1, DEADLINE_EXCEEDED=2, deadline=2, REJECTED=1, CANCELED=1)


async def full(case: Case) -> Told:
    """As many rows wait as may."""
    async with case.running() as running:
        waiting: list[Asked] = []
        left = QUEUE_ROWS
        while left:
            rows = [case.rig.fresh() for _ in range(min(left, case.way.most_rows))]
            waiting.append(await case.send(rows))
            left -= len(rows)
        await case.waiting(QUEUE_ROWS)
        assert await (await case.send()).is_told(FULL)
        assert await (await case.send()).is_told(FULL)
    for one in (running, *waiting):
        assert await one.is_right()
    assert await case.is_well()
    return Told(OK=2 + len(waiting), UNAVAILABLE=2, queue_rows=2, REJECTED=2)


async def full_of_bytes(case: Case) -> Told:
    """There is no room for the inputs. Who waits leaves, and what they held is there for others."""
    waiting: list[Asked] = []
    before = case.turned_away("queue_bytes")
    async with case.running() as running:
        while case.turned_away("queue_bytes") == before:
            waiting.append(await case.send(columns=WIDE))
            await case.rig.until(
                lambda: case.queue.ring.queued() == len(waiting) or case.turned_away("queue_bytes") > before
            )
        refused = waiting.pop()
        assert await refused.is_told(FULL_BYTES)
        for one in waiting:
            one.line.leave()
        await case.rig.until(lambda: case.queue.waiting == 1)
    assert await running.is_right()
    assert await case.is_well()
    count = len(waiting)
    return Told(OK=2, UNAVAILABLE=1, queue_bytes=1, REJECTED=1, queued=count, CANCELED=count)


async def lost(case: Case) -> Told:
    """The worker dies: what ran fails, and what waited runs on the next one."""
    async with case.running() as running:
        waits = await case.send()
        await case.waiting(1)
        case.rig.kill(case.model)
        assert await running.is_told(LOST)
        assert await waits.is_right()
    assert await case.is_well()
    return Told(OK=2, UNAVAILABLE=1, BACKEND=1)


async def lost_and_retried(case: Case) -> Told:
    """A worker is lost where there is another one: the batch runs once more there."""
    await case.rig.until_workers(case.model, 2)
    async with case.running() as running:
        case.rig.forget_seen(case.model)
        case.rig.kill(case.model)
        await case.rig.until_running(case.model, running.rows[0])
    assert await running.is_right()
    assert await case.is_well()
    await case.rig.until_workers(case.model, 2)
    return Told(OK=2, retries=1)


async def met_before(case: Case) -> Told:
    """The cache answers the second of two equal requests."""
    rows = [case.rig.fresh()]
    for _ in range(2):
        assert await (await case.send(rows)).is_right()
    assert case.rig.seen(case.model).count(rows) == 1
    return Told(OK=2, hits=1)


async def met_under_way(case: Case) -> Told:
    """A request waits for its like, which runs."""
    async with case.running() as first:
        before = case.rig.general
        second = await case.send(first.rows)
        await case.rig.until(lambda: case.rig.general == before + 1)
        assert case.queue.waiting == 1
    assert await first.is_right()
    assert await second.is_right()
    assert case.rig.seen(case.model).count(first.rows) == 1
    return Told(OK=2, hits=1)


async def left_by_its_like(case: Case) -> Told:
    """The one that ran leaves: who waited for it is run."""
    async with case.running() as first:
        before = case.rig.general
        second = await case.send(first.rows)
        await case.rig.until(lambda: case.rig.general == before + 1)
        left = case.turned_away("running")
        first.line.leave()
        await case.rig.until(lambda: case.turned_away("running") > left and case.queue.waiting == 1)
    assert await second.is_right()
    return Told(OK=1, running=1, CANCELED=1)


async def by_policy(case: Case) -> Told:
    """A queue policy of Triton's: too many wait, and they wait too long."""
    async with case.running() as running:
        waiting = [await case.send() for _ in range(POLICY_ROWS)]
        await case.rig.until(lambda: scheduler_of(case.rig.version(case.model)).pending() == POLICY_ROWS)
        assert await (await case.send()).is_told(POLICY_FULL)
        with case.rig.policy_runs_out(case.model):
            for one in waiting:
                assert await one.is_told(POLICY_LATE)
    assert await running.is_right()
    assert await case.is_well()
    return Told(OK=2, UNAVAILABLE=3, REJECTED=3)


@dataclass(frozen=True)
class Scenario:
    """One row of the table. Those that cost a worker's start are not played on both paths."""

    play: Callable[[Case], Awaitable[Told]]
    forms: tuple[str, ...] = FORMS
    paths: tuple[str, ...] = PATHS
    suits: Callable[[Way], bool] = lambda way: True

    @property
    def name(self) -> str:
        return self.play.__name__


def is_timed(way: Way) -> bool:
    return way.timed


def is_inside(way: Way) -> bool:
    return not way.outside and way.most_rows > 1


SCENARIOS = (
    Scenario(answered),
    Scenario(left),
    Scenario(late, suits=is_timed),
    Scenario(late_already, suits=is_timed),
    Scenario(full),
    Scenario(full_of_bytes, ("slabs",), suits=is_inside),
    Scenario(lost, ("columns", "whole"), PATHS[:1]),
    Scenario(lost_and_retried, ("pair",), PATHS[:1]),
    Scenario(met_before, ("cached",)),
    Scenario(met_under_way, ("cached",)),
    Scenario(left_by_its_like, ("cached",)),
    Scenario(by_policy, ("policy",)),
)
