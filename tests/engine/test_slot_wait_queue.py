"""Requests that wait for a slot: lines of keys, in whose turn, and what several fronts do together."""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import BatchRing
from fastserve._ext.shared_metrics import Section, file_bytes, lay_out
from fastserve.engine import share_board
from fastserve.engine.share_board import NOBODY, STALE_S, ModelTurns, ShareBoard
from fastserve.engine.slot_wait_queue import KeyLines, SlotWaiter, SlotWaitQueue
from fastserve.errors import Kind, ServeError

SIZES = (64, 4096, 256)
Given = list[Any]


def boards(count: int) -> list[ShareBoard]:
    """The boards of several fronts over one memory."""
    memory = bytearray(file_bytes(count, *SIZES))
    lay_out(memory, count, *SIZES)
    found = [ShareBoard(number) for number in range(count)]
    for board in found:
        board.open([Section(memory, number) for number in range(count)])
    return found


def account(name: str, weight: float = 1.0) -> Any:
    return SimpleNamespace(name=name, weight=weight)


def waiter(who: Any, rows: int = 1) -> SlotWaiter:
    return SlotWaiter(rows, lambda lease: None, who)


class FairOracle:
    """Start-time fair queueing over a list: every request that waits, in order of arrival."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights, self.clock = weights, 0.0
        self.waiting: list[SlotWaiter] = []
        self.position = dict.fromkeys(weights, 0.0)
        self.since: dict[str, float] = {}

    def join(self, one: SlotWaiter) -> None:
        if all(other.key != one.key for other in self.waiting):
            self.since[one.key] = self.clock
        self.waiting.append(one)

    def start(self, key: str) -> float:
        return max(self.position[key], self.since[key])

    def serve(self, one: SlotWaiter) -> None:
        """Take what the lines have chosen: the oldest request of one of the keys that have had least."""
        least = min(self.start(other.key) for other in self.waiting)
        assert self.start(one.key) == pytest.approx(least)
        assert one is next(other for other in self.waiting if other.key == one.key)
        self.waiting.remove(one)
        self.clock = max(self.clock, self.start(one.key))
        self.position[one.key] = self.start(one.key) + one.rows / self.weights[one.key]


WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 8)),
        st.tuples(st.just("serve"), st.just(""), st.just(0)),
        st.tuples(st.just("leave"), st.just(""), st.integers(0, 50)),
    ),
    max_size=120,
)


@given(steps)
def test_lines_serve_what_start_time_fair_queueing_does(taken: list[tuple[str, str, int]]) -> None:
    lines, oracle = KeyLines(), FairOracle(WEIGHTS)
    lines.turns = boards(1)[0].of("m")
    for what, key, number in taken:
        if what == "join":
            one = waiter(account(key, WEIGHTS[key]), number)
            lines.join(one)
            oracle.join(one)
        elif what == "serve" and oracle.waiting:
            oracle.serve(lines.serve())
        elif what == "leave" and oracle.waiting:
            one = oracle.waiting.pop(number % len(oracle.waiting))
            assert lines.leave(one)
            assert not lines.leave(one)
        assert lines.rows == sum(other.rows for other in oracle.waiting)
        assert set(lines) == set(oracle.waiting)
        assert len(lines) == len({other.key for other in oracle.waiting})


def test_without_keys_it_is_one_fifo() -> None:
    lines = KeyLines()
    given_ = [waiter(None, rows) for rows in (3, 1, 8, 2)]
    assert [lines.join(one) for one in given_] == [True, False, False, False]
    assert [lines.serve() for _ in given_] == given_
    assert (len(lines), lines.rows) == (0, 0)


def test_a_key_that_was_away_has_saved_up_nothing() -> None:
    lines = KeyLines()
    lines.turns = boards(1)[0].of("m")
    for _ in range(100):
        lines.join(waiter(account("busy")))
        lines.serve()
    for _ in range(10):
        lines.join(waiter(account("busy")))
        lines.join(waiter(account("late")))
    first = Counter(lines.serve().key for _ in range(10))
    assert first == {"busy": 5, "late": 5}


def test_the_last_of_the_longest_line_makes_room() -> None:
    lines = KeyLines()
    many = [waiter(account("many")) for _ in range(8)]
    heavy = [waiter(account("heavy", 4.0)) for _ in range(16)]
    for one in (*many, *heavy):
        lines.join(one)
    assert lines.last_of_most("few", 2, 1.0) is many[-1]
    assert lines.last_of_most("few", 8, 1.0) is None  # it would have as much itself
    assert lines.last_of_most("many", 1, 1.0) is None


def test_new_lines_go_before_their_turn_in_the_order_in_which_they_began() -> None:
    lines = KeyLines()
    lines.turns = boards(1)[0].of("m")
    for name in ("old", "old", "a", "b", "b"):
        lines.join(waiter(account(name)))
    began = [line.began_ns for line in lines._lines.values()]
    first = lines.first_new(began[0])
    assert first is not None
    assert first.key == "a"
    lines.turns.serve("a", 70.0, 1.0)
    clock = lines.turns.clock
    assert lines.serve(first).key == "a"
    assert (lines.turns.position("a"), lines.turns.clock) == (72.0, clock)
    second = lines.first_new(began[0])
    assert second is not None
    assert second.key == "b"
    assert [lines.serve(second).key for _ in range(2)] == ["b", "b"]
    assert lines.first_new(began[0]) is None
    assert lines.serve().key == "old"


def test_the_rows_kept_for_new_lines_are_theirs_whoever_is_next() -> None:
    """A key whose second request comes while a batch runs is behind the flood, which may not have the rows
    that are kept. Both of its requests run in the next batch."""
    shape = {"slots": 4, "max_rows": 8, "inputs": [8], "outputs": [8], "workers": 1}
    memory = mmap.mmap(-1, batch_ring.measure(**shape))
    batch_ring.format_arena(memory, **shape)
    ring, worker = BatchRing(memory, front=0), BatchRing(memory, worker=0)
    given_: list[str] = []

    async def work() -> None:
        room = SlotWaitQueue(ring, 0, lambda: None)

        def stand(name: str) -> None:
            def take(lease: Any) -> None:
                given_.append(name)
                ring.commit(lease, 1)

            room.stand(1, take, account(name))

        async def look() -> None:
            room.look_soon()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        room.share(boards(1)[0].of("m"), 2, 10**12)
        for _ in range(60):
            stand("flood")
        room._lines._lines["flood"].began_ns -= 2 * 10**12  # it has waited for long
        await look()
        for _ in range(4):
            slot = worker.take()
            assert slot >= 0
            await look()
            flood = given_.count("flood")
            stand("light")
            stand("light")
            await look()
            assert given_[-2:] == ["light", "light"]
            assert given_.count("flood") == flood
            assert ring.queued() == 8
            worker.publish(slot)
            for lease in range(slot << 16, (slot << 16) + 8):
                ring.release(lease, 1)
        room.close(lambda: ServeError(Kind.UNAVAILABLE, "over"))

    asyncio.run(work())


class Fronts:
    """Lines of one model at several fronts, served in any order as their queues do."""

    def __init__(self, count: int, quantum: float) -> None:
        self.turns = [board.of("m") for board in boards(count)]
        self.lines = []
        self.quantum = quantum
        for turns in self.turns:
            lines = KeyLines()
            lines.turns = turns
            self.lines.append(lines)

    def tell(self, front: int) -> None:
        lines = self.lines[front]
        self.turns[front].tell(lines.first()[1] if lines else NOBODY)

    def look(self, front: int) -> SlotWaiter | None:
        """One free slot, and this front looks: what it gives, or None where another goes before."""
        lines = self.lines[front]
        self.tell(front)
        if not lines or self.turns[front].find_needier(lines.first()[1] - self.quantum) >= 0:
            return None
        served = lines.serve()
        self.tell(front)
        return served


@given(st.lists(st.integers(0, 2), min_size=200, max_size=200), st.integers(1, 3))
def test_all_fronts_together_give_what_weights_say(looks: list[int], spread: int) -> None:
    """One key is everywhere, the other at `spread` fronts; whoever looks, the sum is that of one front."""
    fronts = Fronts(3, quantum=2.0)
    weights, got = {"a": 3.0, "b": 1.0}, Counter({"a": 0, "b": 0})
    for front in range(3):
        for key in ["a", "b"] if front < spread else ["a"]:
            for _ in range(200):
                fronts.lines[front].join(waiter(account(key, weights[key])))
        fronts.tell(front)
    for front in looks:
        served = fronts.look(front)
        if served is not None:
            got[served.key] += 1
    held_back = sum(got.values())
    assert abs(got["a"] / 3 - got["b"]) <= 2 + 1 / 3 + 1 + 2 / 3
    if set(looks) == {0, 1, 2}:
        assert held_back


def test_nobody_waits_for_a_front_that_gives_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(share_board, "monotonic", lambda: now[0])
    one, other = (board.of("m") for board in boards(2))
    other.tell(0.0)
    assert one.find_needier(1.0) == 1
    assert one.find_needier(0.0) == -1
    now[0] += STALE_S * 1.1
    assert one.find_needier(1.0) == -1
    other.tell(0.0)
    assert one.find_needier(1.0) == 1
    other.tell(NOBODY)
    assert one.find_needier(1.0) == -1


def test_a_front_that_has_died_waits_for_nothing_and_its_successor_goes_on() -> None:
    owner, dead, third = boards(3)
    turns = dead.of("m")
    turns.tell(0.0)
    turns.serve("a", 5.0, 2.0)
    assert owner.of("m").find_needier(1.0) == 1
    owner.front_ended(1)
    assert third.of("m").find_needier(1.0) == -1
    again = ShareBoard(1)
    again.open(owner.sections)
    assert again.of("m").position("a") == 7.0
    assert (owner.of("m").position("a"), owner.of("m").clock) == (7.0, 5.0)
    assert len(owner.sections[1]) == 2  # its rows are those of before


def test_who_is_active_where() -> None:
    one, other = (board.of("m") for board in boards(2))
    assert not one.others_active("a")
    other.note_active("a", several=False, light_rate=2.5)
    assert not one.others_active("a")
    assert one.others_active("b")
    assert one.light_rate == 2.5
    other.note_active("a", several=True, light_rate=0.0)
    assert one.others_active("a")
    assert not other.others_active("a")


def test_more_keys_than_there_is_room_for() -> None:
    board = boards(1)[0]
    turns: ModelTurns = board.of("m")
    for number in range(SIZES[0] * 2):
        turns.serve(f"k{number}", float(number), 1.0)
    assert [turns.position(f"k{number}") for number in (0, 5, 100)] == [1.0, 6.0, 101.0]


def test_a_front_that_has_no_shared_memory_yet() -> None:
    board = ShareBoard(2)
    board.of("m").serve("a", 1.0, 1.0)
    assert board.of("m").position("a") == 2.0
    shared = boards(3)[0]
    board.open(shared.sections)
    assert board.of("m").position("a") == 0.0
    board.of("m").serve("a", 1.0, 1.0)
    assert shared.of("m").position("a") == 2.0
