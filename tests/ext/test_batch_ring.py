"""The batch ring against a plain oracle, and its state machine over every order of events."""

from __future__ import annotations

import mmap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import FULL, OVER, BatchRing
from tests.effort import examples
from tests.oracles.batch_ring import PlainRing

GONE = 14  # Kind.UNAVAILABLE


def make_arena(**layout: object) -> mmap.mmap:
    shape = {"slots": 2, "max_rows": 4, "inputs": [8], "outputs": [8], **layout}
    waits = {name: shape.pop(name, 0) for name in ("max_delay_ns", "max_queued")}
    memory = mmap.mmap(-1, batch_ring.measure(**shape))
    batch_ring.format_arena(memory, **waits, **shape)
    return memory


def rings(**layout: object) -> tuple[BatchRing, BatchRing]:
    memory = make_arena(**layout)
    return BatchRing(memory, front=0), BatchRing(memory, worker=0)


def states(ring: BatchRing) -> list[str]:
    return [ring.describe(i)[0] for i in range(ring.slots)]


def test_rows_land_in_one_contiguous_column():
    front, worker = rings()
    for value in (1, 2, 3):
        lease = front.reserve(1)
        front.input_rows(lease, 1, 0)[:] = bytes([value]) * 8
        front.commit(lease, 1)
    slot = worker.take()
    _, row_bytes = worker.column_span(slot, 0)
    assert (worker.batch_rows(slot), row_bytes) == (3, 8)
    assert worker.leases(slot) == [(0, 1, 0, 0), (1, 1, 0, 0), (2, 1, 0, 0)]
    assert bytes(front.input_rows(slot << 16, 3, 0)) == b"\1" * 8 + b"\2" * 8 + b"\3" * 8


def test_answers_reach_the_fronts_that_wait_and_release_frees_the_slot():
    memory = make_arena(fronts=2)
    first, second = BatchRing(memory, front=0), BatchRing(memory, front=1)
    worker = BatchRing(memory, worker=0)
    leases = [(ring, ring.reserve(n)) for ring, n in ((first, 1), (second, 2))]
    for (ring, lease), rows in zip(leases, (1, 2), strict=True):
        ring.commit(lease, rows)
    slot = worker.take()
    assert worker.publish(slot)
    assert first.drain() == second.drain() == [(slot, first.seq(slot))]
    first.release(leases[0][1], 1)
    assert states(first)[slot] == "done"
    second.release(leases[1][1], 2)
    assert states(first)[slot] == "free"
    assert first.outstanding() == 0


def test_a_full_batch_is_sealed_and_the_next_slot_opens():
    front, _ = rings()
    leases = [front.reserve(3), front.reserve(3)]
    assert [p >> 16 for p in leases] == [0, 1]
    assert front.reserve(2) == FULL
    assert states(front) == ["sealed", "sealed"]


def test_few_rows_lie_ahead_of_the_worker():
    """`ahead` rows beside a full batch for every worker; a batch that runs counts as one, whatever it has."""
    front, worker = rings(slots=8)
    front.ahead = 3

    def fill() -> int:
        taken = 0
        while (lease := front.reserve(1)) >= 0:
            front.commit(lease, 1)
            taken += 1
        return taken

    assert fill() == 4 + 3
    assert (front.near(1), front.near(1, 1), front.near(1, 2)) == (False, True, True)
    slot = worker.take()
    assert (worker.batch_rows(slot), fill()) == (4, 0), "the batch that runs is the worker's, three wait"
    second = front.reserve(1, True)
    assert second >= 0, "who has waited asks `near` first"
    front.abandon(second, 1)
    worker.publish(slot)
    assert fill() == 4, "before it has taken the next"
    front.ahead = -1
    assert fill() > 4


def test_a_large_request_is_let_in_when_nothing_waits():
    front, worker = rings(slots=4)
    front.ahead = 1
    assert front.reserve(4) >= 0
    assert front.reserve(4) == FULL
    front, worker = rings(slots=4)
    front.ahead = 0
    lease = front.reserve(3)
    front.commit(lease, 3)
    assert worker.take() >= 0
    assert (front.near(1), front.near(4)) == (False, False), "none ahead of a worker that is busy"


