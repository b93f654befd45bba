"""The batch ring against a plain oracle, and its state machine over every order of events."""

from __future__ import annotations

import mmap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import FULL, BatchRing
from tests.effort import examples
from tests.oracles.batch_ring import PlainRing

GONE = 14  # Kind.UNAVAILABLE


def make_arena(**layout: object) -> mmap.mmap:
    shape = {"slots": 2, "max_rows": 4, "inputs": [8], "outputs": [8], **layout}
    delay = shape.pop("max_delay_ns", 0)
    memory = mmap.mmap(-1, batch_ring.measure(**shape))
    batch_ring.format_arena(memory, max_delay_ns=delay, **shape)
    return memory


def rings(**layout: object) -> tuple[BatchRing, BatchRing]:
    memory = make_arena(**layout)
    return BatchRing(memory, front=0), BatchRing(memory, worker=0)


def states(ring: BatchRing) -> list[str]:
    return [ring.describe(i)[0] for i in range(ring.slots)]


def test_rows_land_in_one_contiguous_column():
    front, worker = rings()
    for value in (1, 2, 3):
        place = front.reserve(1)
        front.input_rows(place, 1, 0)[:] = bytes([value]) * 8
        front.commit(place, 1)
    slot = worker.take()
    _, row_bytes = worker.column_span(slot, 0)
    assert (worker.batch_rows(slot), row_bytes) == (3, 8)
    assert worker.places(slot) == [(0, 1, 0, 0), (1, 1, 0, 0), (2, 1, 0, 0)]
    assert bytes(front.input_rows(slot << 16, 3, 0)) == b"\1" * 8 + b"\2" * 8 + b"\3" * 8


def test_answers_reach_the_fronts_that_wait_and_release_frees_the_slot():
    memory = make_arena(fronts=2)
    first, second = BatchRing(memory, front=0), BatchRing(memory, front=1)
    worker = BatchRing(memory, worker=0)
    places = [(ring, ring.reserve(n)) for ring, n in ((first, 1), (second, 2))]
    for (ring, place), rows in zip(places, (1, 2), strict=True):
        ring.commit(place, rows)
    slot = worker.take()
    assert worker.publish(slot)
    assert first.drain() == second.drain() == [(slot, first.seq(slot))]
    first.release(places[0][1], 1)
    assert states(first)[slot] == "done"
    second.release(places[1][1], 2)
    assert states(first)[slot] == "free"
    assert first.outstanding() == 0


def test_a_full_batch_is_sealed_and_the_next_slot_opens():
    front, _ = rings()
    places = [front.reserve(3), front.reserve(3)]
    assert [p >> 16 for p in places] == [0, 1]
    assert front.reserve(2) == FULL
    assert states(front) == ["sealed", "sealed"]


def test_abandoned_rows_go_back_or_run_as_zeros():
    front, worker = rings()
    first, second, third = front.reserve(1), front.reserve(1), front.reserve(1)
    front.input_rows(second, 1, 0)[:] = b"x" * 8
    front.abandon(third, 1)
    assert front.describe(0)[1] == 2, "the last rows of an open batch are given back"
    front.abandon(second, 1)
    assert front.describe(0)[1] == 1
    front.commit(first, 1)
    again, hole = front.reserve(1), front.reserve(1)
    front.input_rows(again, 1, 0)[:] = b"y" * 8
    front.reserve(1)
    front.abandon(again, 1)
    assert bytes(front.input_rows(again, 1, 0)) == bytes(8), "a hole is zeros, not somebody's numbers"
    assert worker.take() == -1, "rows that are still being written hold the batch"
    front.commit(hole, 1)


def test_a_dropped_place_is_not_answered_and_costs_no_release():
    front, worker = rings()
    kept, dropped = front.reserve(1), front.reserve(1)
    front.commit(kept, 1)
    front.commit(dropped, 1)
    assert front.drop(dropped)
    slot = worker.take()
    assert worker.places(slot) == [(0, 1, 0, 0)]
    worker.publish(slot)
    assert not front.drop(kept), "answered already: release it"
    front.release(kept, 1)
    assert front.outstanding() == 0


def test_a_batch_everybody_left_is_freed_without_an_answer():
    front, worker = rings()
    place = front.reserve(2)
    front.commit(place, 2)
    assert front.drop(place)
    slot = worker.take()
    assert worker.places(slot) == []
    assert not worker.publish(slot)
    assert front.drain() == [(-1, 0)], "nobody is answered, but callers may wait for the room"
    assert front.outstanding() == 0


