"""The memory budget: who goes on, who waits, and who is refused. No sockets, no sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.util.memory_budget import PATIENCE_S, Claim, MemoryBudget

LIMIT = 1000  # of which holders take 750 without waiting


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """A holder that reads as long as it may."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.claim = Claim(budget)
        self.events: list[str] = []

    def read(self, nbytes: int) -> bool:
        """Whether it may read on."""
        self.claim.add(nbytes)
        if self.claim.may_read():
            return True
        self.claim.wait(lambda: self.events.append("room"), lambda fault: self.events.append(fault.kind.name))
        return False


def budget() -> MemoryBudget:
    return MemoryBudget(LIMIT, clock=Clock())


def pass_time(account: MemoryBudget, seconds: float) -> None:
    clock: Any = account._clock
    clock.now += seconds
    account.expire()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_readers_go_on_while_there_is_room() -> None:
    account = budget()
    readers = [Reader(account) for _ in range(3)]
    assert all(reader.read(250) for reader in readers)
    assert account.used == 750
    assert not account.strained


def test_one_reader_goes_on_all_the_same() -> None:
    account = budget()
    first, second = Reader(account), Reader(account)
    assert first.read(700)
    assert second.read(100)  # from now on it is the one
    assert not first.read(1)
    assert second.read(500)
    assert account.exhausted


def test_readers_finish_one_after_the_other() -> None:
    """Each of ten has half of what fits, and wants as much again."""
    account = budget()
    readers = [Reader(account) for _ in range(10)]
    waiting = [reader for reader in readers if not reader.read(400)]
    going = [reader for reader in readers if reader not in waiting]
    finished = 0
    while going or waiting:
        assert going, "nobody goes on"
        reader = going.pop(0)
        reader.claim.add(400)
        reader.claim.release()
        finished += 1
        granted = [one for one in waiting if one.events]
        assert all(one.events == ["room"] for one in granted)
        going += granted
        waiting = [one for one in waiting if one not in granted]
    assert finished == 10
    assert account.used == 0


def test_who_has_waited_in_vain_is_refused() -> None:
    account = budget()
    holder, late, later = Reader(account), Reader(account), Reader(account)
    assert holder.read(2000)
    assert not late.read(10)
    pass_time(account, 1.0)
    assert not later.read(10)
    pass_time(account, PATIENCE_S - 1.0)
    assert late.events == ["UNAVAILABLE"]
    assert later.events == []
    assert account.refused == 1
    pass_time(account, 1.0)
    assert later.events == ["UNAVAILABLE"]


def test_a_released_claim_waits_for_nothing() -> None:
    account = budget()
    holder, other = Reader(account), Reader(account)
    holder.read(2000)
    other.read(10)
    other.claim.release()
    assert account.waiting == 0
    holder.claim.release()
    assert other.events == []
    assert account.used == 0


def test_work_waits_for_memory_that_it_is_about_to_take() -> None:
    async def work() -> None:
        account = budget()
        first, second = Claim(account), Claim(account)
        await first.reserve(600)
        waiting = asyncio.ensure_future(second.reserve(600))
        await asyncio.sleep(0)
        assert account.waiting == 1
        assert account.used == 600  # nothing of what waits
        first.release()
        await waiting
        assert second.nbytes == account.used == 600

    run(work())


def test_work_of_any_size_is_done_alone() -> None:
    async def work() -> None:
        account = budget()
        large = Claim(account)
        await large.reserve(50 * LIMIT)
        await large.reserve(LIMIT)  # and goes on
        waiting = [asyncio.ensure_future(Claim(account).reserve(1)) for _ in range(3)]
        await asyncio.sleep(0)
        assert account.waiting == 3
        large.release()
        await asyncio.gather(*waiting)
        assert account.used == 3

    run(work())


def test_the_last_quarter_is_for_one_that_works() -> None:
    async def work() -> None:
        account = budget()
        await Claim(account).reserve(700)
        last = Claim(account)
        await last.reserve(300)
        assert account.used == LIMIT
        other = asyncio.ensure_future(Claim(account).reserve(1))
        await asyncio.sleep(0)
        assert account.waiting == 1
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert account.waiting == 0

    run(work())


def test_work_that_has_waited_in_vain_is_refused() -> None:
    async def work() -> None:
        account = budget()
        await Claim(account).reserve(LIMIT)
        claim = Claim(account)
        waiting = asyncio.ensure_future(claim.reserve(10))
        await asyncio.sleep(0)
        pass_time(account, PATIENCE_S)
        with pytest.raises(ServeError, match=r"limits\.memory_bytes") as fault:
            await waiting
        assert fault.value.kind is Kind.UNAVAILABLE
        assert fault.value.retry_after_s is not None
        assert claim.nbytes == 0
        assert account.refused == 1

    run(work())


def test_work_that_is_cancelled_as_it_is_granted_holds_nothing() -> None:
    async def work() -> None:
        account = budget()
        first, second = Claim(account), Claim(account)
        await first.reserve(LIMIT)
        waiting = asyncio.ensure_future(second.reserve(600))
        await asyncio.sleep(0)
        first.release()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        second.release()
        assert (account.used, account.workers, account.waiting) == (0, 0, 0)

    run(work())


def test_work_goes_before_reading() -> None:
    async def work() -> None:
        account = budget()
        first, reader, claim = Claim(account), Reader(account), Claim(account)
        other = Reader(account)
        await first.reserve(LIMIT)
        assert other.read(1)  # the one that goes on
        assert not reader.read(1)
        waiting = asyncio.ensure_future(claim.reserve(LIMIT))
        await asyncio.sleep(0)
        first.release()
        assert reader.events == ["room"] or claim.nbytes == LIMIT
        await waiting
        assert claim.nbytes == LIMIT

    run(work())


def test_the_peak_is_that_since_it_was_asked_for() -> None:
    account = budget()
    claim = Claim(account)
    claim.set(500)
    claim.set(20)
    assert account.take_peak() == 500
    assert account.take_peak() == 20


def test_who_is_granted_looks_again_and_goes_on() -> None:
    """Others wait behind it. Two that were granted in turn found each other waiting, without an end."""
    account = budget()
    holder, *readers = (Reader(account) for _ in range(4))
    turns: list[Reader] = []

    def look(reader: Reader) -> None:
        turns.append(reader)
        assert len(turns) < 100
        if not reader.claim.may_read():
            reader.claim.wait(lambda: look(reader), lambda fault: None)

    holder.read(2000)
    for reader in readers:
        reader.claim.add(10)
        look(reader)
    turns.clear()
    holder.claim.release()
    assert turns == readers
