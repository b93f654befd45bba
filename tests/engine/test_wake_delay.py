"""When a worker is woken: at the end of a turn of the loop; on one core when a turn brings nothing more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from fastserve.engine import batch_queue
from fastserve.engine.batch_queue import ONE_CORE_PATIENCE_NS, BatchQueue, QueueMetrics
from fastserve.metrics.registry import Registry
from fastserve.workers.arena import Arena, Geometry

TURN_NS = 10_000


class Turns:
    """A queue whose loop is run by hand: each turn takes as long, and brings as many calls, as is said."""

    def __init__(self, registry: Registry, cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000_000
        self.kicks = 0
        self.soon: list[Callable[[], object]] = []
        monkeypatch.setattr(batch_queue, "time", SimpleNamespace(monotonic_ns=lambda: self.now_ns))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
        self.arena = Arena.create(Geometry(2, 4, (4,), (4,), 0, 0, 1, 1, False))
        self.queue = BatchQueue(self.arena, 0, {}, {}, QueueMetrics(registry, "m", 1, 0, 4))
        self.queue._loop = SimpleNamespace(call_soon=self.call_soon)  # type: ignore[assignment]
        self.queue.ring = SimpleNamespace(wake_workers=self.wake_workers)

    def call_soon(self, call: Callable[[], object]) -> object:
        self.soon.append(call)
        return call

    def wake_workers(self) -> None:
        self.kicks += 1

    def first(self) -> None:
        """The call that a turn begins with."""
        self.queue.submitted += 1
        self.queue.wake_soon()

    def turn(self, *, took_ns: int = TURN_NS, calls: int = 0) -> int:
        """How often workers were woken by the end of this turn, which brings calls besides the first."""
        self.now_ns += took_ns
        self.queue.submitted += calls
        (call,) = self.soon
        self.soon.clear()
        call()
        return self.kicks


@pytest.fixture
def make_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[int]], Turns]]:
    made: list[Arena] = []
    registry = Registry()

    def make(cores: set[int]) -> Turns:
        turns = Turns(registry, cores, monkeypatch)
        made.append(turns.arena)
        return turns

    yield make
    for arena in made:
        arena.close()
    registry.close()


ONE, TWO = {3}, {0, 1}
Make = Callable[[set[int]], Turns]


def test_a_worker_is_woken_at_the_end_of_a_turn(make_turns: Make) -> None:
    turns = make_turns(TWO)
    turns.first()
    assert turns.turn(calls=5) == 1
    assert turns.queue.wake_handle is None


def test_on_one_core_a_call_alone_is_not_delayed(make_turns: Make) -> None:
    turns = make_turns(ONE)
    turns.first()
    assert turns.turn() == 1
    assert turns.queue.wake_handle is None


def test_on_one_core_a_worker_sleeps_while_turns_bring_more(make_turns: Make) -> None:
    turns = make_turns(ONE)
    for woken in (1, 2):  # the next batch as the first
        turns.first()
        assert [turns.turn(calls=calls) for calls in (3, 1, 0)] == [woken - 1, woken - 1, woken]
        assert turns.queue.wake_handle is None


def test_on_one_core_a_worker_is_woken_though_turns_never_end_to_bring_more(make_turns: Make) -> None:
    turns = make_turns(ONE)
    turns.first()
    half_ns = ONE_CORE_PATIENCE_NS // 2
    assert [turns.turn(took_ns=half_ns, calls=1) for _ in range(2)] == [0, 1]