def test_a_delayed_batch_waits_for_company_but_not_when_full():
    front, worker = rings(max_delay_ns=3_600_000_000_000)
    for _ in range(3):
        front.commit(front.reserve(1), 1)
    assert worker.take() == -1
    front.commit(front.reserve(1), 1)
    assert worker.take() == 0


def test_failure_text_is_kept_and_cut():
    front, worker = rings()
    place = front.reserve(1)
    front.commit(place, 1)
    slot = worker.take()
    worker.fail(slot, 3, "ä" * 1000)
    worker.publish(slot)
    kind, text = front.failure(slot)
    assert (kind, text[:3]) == (3, "äää")
    assert len(text) <= 384


def test_bounds_are_checked_at_the_door():
    front, _ = rings()
    with pytest.raises(ValueError, match=r"1\.\.4 rows"):
        front.reserve(5)
    place = front.reserve(1)
    for call in (
        lambda: front.input_rows(place, 5, 0),
        lambda: front.input_rows(place, 1, 1),
        lambda: front.input_rows(9 << 16, 1, 0),
        lambda: front.commit(-1, 1),
        lambda: front.times_ns(7),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="no arena"):
        BatchRing(bytearray(1 << 20), front=0)


VERBS = st.sampled_from(["reserve", "commit", "take", "release"])


@examples(200)
@given(st.lists(st.tuples(VERBS, st.integers(0, 7)), max_size=60))
def test_agrees_with_the_oracle(events):
    """Random orders of one front and one worker: same batches, in the same order, nothing left over."""
    front, worker = rings(slots=2, max_rows=4)
    oracle = PlainRing(max_rows=4, slots=2)
    place_of: dict[int, int] = {}
    running: list[tuple[int, list[int]]] = []
    failed: set[int] = set()
    for event, choice in events:
        if event == "reserve":
            rows = choice % 4 + 1
            place, number = front.reserve(rows), oracle.reserve(rows)
            assert (place == FULL) == (number is None)
            if number is not None:
                place_of[number] = place
        elif event == "commit":
            ready = [n for n, s in enumerate(oracle.state) if s == "reserved"]
            if ready:
                number = ready[choice % len(ready)]
                front.commit(place_of[number], oracle.rows_of[number])
                oracle.state[number] = "committed"
        elif event == "take":
            slot, numbers = worker.take(), oracle.take()
            assert (slot < 0) == (numbers is None)
            if numbers is not None:
                assert [p[:2] for p in worker.places(slot)] == [
                    (place_of[n] & 0xFFFF, oracle.rows_of[n]) for n in numbers
                ]
                running.append((slot, numbers))
        elif running:
            slot, numbers = running.pop(choice % len(running))
            worker.start_run(slot)
            if choice % 2:
                worker.fail(slot, GONE, "gone")
                failed.add(numbers[0])
            assert worker.publish(slot)
            for number in numbers:
                front.release(place_of[number], oracle.rows_of[number])
                oracle.state[number] = "released"
        assert front.pending() == oracle.pending()
        assert counted(front) == oracle.runs(failed)


def counted(ring: BatchRing) -> tuple[dict[int, int], int, int, int]:
    counters, rows, _ = ring.counters()
    by_name = dict(zip(batch_ring.TALLIES, counters, strict=True))
    assert by_name["queue"][0] == by_name["compute_infer"][0] == by_name["success"][0]
    return {run[0]: run[1] for run in ring.runs()}, by_name["success"][0], rows, by_name["BACKEND"][0]


def test_counters_say_how_long_each_part_took():
    front, worker = rings()
    first, second = front.reserve(1), front.reserve(2)
    front.commit(first, 1)
    front.commit(second, 2)
    long_ago = time.monotonic_ns() - 5_000_000_000
    front.backdate(second, long_ago)
    slot = worker.take()
    worker.start_run(slot)
    worker.end_run(slot)
    worker.publish(slot)
    began, taken, run, ran, done = front.times_ns(slot)
    counters, rows, last_ns = front.counters()
    success, queue, inputs, infer, output = counters[:5]
    assert (rows, last_ns) == (3, done)
    assert success == (2, 2 * done - began - long_ago)
    assert queue == (2, 2 * taken - began - long_ago)
    assert inputs == (2, 2 * (run - taken))
    assert infer == (2, 2 * (ran - run))
    assert output == (2, 2 * (done - ran))
    assert front.runs() == [(3, 1, run - taken, ran - run, done - ran)]