def test_who_comes_waits_behind_the_lines_of_any_front():
    memory = make_arena(fronts=3, slots=8)
    first, second, _ = fronts = [BatchRing(memory, front=number) for number in range(3)]
    for front in fronts:
        front.ahead = 4
    second.set_lined(True)
    assert first.reserve(1) == FULL
    assert first.reserve(1, True) >= 0
    first.ahead = -1
    assert first.reserve(1) >= 0, "one key alone waits for nobody"
    first.ahead = 4
    BatchRing(memory, front=0).reclaim_front(1)
    assert first.reserve(1) >= 0


def test_the_compute_of_a_row():
    front, worker = rings()
    lease = front.reserve(3)
    front.commit(lease, 3)
    slot = worker.take()
    worker.start_run(slot)
    time.sleep(0.003)
    worker.end_run(slot)
    worker.publish(slot)
    _, _, run, ran, _ = front.times_ns(slot)
    row_ns = front.ended(slot)[4]
    assert row_ns == pytest.approx((ran - run) / 3)
    assert row_ns >= 1e6


def test_abandoned_rows_go_back_or_run_as_zeros():
    front, worker = rings()
    first, second, third = front.reserve(1), front.reserve(1), front.reserve(1)
    front.input_rows(second, 1, 0)[:] = b"x" * 8
    front.abandon(third, 1)
    assert front.describe(0)[1] == 2, "the last rows of an open batch are given back"
    front.abandon(second, 1)
    assert front.describe(0)[1] == 1
    front.commit(first, 1)
    again, placeholder = front.reserve(1), front.reserve(1)
    front.input_rows(again, 1, 0)[:] = b"y" * 8
    front.reserve(1)
    front.abandon(again, 1)
    assert bytes(front.input_rows(again, 1, 0)) == bytes(8), "a hole is zeros, not somebody's numbers"
    assert worker.take() == -1, "rows that are still being written hold the batch"
    front.commit(placeholder, 1)


def test_a_dropped_place_is_not_answered_and_costs_no_release():
    front, worker = rings()
    kept, dropped = front.reserve(1), front.reserve(1)
    front.commit(kept, 1)
    front.commit(dropped, 1)
    assert front.drop(dropped, 1)
    slot = worker.take()
    assert worker.leases(slot) == [(0, 1, 0, 0)]
    worker.publish(slot)
    assert not front.drop(kept, 1), "answered already: release it"
    front.release(kept, 1)
    assert front.outstanding() == 0


def test_a_batch_everybody_left_is_freed_without_an_answer():
    front, worker = rings()
    lease = front.reserve(2)
    front.commit(lease, 2)
    slot = worker.take()
    assert front.drop(lease, 2)
    assert worker.leases(slot) == []
    assert not worker.publish(slot)
    assert front.drain() == [(-1, 0)], "nobody is answered, but callers may wait for the room"
    assert front.outstanding() == 0


def test_a_full_batch_that_was_abandoned_is_free_at_once():
    front, worker = rings(max_queued=4)
    for _ in range(9):
        front.abandon(front.reserve(4), 4)
        assert (states(front), front.rows_left()) == (["free", "free"], 4)
    assert worker.take() == -1


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_rows_that_were_abandoned_do_not_count_as_waiting(kept):
    front, worker = rings(max_queued=4)
    stays, goes = front.reserve(kept), front.reserve(4 - kept)
    assert (states(front)[0], front.reserve(1)) == ("sealed", OVER)
    front.abandon(goes, 4 - kept)
    assert front.rows_left() == 4 - kept
    front.commit(stays, kept)
    assert (front.describe(0)[:3], front.queued()) == (("ready", 4, 4), kept)
    assert front.reserve(4 - kept) >= 0
    assert front.reserve(1) == OVER
    assert worker.batch_rows(worker.take()) == 4, "they run as zeros"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_caller_that_leaves_makes_room(sealed):
    front, worker = rings(max_queued=4)
    leases = [front.reserve(1) for _ in range(4 if sealed else 3)]
    for lease in leases:
        front.commit(lease, 1)
    for left, lease in enumerate(leases[:-1], 1):
        assert front.drop(lease, 1)
        assert front.rows_left() == 4 - len(leases) + left
    assert front.drop(leases[-1], 1)
    assert (states(front)[0], front.rows_left(), worker.take()) == ("free", 4, -1)


