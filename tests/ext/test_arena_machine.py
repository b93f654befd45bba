"""All verbs of the ring together, in any order, against a plain arena: two fronts, two workers, deaths,
cancels, leases, and answers in parts."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastserve._ext import batch_ring
from fastserve._ext.arena_maintenance import ArenaScanner
from fastserve._ext.batch_ring import FULL, PART, BatchRing
from tests.effort import examples
from tests.oracles.arena import PlainArena, PlainBatch, PlainPlace

SHAPE = {"slots": 3, "max_rows": 4, "fronts": 2, "workers": 2, "slab_pages": 64}
PAGE, GONE, ATTEMPTS = 4096, 14, 2
MOST_ROWS = 1000  # that may wait: far from it, so that rows_left() says how many do
WHICH = st.integers(0, 1)
CHOICE = st.integers(0, 1 << 16)


class ArenaMachine(RuleBasedStateMachine):
    """Each rule does the same to the arena and to the plain one, and compares what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = mmap.mmap(-1, batch_ring.measure(**SHAPE))
        batch_ring.format_arena(self.memory, **SHAPE, max_queued=MOST_ROWS)
        self.fronts = [BatchRing(self.memory, front=i) for i in range(2)]
        self.workers = [BatchRing(self.memory, worker=i) for i in range(2)]
        self.scanner = ArenaScanner(self.memory)
        self.plain = PlainArena(SHAPE["slots"], SHAPE["max_rows"], ATTEMPTS)
        self.place_of: dict[PlainPlace, int] = {}
        self.slot_of: dict[PlainBatch, int] = {}
        self.sent: list[list[tuple[int, int, int, int]]] = [[], []]  # parts on their way to each front
        self.kept: list[list[tuple[int, int]]] = [[], []]  # slabs each worker holds: offset, pages

    # --- what there is to choose from

    def leases(self, *states: str) -> list[PlainPlace]:
        return [p for b in self.plain.batches for p in b.leases if p.state in states]

    def running(self) -> list[PlainBatch]:
        return [b for b in self.plain.batches if b.state == "running"]

    def live(self) -> list[PlainPlace]:
        return [p for b in self.running() for p in b.leases if p.state == "committed"]

    # --- fronts

    @rule(front=WHICH, rows=st.integers(1, 4))
    def reserve(self, front: int, rows: int) -> None:
        lease, plain = self.fronts[front].reserve(rows), self.plain.reserve(front, rows)
        assert (lease == FULL) == (plain is None)
        if plain is not None:
            assert lease & 0xFFFF == plain.start
            self.place_of[plain] = lease
            assert self.slot_of.setdefault(plain.batch, lease >> 16) == lease >> 16

    @precondition(lambda self: self.leases("reserved"))
    @rule(choice=CHOICE, pages=st.integers(0, 3))
    def commit(self, choice: int, pages: int) -> None:
        plain = self.leases("reserved")[choice % len(self.leases("reserved"))]
        ring, lease = self.fronts[plain.front], self.place_of[plain]
        if pages:
            offset = ring.allocate_slab(pages * PAGE)
            assert offset > 0
            ring.slab(offset, pages * PAGE, True)[:8] = id(plain).to_bytes(8, "little")
            ring.attach_slab(lease, offset, pages * PAGE)
            plain.in_pages = pages
        ring.commit(lease, plain.rows)
        self.plain.commit(plain)

    @precondition(lambda self: self.leases("reserved"))
    @rule(choice=CHOICE)
    def abandon(self, choice: int) -> None:
        plain = self.leases("reserved")[choice % len(self.leases("reserved"))]
        self.fronts[plain.front].abandon(self.place_of[plain], plain.rows)
        self.plain.abandon(plain)

    @precondition(lambda self: self.leases("committed", "answered"))
    @rule(choice=CHOICE)
    def drop(self, choice: int) -> None:
        there = self.leases("committed", "answered")
        plain = there[choice % len(there)]
        assert self.fronts[plain.front].drop(self.place_of[plain], plain.rows) == self.plain.drop(plain)

    @precondition(lambda self: self.leases("answered"))
    @rule(choice=CHOICE)
    def release(self, choice: int) -> None:
        plain = self.leases("answered")[choice % len(self.leases("answered"))]
        ring, lease = self.fronts[plain.front], self.place_of[plain]
        assert ring.is_done(lease >> 16, ring.seq(lease >> 16))
        if not plain.batch.failed:
            assert ring.answered(lease, plain.rows)
            offset, nbytes = ring.answer_slab(lease)
            assert nbytes == plain.out_pages * PAGE
            if offset:
                assert bytes(ring.slab(offset, 8)) == id(plain).to_bytes(8, "little")
        assert (ring.failure(lease >> 16) is not None) == plain.batch.failed
        ring.release(lease, plain.rows)
        self.plain.release(plain)

    @rule()
    def give_memory_back(self) -> None:
        """Nobody notices."""
        self.scanner.trim()

    @rule(front=WHICH)
    def drain(self, front: int) -> None:
        """A worker's parts arrive in the order it sent them; where the caller has left they may go back."""
        ring, sent = self.fronts[front], self.sent[front]
        arrived = [told for slot, told in ring.drain() if slot == PART]
        for slot, _, _, offset, nbytes, _ in arrived:
            found = next(part for part in sent if part[1:3] == (slot, offset))
            assert found[3] * PAGE == nbytes
            for part in [part for part in sent[: sent.index(found)] if part[0] == found[0]]:
                with pytest.raises(ValueError, match="leased"):
                    ring.slab(part[2], part[3] * PAGE)
                sent.remove(part)
            sent.remove(found)
            if offset:
                ring.free_slab(offset)
        sent.clear()
        self.plain.loose = sum(p for held in self.kept for _, p in held)
        self.plain.loose += sum(p for parts in self.sent for *_, p in parts)

    # --- workers

    @rule(worker=WHICH)
    def take(self, worker: int) -> None:
        slot, batch = self.workers[worker].take(), self.plain.take(worker)
        assert (slot < 0) == (batch is None)
        if batch is not None:
            assert slot == self.slot_of[batch]
            assert self.workers[worker].batch_rows(slot) == batch.reserved
            found = [(row, rows, size) for row, rows, _, size in self.workers[worker].leases(slot)]
            waiting = [p for p in batch.leases if p.state == "committed"]
            assert found == [(p.start, p.rows, p.in_pages * PAGE) for p in waiting]

    @precondition(lambda self: self.live())
    @rule(choice=CHOICE, pages=st.integers(1, 2))
    def answer(self, choice: int, pages: int) -> None:
        plain = self.live()[choice % len(self.live())]
        ring, slot = self.workers[plain.batch.worker], self.slot_of[plain.batch]
        offset = ring.allocate_slab(pages * PAGE)
        assert offset > 0
        ring.slab(offset, pages * PAGE, True)[:8] = id(plain).to_bytes(8, "little")
        ring.answer_lease(slot, plain.start, 0, offset, pages * PAGE)
        plain.out_pages = pages

    @precondition(lambda self: self.live())
    @rule(choice=CHOICE, pages=st.integers(0, 2), final=st.booleans())
    def send_part(self, choice: int, pages: int, final: bool) -> None:
        plain = self.live()[choice % len(self.live())]
        ring, slot = self.workers[plain.batch.worker], self.slot_of[plain.batch]
        assert ring.waits(slot, plain.start)
        offset = ring.allocate_slab(pages * PAGE) if pages else 0
        if ring.send_part(slot, plain.start, offset, pages * PAGE, final):
            self.sent[plain.front].append((plain.batch.worker, slot, offset, pages))
            self.plain.loose += pages
        elif offset:
            ring.free_slab(offset)

    @precondition(lambda self: [p for p in self.live() if p.in_pages])
    @rule(choice=CHOICE)
    def keep_inputs(self, choice: int) -> None:
        there = [p for p in self.live() if p.in_pages]
        plain = there[choice % len(there)]
        worker = plain.batch.worker
        offset = self.workers[worker].keep_inputs(self.slot_of[plain.batch], plain.start)
        assert offset > 0
        self.kept[worker].append((offset, plain.in_pages))
        self.plain.loose += plain.in_pages
        plain.in_pages = 0
        plain.batch.attempts = ATTEMPTS  # it cannot be run again without them

    @precondition(lambda self: any(self.kept))
    @rule()
    def return_kept(self) -> None:
        worker = 0 if self.kept[0] else 1
        offset, pages = self.kept[worker].pop()
        self.workers[worker].free_slab(offset)
        self.plain.loose -= pages

    @precondition(lambda self: self.running())
    @rule(choice=CHOICE)
    def publish(self, choice: int) -> None:
        batch = self.running()[choice % len(self.running())]
        slot = self.slot_of[batch]
        assert not self.workers[1 - batch.worker].publish(slot), "another's batch"
        assert self.workers[batch.worker].publish(slot) == self.plain.publish(batch)

    # --- deaths: the owner is front 0, or what takes its place

    @rule(worker=WHICH, luck=st.integers(0, 7))
    def worker_may_die(self, worker: int, luck: int) -> None:
        if luck == 7:
            self.worker_dies(worker)

    @rule(front=WHICH, luck=st.integers(0, 7))
    def front_may_die(self, front: int, luck: int) -> None:
        if luck == 7:
            self.front_dies(front)

    def worker_dies(self, worker: int) -> None:
        assert self.fronts[0].worker_died(worker, ATTEMPTS, GONE, "gone") == self.plain.worker_died(worker)
        self.plain.loose -= sum(pages for _, pages in self.kept[worker])
        self.kept[worker].clear()
        self.workers[worker] = BatchRing(self.memory, worker=worker)

    def front_dies(self, front: int) -> None:
        while self.fronts[1 - front].reclaim_front(front):
            pass
        self.plain.reclaim_front(front)
        self.fronts[front] = BatchRing(self.memory, front=front)
        self.fronts[front].drain()  # as a queue does that opens
        self.plain.loose -= sum(pages for *_, pages in self.sent[front])
        self.sent[front].clear()

    @invariant()
    def they_say_the_same(self) -> None:
        ring, plain = self.fronts[0], self.plain
        assert ring.outstanding() == plain.outstanding
        assert (ring.queued(), ring.pending()) == (plain.queued, plain.pending)
        assert MOST_ROWS - ring.rows_left() == plain.waiting
        assert ring.slab_pages_used() == plain.pages
        assert ring.lost() == []

    def teardown(self) -> None:
        """Everybody goes: nothing is left."""
        for worker in range(2):
            self.worker_dies(worker)
        for front in range(2):
            self.front_dies(front)
        while self.plain.batches:
            before = len(self.plain.batches)
            self.take(0)
            for _ in self.running():
                self.publish(0)
            if len(self.plain.batches) == before:
                break  # an open batch that is empty
        assert self.fronts[0].outstanding() == 0
        assert self.fronts[0].slab_pages_used() == 0


TestArena = ArenaMachine.TestCase
TestArena.settings = examples(40, derandomize=True, stateful_step_count=50)


@pytest.mark.torture
@pytest.mark.parametrize("turn", range(10))
def test_for_long(turn: int) -> None:
    """In turns: hypothesis keeps every choice of a run, 0.3 MB an example, which were 6 GB of 5,000."""
    run_state_machine_as_test(ArenaMachine, settings=examples(50, stateful_step_count=120))