def test_a_row_that_is_no_request_is_not_counted():
    front, worker = rings()
    mine, filler = front.reserve(1), front.reserve(1)
    front.commit(mine, 1)
    front.commit(filler, 1)
    front.backdate(filler, 0)
    assert front.pending() == 1
    slot = worker.take()
    worker.start_run(slot)
    worker.publish(slot)
    counters, rows, _ = front.counters()
    assert (counters[0][0], rows, front.runs()[0][:2]) == (1, 1, (2, 1))


def test_ends_without_an_answer_are_counted_where_they_are_known():
    front, worker = rings()
    front.count(batch_ring.REJECTED)
    front.count(batch_ring.OTHER, 7)
    place = front.reserve(1)
    front.commit(place, 1)
    front.backdate(place, time.monotonic_ns() - 3_000_000_000)
    front.count(batch_ring.CANCELED, 0, place)
    assert front.drop(place)
    worker.publish(worker.take())
    rejected, canceled, backend, other = front.counters()[0][5:]
    assert (rejected, backend, other) == ((1, 0), (0, 0), (1, 7))
    assert canceled[0] == 1
    assert canceled[1] >= 3_000_000_000
    assert front.runs() == [], "nobody waited and nothing ran"
    with pytest.raises(ValueError, match="no such end"):
        front.count(0)


# --- every order of events ----------------------------------------------------------------------------
#
# Two fronts, two workers, a ring of two slots of two rows. Each actor is a small program over the real
# compiled verbs; the search takes every order of their steps by saving and restoring the whole arena.
# A front or a worker may be killed between any two steps.


# What each step of a program may do to a slot, as chains of the table's own moves.
VERB_MOVES = {
    "front 0": {("free", "open"), ("free", "sealed"), ("open", "sealed"), ("open", "ready")},  # reserve
    "front 1": {("sealed", "ready")},  # commit
    "front 2": {("done", "free")},  # release
    "worker 0": {("ready", "running"), ("open", "running")},  # take
    "worker 1": {("running", "done"), ("running", "free")},  # publish
    "kill": {("running", "ready"), ("sealed", "ready"), ("done", "free")},
}


