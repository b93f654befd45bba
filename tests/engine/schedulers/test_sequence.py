"""Slots and sequences against a plain oracle, and the texts a client sees."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastserve.engine.schedulers.sequence import MOST_LOST, MOVES, SequencePhase, SequenceSlots
from fastserve.errors import Kind, ServeError
from tests.effort import examples

IDLE_NS = 100
IDS = st.sampled_from([1, 2, 3, "a", "b"])


def test_the_table_reaches_every_phase_and_nothing_leaves_gone():
    assert {to for targets in MOVES.values() for to in targets} == set(SequencePhase)
    assert not [phase for phase, _ in MOVES if phase is SequencePhase.GONE]
    assert all((phase, "lose") in MOVES for phase in SequencePhase if phase is not SequencePhase.GONE)


@pytest.mark.parametrize(
    ("id", "text"),
    [
        (0, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        ("", "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            42,
            "inference request for sequence 42 to model 'm' must specify the START flag "
            "on the first request of the sequence",
        ),
    ],
)
def test_texts(id, text):
    with pytest.raises(ServeError) as caught:
        SequenceSlots("m", 1, 1, IDLE_NS).ask(id, start=False, end=False, what=None, now_ns=0)
    assert (caught.value.kind, caught.value.message) == (Kind.INVALID_ARGUMENT, text)


def test_what_was_lost_with_its_worker_is_remembered_in_a_bounded_way():
    core = SequenceSlots("m", 1, 1, IDLE_NS)

    def lose(id):
        core.answer(core.ask(id, start=True, end=False, what=None, now_ns=0), 0)
        core.lose_instance(0, 0)
        core.regain_instance(0)

    for number in range(1, MOST_LOST + 10):
        lose(number)
    assert len(core._lost) == MOST_LOST
    for id, kind in ((1, Kind.INVALID_ARGUMENT), (MOST_LOST, Kind.UNAVAILABLE)):
        with pytest.raises(ServeError) as caught:
            core.ask(id, start=False, end=False, what=None, now_ns=1)
        assert caught.value.kind is kind
    with pytest.raises(ServeError) as caught:
        core.ask(MOST_LOST, start=False, end=False, what=None, now_ns=2 + IDLE_NS)
    assert caught.value.kind is Kind.INVALID_ARGUMENT, "its idle time is over"


class Life(RuleBasedStateMachine):
    """Requests, answers, clients that leave, workers that die, time that passes: in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.core = SequenceSlots("m", 2, 2, IDLE_NS)
        self.now = 0
        self.count = 0
        # what must be so, told by what was seen: generation -> its requests in order
        self.waiting: dict[int, list] = {}
        self.running: dict[int, object] = {}
        self.live: dict[object, int] = {}
        self.last: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.down: set[int] = set()
        self.lost: dict[object, int] = {}  # ids whose worker died, and until when that is told

    @rule(id=IDS, start=st.booleans(), end=st.booleans())
    def ask(self, id, start, end):
        self.count += 1
        lost = self.lost.pop(id, 0) > self.now
        if id not in self.live and not start:
            with pytest.raises(ServeError, match="START") as caught:
                self.core.ask(id, start=start, end=end, what=self.count, now_ns=self.now)
            assert caught.value.kind is (Kind.UNAVAILABLE if lost else Kind.INVALID_ARGUMENT)
            assert (caught.value.retry_after_s is not None) == lost
            if lost:
                self.lost[id] = self.now + IDLE_NS
            return
        asked = self.core.ask(id, start=start, end=end, what=self.count, now_ns=self.now)
        generation = asked.sequence.generation
        if id in self.live:
            assert generation == self.live[id]
        else:
            assert generation not in self.waiting  # a new one, never an old one's
            self.waiting[generation] = []
            self.live[id] = generation
        self.waiting[generation].append(asked)
        self.last[generation] = self.now
        if end:
            del self.live[id]

    @rule(instance=st.integers(0, 1))
    def run_batch(self, instance):
        for asked in self.core.ready(instance):
            generation = asked.sequence.generation
            assert generation not in self.running
            assert asked is self.waiting[generation][0]  # in order, one at a time
            assert asked.sequence.slot // self.core.width == instance
            assert self.slots.setdefault(generation, asked.sequence.slot) == asked.sequence.slot
            self.core.take(asked)
            self.running[generation] = asked

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 10))
    def answer(self, pick):
        generation = sorted(self.running)[pick % len(self.running)]
        asked = self.running.pop(generation)
        self.core.answer(asked, self.now)
        if generation in self.waiting:
            assert self.waiting[generation].pop(0) is asked
            self.last[generation] = self.now
            if asked.end:
                assert self.forget(generation) == []

    @precondition(lambda self: any(self.waiting.values()))
    @rule(pick=st.integers(0, 10))
    def client_leaves(self, pick):
        asking = [g for g, queue in sorted(self.waiting.items()) if queue]
        generation = asking[pick % len(asking)]
        sequence = self.waiting[generation][0].sequence
        assert self.core.lose(sequence) == self.forget(generation)
        assert self.core.lose(sequence) == []

    @rule(instance=st.integers(0, 1))
    def worker_dies(self, instance):
        mine = [g for g, queue in self.waiting.items() if self.instance(g) == instance]
        self.lost |= {s.id: self.now + IDLE_NS for s in self.core._of(instance)}
        lost = self.core.lose_instance(instance, self.now)
        assert sorted(a.what for a in lost) == sorted(a.what for g in mine for a in self.forget(g))
        self.down.add(instance)

    @precondition(lambda self: self.down)
    @rule(pick=st.integers(0, 1))
    def worker_is_back(self, pick):
        instance = sorted(self.down)[pick % len(self.down)]
        self.down.discard(instance)
        self.core.regain_instance(instance)

    @rule(passed=st.integers(0, 150))
    def time_passes(self, passed):
        self.now += passed
        held = {s.generation: s for s in self.core._slots if s is not None}
        late = [
            g
            for g, queue in self.waiting.items()
            if g in held and not queue and self.now - self.last[g] >= IDLE_NS
        ]
        due = self.core.next_reap_ns()
        assert bool(late) == bool(due and due <= self.now)
        assert self.core.reap(self.now) == len(late)
        for generation in late:
            self.forget(generation)

    def instance(self, generation):
        held = [s for s in self.core._slots if s is not None and s.generation == generation]
        return held[0].slot // self.core.width if held else -1

    def forget(self, generation):
        for id in [id for id, g in self.live.items() if g == generation]:
            del self.live[id]
        return self.waiting.pop(generation)

    @invariant()
    def slots_are_full_while_anybody_waits(self):
        held = [s for s in self.core._slots if s is not None]
        if not self.down:
            assert len(held) == min(len(self.waiting), 4)
        elif len(held) < len(self.waiting):  # with one instance down the other's slots are the ones to fill
            alive = [i for i in (0, 1) if i not in self.down] or [0, 1]
            assert all(self.core._slots[slot] for i in alive for slot in (2 * i, 2 * i + 1))
        assert self.core.outstanding == sum(map(len, self.waiting.values()))
        by_age = sorted(self.waiting)
        parked = {s.generation for s in self.core._backlog}
        assert parked == set(by_age) - {s.generation for s in held}
        assert not parked or min(parked) > max(s.generation for s in held)  # first come, first served

    @invariant()
    def phases_say_what_is_so(self):
        for sequence in [s for s in self.core._slots if s is not None]:
            queue = self.waiting[sequence.generation]
            ran = self.running.get(sequence.generation)
            if ran is not None and queue and queue[0] is ran:
                assert sequence.phase is SequencePhase.RUNNING
            else:
                assert sequence.phase is (SequencePhase.QUEUED if queue else SequencePhase.IDLE)


TestLife = Life.TestCase
TestLife.settings = examples(60, stateful_step_count=40)
