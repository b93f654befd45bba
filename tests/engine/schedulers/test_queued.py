"""The admission queue against an oracle, and its scheduler over a sender the test moves by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.engine.schedulers.queued import (
    AdmissionQueue,
    BatchForming,
    LevelPolicy,
    PriorityLevels,
    QueuedScheduler,
    levels_of,
)
from fastserve.engine.share_board import ShareBoard
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.request import InferRequest
from fastserve.settings.model_options import QueueOptions, QueuePolicy
from tests.engine.fakes import Hand, House, array, ints, io, run

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 4), st.integers(0, 30)),
        st.tuples(st.just("take"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
    ),
    max_size=60,
)
POLICIES = (
    LevelPolicy(reject=True, timeout_ns=10_000, may_override=True, most=3),
    LevelPolicy(reject=False, timeout_ns=8_000),
    LevelPolicy(most=2),
)


@given(EVENTS)
def test_the_queue_against_the_plainest_one(events):
    queue, now, count = AdmissionQueue(PriorityLevels(POLICIES, default=2)), 0, 0
    plain: list[dict] = []
    for what, number, timeout_us in events:
        if what == "push":
            level = number if 1 <= number <= 3 else 2
            policy = POLICIES[level - 1]
            full = policy.most and sum(q["level"] == level for q in plain) >= policy.most
            count += 1
            if full:
                with pytest.raises(ServeError, match="Exceeds maximum queue size"):
                    queue.push(count, 1, now, priority=number, timeout_us=timeout_us)
                continue
            queue.push(count, 1, now, priority=number, timeout_us=timeout_us)
            own = timeout_us * 1000
            time = own if policy.may_override and 0 < own < policy.timeout_ns else policy.timeout_ns
            plain.append({"what": count, "level": level, "until": now + time if time else 1 << 60, "late": 0})
        elif what == "take":
            for queued in list(queue.in_order())[number : number + 1]:
                queue.take(queued)
                plain = [q for q in plain if q["what"] != queued.what]
        else:
            now += number * 1000
            gone = {q.what for q in queue.expire(now)}
            late = [q for q in plain if q["until"] <= now]
            assert gone == {q["what"] for q in late if POLICIES[q["level"] - 1].reject}
            plain = [q for q in plain if q["what"] not in gone]
            for q in plain:
                if q["until"] <= now and not q["late"]:
                    q["late"] = 1
        expected = sorted(plain, key=lambda q: (q["level"], q["late"], q["what"]))
        assert [q.what for q in queue.in_order()] == [q["what"] for q in expected]
        assert len(queue) == len(plain)
        times = [q["until"] for q in plain if not q["late"] and q["until"] < 1 << 60]
        assert queue.next_expiry_ns() == min(times, default=0)


def test_levels_of_a_config():
    mine = QueuePolicy(reject=False, timeout_us=5, max_requests=7)
    found = levels_of(QueueOptions(policies=[mine, QueuePolicy()], default_level=2))
    assert found == PriorityLevels(
        (LevelPolicy(reject=False, timeout_ns=5000, most=7), LevelPolicy()), default=2
    )
    assert levels_of(QueueOptions()).plain


class Stage:
    def __init__(self, levels=PriorityLevels(), rows=1, gate=None, **forming):  # noqa: B008
        self.now = 1_000_000
        self.house, self.hand = House(), Hand(rows)
        forming = BatchForming(forming.pop("width", 1), **forming)
        self.scheduler = QueuedScheduler("m", self.hand, levels, forming, gate, lambda: self.now)
        triton = {"input": [io("IN")], "output": [io("OUT")], "max_batch_size": rows}
        self.version = self.house.put("m", triton, self.scheduler)

    def ask(self, *values, **request):
        return asyncio.ensure_future(self._ask(InferRequest({"IN": ints(*values)}, **request)))

    async def _ask(self, request):
        response = await self.house.engine.infer(self.version, request)
        found = array(response.outputs["OUT"]).ravel().tolist()
        response.release()
        return found

    async def turns(self):
        for _ in range(5):
            await asyncio.sleep(0)

    async def close(self):
        await asyncio.wait_for(self.scheduler.drain(), 60)
        assert not self.hand.unreleased
        assert not len(self.scheduler.queue)


async def fails(task, text, kind=Kind.UNAVAILABLE):
    with pytest.raises(ServeError) as caught:
        await task
    assert (caught.value.kind, caught.value.message) == (kind, text)


def test_higher_levels_first_and_nothing_is_fed_ahead():
    async def work():
        at = Stage(PriorityLevels((LevelPolicy(), LevelPolicy()), default=2))
        asking = [at.ask(1)]
        await at.hand.batch()
        asking += [at.ask(2), at.ask(3, priority=2), at.ask(4, priority=1), at.ask(5, priority=9)]
        await at.turns()
        assert len(at.hand.batches) == 1  # the worker is busy
        seen = []
        for _ in range(5):
            seen += await at.hand.seen()
            await at.hand.answer()
        assert seen == [1, 4, 2, 3, 5]
        assert await asyncio.gather(*asking) == [[1], [2], [3], [4], [5]]
        await at.close()

    run(work())


def test_accounts_have_turns_within_a_level():
    """Of a weight of 2 two requests for one of the other; a client that leaves costs its key no turn."""

    async def work():
        at = Stage(PriorityLevels((LevelPolicy(), LevelPolicy()), default=2))
        board = ShareBoard(0)
        heavy, light = (
            SimpleNamespace(name=name, board=board, weight=w) for name, w in (("h", 2.0), ("l", 1.0))
        )
        asking = [at.ask(1)]
        await at.hand.batch()
        left = [at.ask(number, account=light) for number in (90, 91, 92)]
        await at.turns()
        for one in left:
            one.cancel()
        await at.turns()
        asking += [at.ask(number, account=heavy) for number in range(10, 16)]
        await at.turns()
        asking += [at.ask(number, account=light) for number in range(20, 23)]
        asking.append(at.ask(30, account=light, priority=1))
        await at.turns()
        seen = []
        for _ in range(11):
            seen += await at.hand.seen()
            await at.hand.answer()
        assert seen[:2] == [1, 30]
        rest = seen[2:]
        assert [n for n in rest if n < 20] == list(range(10, 16))
        assert [n for n in rest if n >= 20] == list(range(20, 23))
        for count in range(1, 10):
            light_ones = sum(n >= 20 for n in rest[:count])
            assert abs(light_ones - count / 3) <= 1.5, rest
        await asyncio.gather(*asking)
        await at.close()

    run(work())


def test_full_and_expired():
    async def work():
        at = Stage(PriorityLevels((LevelPolicy(timeout_ns=400_000_000, may_override=True, most=2),)))
        first = at.ask(1)
        await at.hand.batch()
        quick, patient = at.ask(2, timeout_us=100_000), at.ask(3, timeout_us=900_000)
        await at.turns()
        await fails(at.ask(4, request_id="r"), "[request id: r] Exceeds maximum queue size")
        await fails(at.ask(4), "[request id: <id_unknown>] Exceeds maximum queue size")
        at.now += 100_000_000
        at.scheduler._look()
        await fails(quick, "Request timeout expired")
        at.now += 299_999_999
        at.scheduler._look()
        await at.turns()
        assert not patient.done()
        at.now += 1
        at.scheduler._look()
        await fails(patient, "Request timeout expired")
        await at.hand.answer()
        assert await first == [1]
        await at.close()

    run(work())


def test_late_ones_with_action_delay_run_after_the_others():
    async def work():
        at = Stage(PriorityLevels((LevelPolicy(reject=False, timeout_ns=1000),)))
        asking = [at.ask(1)]
        await at.hand.batch()
        asking.append(at.ask(2))
        await at.turns()
        at.now += 1000
        asking.append(at.ask(3))
        await at.turns()
        seen = []
        for _ in range(3):
            seen += await at.hand.seen()
            await at.hand.answer()
        assert seen == [1, 3, 2]
        await asyncio.gather(*asking)
        await at.close()

    run(work())


def test_preferred_sizes_and_delay():
    async def work():
        at = Stage(rows=8, preferred=frozenset({2, 4}), delay_ns=1000)
        asking = [at.ask(i) for i in range(5)]
        assert await at.hand.seen() == [0, 1, 2, 3]
        await at.hand.answer()
        await at.turns()
        assert not at.hand.batches  # the fifth waits for company
        at.now += 1000
        at.scheduler._look()
        assert await at.hand.seen() == [4]
        await at.hand.answer()
        whole = [at.ask(*range(7)), at.ask(9, 9)]  # the second does not fit beside the first
        assert await at.hand.seen() == [0]
        await at.hand.answer()
        assert await at.hand.seen() == [9]
        await at.hand.answer()
        assert await asyncio.gather(*asking, *whole) == [[0], [1], [2], [3], [4], list(range(7)), [9, 9]]
        big = "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'm'"
        await fails(at.ask(*range(9)), big, Kind.INVALID_ARGUMENT)
        await at.close()

    run(work())


@pytest.mark.parametrize("keep", [False, True])
def test_order_of_answers(keep):
    async def work():
        at = Stage(width=2, keep_order=keep)
        done = []
        asking = [at.ask(i) for i in (1, 2)]
        for task in asking:
            task.add_done_callback(lambda task: done.append(task.result()[0]))
        while len(at.hand.batches) < 2:
            await asyncio.sleep(0)
        at.hand.batches.reverse()
        await at.hand.answer()
        await at.turns()
        assert done == ([] if keep else [2])
        await at.hand.answer()
        await asyncio.gather(*asking)
        await at.turns()
        assert done == ([1, 2] if keep else [2, 1])
        await at.close()

    run(work())


@pytest.mark.parametrize("keep", [False, True])
def test_clients_that_leave_and_deadlines(keep):
    async def work():
        at = Stage(keep_order=keep)
        running, queued, staying = at.ask(1), at.ask(2), at.ask(3)
        await at.hand.batch()
        running.cancel()
        queued.cancel()
        with pytest.raises(DeadlineError):
            await at.ask(4, deadline_ns=1)
        await at.hand.answer()
        assert await at.hand.seen() == [3]
        await at.hand.answer()
        assert await staying == [3]
        await at.close()

    run(work())


def test_errors_closing_and_no_rows():
    async def work():
        at = Stage()
        assert await at.ask() == []
        failing = at.ask(1)
        await at.hand.answer(ServeError(Kind.INTERNAL, "kaboom"))
        await fails(failing, "kaboom", Kind.INTERNAL)
        running, queued = at.ask(1), at.ask(2)
        await at.hand.batch()
        at.scheduler.close()
        await fails(queued, "the model version was unloaded")
        await at.hand.answer()
        assert await running == [1]
        await fails(at.ask(3), "the model version was unloaded")

    run(work())