class Search:
    """Depth-first over all interleavings; a state is the arena's words plus where each actor stands."""

    def __init__(self, rows: tuple[int, int], *, kill: str = "") -> None:
        self.memory = make_arena(fronts=2, workers=2, max_rows=2)
        self.claims = [bytearray(8 * 2 * 2) for _ in range(4)]  # slots x rows
        lent = [memoryview(claims).cast("Q") for claims in self.claims]
        self.fronts = [BatchRing(self.memory, front=i, claims=lent[i]) for i in range(2)]
        self.workers = [BatchRing(self.memory, worker=i, claims=lent[2 + i]) for i in range(2)]
        self.rows = rows
        self.kill = kill
        self.seen: set[object] = set()
        self.moves_seen: set[tuple[str, str]] = set()
        self.ends = 0

    def run(self) -> None:
        # An actor's place in its program, and what it holds. front: 0 reserve, 1 commit, 2 wait, 3 done.
        self.step({"front0": (0, -1), "front1": (0, -1), "worker0": (0, -1), "worker1": (0, -1), "dead": ""})

    def step(self, actors: dict) -> None:
        key = (self.picture(), tuple(sorted(actors.items())))
        if key in self.seen:
            return
        self.seen.add(key)
        before = [bytes(part) for part in (self.memory, *self.claims)]
        progressed = False
        for name in ("front0", "front1", "worker0", "worker1", "killer"):
            was = states(self.fronts[0])
            after = self.advance(name, actors)
            if after is not None:
                progressed = True
                verb = "kill" if name == "killer" else f"{name[:-1]} {actors[name][0]}"
                self.check_moves(verb, was)
                self.step(after)
                for part, was_in_it in zip((self.memory, *self.claims), before, strict=True):
                    part[:] = was_in_it
        if not progressed:
            self.check_end(actors)

    def check_moves(self, verb: str, was: list[str]) -> None:
        for move in zip(was, states(self.fronts[0]), strict=True):
            assert move[0] == move[1] or move in VERB_MOVES[verb], f"{verb} moved a slot {move}"
            self.moves_seen.add(move)

    def picture(self) -> tuple:
        ring = self.fronts[0]
        return tuple((*ring.describe(i), tuple(ring.places(i))) for i in range(ring.slots))

    def advance(self, name: str, actors: dict) -> dict | None:
        if name == "killer":
            return self.do_kill(actors)
        if actors["dead"] == name:
            return None
        number = int(name[-1])
        stage, held = actors[name]
        do = self.do_front if name.startswith("front") else self.do_worker
        new = do(number, stage, held)
        return None if new is None else {**actors, name: new}

    def do_front(self, number: int, stage: int, place: int) -> tuple[int, int] | None:
        ring, rows = self.fronts[number], self.rows[number]
        if stage == 0:
            place = ring.reserve(rows)
            return None if place == FULL else (1, place)
        if stage == 1:
            ring.input_rows(place, rows, 0)[:] = bytes([number + 1]) * 8 * rows
            ring.commit(place, rows)
            return 2, place
        if stage == 2:
            if ring.describe(place >> 16)[0] != "done":
                return None
            got = bytes(ring.output_rows(place, rows, 0))
            assert got == bytes([number + 1]) * 8 * rows, "a front got another's rows"
            ring.release(place, rows)
            return 3, -1
        return None

    def do_worker(self, number: int, stage: int, slot: int) -> tuple[int, int] | None:
        ring = self.workers[number]
        if stage == 0:
            slot = ring.take()
            return None if slot < 0 else (1, slot)
        at, _ = ring.column_span(slot, 0)
        to, _ = ring.column_span(slot, 0, True)
        size = 8 * ring.batch_rows(slot)
        self.memory[to : to + size] = self.memory[at : at + size]
        ring.publish(slot)
        return 0, -1

    def do_kill(self, actors: dict) -> dict | None:
        victim = self.kill
        if not victim or actors["dead"] or actors[victim][0] == 3:
            return None
        if victim.startswith("worker"):
            self.fronts[0].worker_died(int(victim[-1]), 2, GONE, "gone")
        else:
            while self.fronts[0].reclaim_front(int(victim[-1])):
                pass
        return {**actors, "dead": victim}

    def check_end(self, actors: dict) -> None:
        self.ends += 1
        dead = actors["dead"]
        if dead.startswith("front"):
            while self.fronts[0].reclaim_front(int(dead[-1])):
                pass
            for worker in self.workers:
                while (slot := worker.take()) >= 0:
                    worker.publish(slot)
        for name in ("front0", "front1"):
            assert name == dead or actors[name][0] == 3, f"{name} was never answered: {self.picture()}"
        assert self.fronts[0].outstanding() == 0, f"rows leaked: {self.picture()}"


@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kill", ["", "front1", "worker1"])
def test_every_interleaving_answers_everybody_once_and_leaks_nothing(rows, kill):
    search = Search(rows, kill=kill)
    search.run()
    assert search.ends > 0
    assert len(search.seen) > 30
    assert ("done", "free") in search.moves_seen


def leads_to(start: str, end: str) -> bool:
    """Whether the table has a chain of moves from one state to another."""
    reached, table = {start}, batch_ring.moves()
    while True:
        more = {to for (state, _), targets in table.items() if state in reached for to in targets} - reached
        if not more:
            return end in reached
        reached |= more


def test_what_verbs_do_is_what_the_table_allows():
    table = batch_ring.moves()
    direct = {(state, to) for (state, _), targets in table.items() for to in targets}
    for verb, moves in VERB_MOVES.items():
        for start, end in moves:
            through = {middle for a, middle in direct if a == start}
            near = {c for a, c in direct if a in through}
            far = {c for a, c in direct if a in near}
            assert end in through | near | far, f"{verb}: {start} -> {end} is no chain of the table"


def test_the_table_has_no_dead_ends_and_names_every_event():
    table = batch_ring.moves()
    assert {event for _, event in table} == set(batch_ring.EVENTS)
    assert {state for state, _ in table} == set(batch_ring.STATES)
    assert all(leads_to(state, "free") for state in batch_ring.STATES), "every slot comes back"
    assert table["ready", "take"] == {"running"}
    assert "running" not in {t for (s, e), ts in table.items() for t in ts if e != "take"}