def test_an_open_batch_of_holes_is_free():
    front, worker = rings()
    first, second = front.reserve(2), front.reserve(1)
    front.abandon(first, 2)
    assert states(front)[0] == "open", "somebody writes the second"
    front.abandon(second, 1)
    assert (states(front)[0], worker.take()) == ("free", -1)


def test_what_nobody_waits_for_is_not_run_after_its_worker_died():
    front, worker = rings()
    lease = front.reserve(4)
    front.commit(lease, 4)
    slot = worker.take()
    assert front.drop(lease, 4)
    assert front.worker_died(0, 2, GONE, "gone") == (0, 0)
    assert states(front)[slot] == "free"


def test_a_delayed_batch_waits_for_company_but_not_when_full():
    front, worker = rings(max_delay_ns=3_600_000_000_000)
    for _ in range(3):
        front.commit(front.reserve(1), 1)
    assert worker.take() == -1
    front.commit(front.reserve(1), 1)
    assert worker.take() == 0


def test_failure_text_is_kept_and_cut():
    front, worker = rings()
    lease = front.reserve(1)
    front.commit(lease, 1)
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
    lease = front.reserve(1)
    for call in (
        lambda: front.input_rows(lease, 5, 0),
        lambda: front.input_rows(lease, 1, 1),
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
            lease, number = front.reserve(rows), oracle.reserve(rows)
            assert (lease == FULL) == (number is None)
            if number is not None:
                place_of[number] = lease
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
                assert [p[:2] for p in worker.leases(slot)] == [
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


@pytest.mark.parametrize("seal", ["filled", "by hand", "too small", "by a worker"])
def test_what_forming_took_ends_with_the_sealing(seal):
    front, worker = rings(max_rows=4)
    rows = 4 if seal == "filled" else 3
    lease = front.reserve(1)
    front.commit(lease, 1)
    began = time.monotonic_ns()
    pause_ns = 20_000_000
    while time.monotonic_ns() < began + pause_ns:
        pass
    front.commit(front.reserve(rows - 1), rows - 1)
    if seal == "by hand":
        front.seal(lease)
    elif seal == "too small":
        front.abandon(front.reserve(2), 2)
    sealed = time.monotonic_ns()
    while time.monotonic_ns() < sealed + pause_ns:
        pass
    slot = worker.take()
    first, taken, *_ = front.times_ns(slot)
    queue_ns, formed_ns, *_ = front.ended(slot)[5]
    assert queue_ns == taken - first
    if seal == "by a worker":
        assert 2 * pause_ns <= formed_ns <= taken - first
    else:
        assert pause_ns <= formed_ns <= sealed - first
        assert taken - first >= 2 * pause_ns


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
    front, _ = rings()
    front.count(batch_ring.REJECTED)
    front.count(batch_ring.OTHER, 7)
    lease = front.reserve(1)
    front.commit(lease, 1)
    front.backdate(lease, time.monotonic_ns() - 3_000_000_000)
    assert front.drop(lease, 1, batch_ring.CANCELED)
    rejected, canceled, backend, other = front.counters()[0][5:]
    assert (rejected, backend, other) == ((1, 0), (0, 0), (1, 7))
    assert canceled[0] == 1
    assert canceled[1] >= 3_000_000_000
    assert front.runs() == [], "nobody waited and nothing ran"
    with pytest.raises(ValueError, match="no such end"):
        front.count(0)
