"""Batches that run again by halves: how often at most, in which order, and on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fastserve.errors import Kind, ServeError
from fastserve.workers import isolation
from tests.workers.pair import Function, Pair, pair, specs

BAD = -1.0
COLUMNS = specs(x=("float32", (2,))), specs(y=("float32", (2,)))
SLABS = specs(x=("float32", (-1,))), specs(y=("float32", (-1,)))
FORMS = pytest.mark.parametrize("form", [COLUMNS, SLABS], ids=["columns", "slabs"])
pytestmark = pytest.mark.lingers  # a logged traceback keeps the arrays, and with them the arena


class Rerun:
    """`isolate` on numbers: those below zero raise. What was run, what failed, and how many rows counted."""

    def __init__(self, raised: Callable[[], Exception] = lambda: ValueError("below zero")) -> None:
        self.runs: list[list[float]] = []
        self.failed: dict[float, Exception] = {}
        self.counted: list[int] = []
        self._raised = raised

    def count_rerun(self, slot: int, rows: int, began_ns: int) -> None:
        self.counted.append(rows)

    def __call__(self, numbers: Sequence[float]) -> Rerun:
        first = self._raised()
        isolation.isolate(numbers, first, run=self._run, fail=self.failed.__setitem__)
        return self

    def _run(self, group: Sequence[float]) -> None:
        self.runs.append(list(group))
        with isolation.counted(self, 0, len(group)):  # type: ignore[arg-type]
            if min(group) < 0:
                raise self._raised()


def test_halves_in_their_order() -> None:
    done = Rerun()([1, 2, -3, 4])
    assert done.runs == [[1, 2], [-3, 4], [-3], [4]]
    assert list(done.failed) == [-3]
    assert done.counted == [2, 2, 1, 1]


def test_one_bad_request_in_many_costs_two_logarithms() -> None:
    done = Rerun()([BAD, *range(63)])
    assert len(done.runs) == 12
    assert list(done.failed) == [BAD]


def test_a_good_half_that_comes_last_is_found() -> None:
    """More runs in vain than FRUITLESS, but not before the first that answered somebody."""
    bad = [-float(n) for n in range(1, isolation.FRUITLESS + 1)]
    done = Rerun()([1.0, *bad, 2.0])
    assert sorted(done.failed) == sorted(bad)
    assert [2.0] in done.runs


def test_no_more_runs_than_may_be() -> None:
    numbers = [float(n) if n % 2 else -float(n) for n in range(1, 257)]
    done = Rerun()(numbers)
    assert len(done.runs) == isolation.MOST_RUNS
    answered = {number for group in done.runs if min(group) > 0 for number in group}
    assert answered
    assert answered | set(done.failed) == set(numbers), "each was told"
    assert not answered & set(done.failed)


def test_no_longer_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds a run: the third begins within five, the fourth would not."""
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(isolation.time, "monotonic", lambda: float(next(clock)))
    numbers = [1.0, *[-float(n) for n in range(2, 9)]]
    done = Rerun()(numbers)
    assert len(done.runs) == isolation.LONGEST_S // 2
    assert sorted({*done.failed, *(n for run in done.runs for n in run if min(run) > 0)}) == sorted(numbers)


def test_whose_words_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of the model's is; words it chose for its callers are not."""
    Rerun()([1, BAD])
    assert [record.message for record in caplog.records] == ["the model failed on one request of 2"]
    caplog.clear()
    done = Rerun(lambda: ServeError(Kind.INVALID_ARGUMENT, "not this"))([1, BAD])
    assert list(done.failed) == [BAD]
    assert not caplog.records


def rows(*values: float) -> np.ndarray[Any, Any]:
    return np.array([[v, 0.5] for v in values], np.float32)


def picky(inputs: dict[str, Any]) -> dict[str, Any]:
    if (inputs["x"] == BAD).any():
        raise ValueError("a bad row")
    return {"y": inputs["x"] * 2}


def answers(it: Pair, *leases: tuple[int, int]) -> list[Any]:
    """First numbers of each place's rows, or the kind it failed with."""
    found = []
    for lease, count in leases:
        ring = it.front
        if it.arena.geometry.dense and (status := ring.lease_status(lease)):
            ring.release(lease, count)
            found.append(status)
            continue
        got = it.get(lease, count)
        found.append(got[0] if isinstance(got, tuple) else got["y"][:, 0].tolist())
    return found


@FORMS
def test_a_request_that_failed_alone_is_not_run_again(form: Any) -> None:
    backend = Function(*form, picky)
    with pair(backend) as it:
        lease = it.put(x=rows(BAD, 1))
        it.step()
        assert len(backend.seen) == 1
        assert it.get(*lease)[0] == Kind.INTERNAL.value


def test_rows_of_who_left_are_not_run_again() -> None:
    """The batch failed for them alone; whoever stayed is answered."""
    backend = Function(*COLUMNS, picky)
    with pair(backend) as it:
        left, stayed = it.put(x=rows(BAD)), it.put(x=rows(3))
        assert it.front.drop(*left)
        it.step()
        assert answers(it, stayed) == [[6.0]]
        assert [len(seen["x"]) for seen in backend.seen] == [2, 1]


def test_what_runs_again_is_read_only_too() -> None:
    """As at first: a model that writes into it fails the same way, alone or not."""
    writable = []

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        writable.append(inputs["x"].flags.writeable)
        return picky(inputs)

    with pair(Function(*COLUMNS, run)) as it:
        leases = [it.put(x=rows(BAD)), it.put(x=rows(1)), it.put(x=rows(2))]
        it.step()
        assert answers(it, *leases)[1:] == [[2.0], [4.0]]
        assert len(writable) == 3
        assert not any(writable)


def test_parts_are_filled_to_allowed_sizes_with_their_last_row() -> None:
    backend = Function(*COLUMNS, picky)
    with pair(backend, max_batch_size=8, allowed_batch_sizes=[1, 4, 8]) as it:
        leases = [it.put(x=rows(n)) for n in (1, 2, 3, BAD, 5)]
        it.step()
        assert answers(it, *leases) == [[2.0], [4.0], [6.0], Kind.INTERNAL.value, [10.0]]
        firsts = [seen["x"][:, 0].tolist() for seen in backend.seen]
        assert firsts[:2] == [[1, 2, 3, BAD, 5, 5, 5, 5], [1, 2, 2, 2]]
        assert {len(seen) for seen in firsts} <= {1, 4, 8}


def test_a_part_whose_outputs_have_another_shape_fails() -> None:
    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        outputs = picky(inputs)
        return {"y": outputs["y"][:1]} if len(inputs["x"]) == 2 else outputs

    backend = Function(*COLUMNS, run)
    with pair(backend) as it:
        leases = [it.put(x=rows(1, 1)), it.put(x=rows(BAD)), it.put(x=rows(4))]
        it.step()
        assert answers(it, *leases) == [Kind.INTERNAL.value, Kind.INTERNAL.value, [8.0]]


def test_columns_say_who_failed_after_the_last_run() -> None:
    """A worker that dies between leaves a batch that another may run from its beginning."""
    told: list[int] = []

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        told.extend(it.front.lease_status(lease) for lease, _ in leases)
        return picky(inputs)

    with pair(Function(*COLUMNS, run)) as it:
        leases = [it.put(x=rows(BAD)), it.put(x=rows(2)), it.put(x=rows(3))]
        it.step()
        assert len(told) > 3
        assert not any(told)
        assert answers(it, *leases) == [Kind.INTERNAL.value, [4.0], [6.0]]
