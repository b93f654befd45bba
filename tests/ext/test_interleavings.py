"""Every order of events: two fronts, two workers, a ring of two slots of two rows.

Each actor is a small program over the real compiled verbs; the search takes every order of their steps by
saving and restoring the whole arena. A front or a worker may be killed between any two steps, and a front may
give up at any of them: it abandons what it has reserved, or drops what it waits for.
"""

from __future__ import annotations

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import FULL, BatchRing
from tests.ext.test_batch_ring import GONE, make_arena, states

MOST_ROWS = 100  # that may wait: far from it, so that rows_left() says how many do

# What each step of a program may do to a slot, as chains of the table's own moves.
VERB_MOVES = {
    "front 0": {("free", "open"), ("free", "sealed"), ("open", "sealed"), ("open", "ready")},  # reserve
    "front 1": {("sealed", "ready")},  # commit
    "front 2": {("done", "free")},  # release
    "giver 1": {("sealed", "ready"), ("sealed", "free"), ("open", "free")},  # abandon
    "giver 2": {("open", "free"), ("ready", "free")},  # drop
    "worker 0": {("ready", "running"), ("open", "running")},  # take
    "worker 1": {("running", "done"), ("running", "free")},  # publish
    "kill": {
        *(("running", "ready"), ("running", "free"), ("sealed", "ready"), ("done", "free")),
        *(("open", "free"), ("sealed", "free"), ("ready", "free")),
    },
}
WAITING_STATES = ("open", "sealed", "ready")


class Search:
    """Depth-first over all interleavings; a state is the arena's words plus where each actor stands."""

    def __init__(self, rows: tuple[int, int], *, kill: str = "", gives_up: bool = False) -> None:
        self.memory = make_arena(fronts=2, workers=2, max_rows=2, max_queued=MOST_ROWS)
        self.claims = [bytearray(8 * 2 * 2) for _ in range(4)]  # slots x rows
        lent = [memoryview(claims).cast("Q") for claims in self.claims]
        self.fronts = [BatchRing(self.memory, front=i, claims=lent[i]) for i in range(2)]
        self.workers = [BatchRing(self.memory, worker=i, claims=lent[2 + i]) for i in range(2)]
        self.rows, self.kill = rows, kill
        self.names = ["front0", "front1", "worker0", "worker1", "killer"]
        self.names += ["giver0", "giver1"] if gives_up else []
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
        for name in self.names:
            was = states(self.fronts[0])
            after = self.advance(name, actors)
            if after is not None:
                progressed = True
                actor = name.replace("giver", "front")
                verb = "kill" if name == "killer" else f"{name[:-1]} {actors[actor][0]}"
                self.check_moves(verb, was)
                self.check_waiting(after)
                self.step(after)
                for part, was_in_it in zip((self.memory, *self.claims), before, strict=True):
                    part[:] = was_in_it
        if not progressed:
            self.check_end(actors)

    def check_moves(self, verb: str, was: list[str]) -> None:
        for move in zip(was, states(self.fronts[0]), strict=True):
            assert move[0] == move[1] or move in VERB_MOVES[verb], f"{verb} moved a slot {move}"
            self.moves_seen.add(move)

    def check_waiting(self, actors: dict) -> None:
        """Check that requests counted as waiting write, or wait for a worker."""
        alive = [n for n in (0, 1) if actors["dead"] != f"front{n}"]
        held = [(self.rows[n], *actors[f"front{n}"]) for n in alive]
        now = states(self.fronts[0])
        waiting = [
            rows for rows, stage, lease in held if stage in (1, 2) and now[lease >> 16] in WAITING_STATES
        ]
        assert MOST_ROWS - self.fronts[0].rows_left() == sum(waiting), self.picture()

    def picture(self) -> tuple:
        ring = self.fronts[0]
        return tuple((*ring.describe(i), tuple(ring.leases(i))) for i in range(ring.slots))

    def advance(self, name: str, actors: dict) -> dict | None:
        if name == "killer":
            return self.do_kill(actors)
        kind, number = name[:-1], int(name[-1])
        actor = f"front{number}" if kind == "giver" else name
        if actors["dead"] == actor:
            return None
        do = {"front": self.do_front, "giver": self.give_up, "worker": self.do_worker}[kind]
        new = do(number, *actors[actor])
        return None if new is None else {**actors, actor: new}

    def give_up(self, number: int, stage: int, lease: int) -> tuple[int, int] | None:
        ring, rows = self.fronts[number], self.rows[number]
        if stage == 1:
            ring.abandon(lease, rows)
            return 3, -1
        return (3, -1) if stage == 2 and ring.drop(lease, rows) else None

    def do_front(self, number: int, stage: int, lease: int) -> tuple[int, int] | None:
        ring, rows = self.fronts[number], self.rows[number]
        if stage == 0:
            lease = ring.reserve(rows)
            return None if lease == FULL else (1, lease)
        if stage == 1:
            ring.input_rows(lease, rows, 0)[:] = bytes([number + 1]) * 8 * rows
            ring.commit(lease, rows)
            return 2, lease
        if stage == 2:
            if ring.describe(lease >> 16)[0] != "done":
                return None
            got = bytes(ring.output_rows(lease, rows, 0))
            assert got == bytes([number + 1]) * 8 * rows, "a front got another's rows"
            ring.release(lease, rows)
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
@pytest.mark.parametrize("gives_up", [False, True])
def test_every_interleaving_answers_everybody_once_and_leaks_nothing(rows, kill, gives_up):
    search = Search(rows, kill=kill, gives_up=gives_up)
    search.run()
    assert search.ends > 0
    assert len(search.seen) > 30
    assert ("done", "free") in search.moves_seen
    assert (("ready", "free") in search.moves_seen) >= gives_up


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
