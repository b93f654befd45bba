"""A worker's loop with a text engine, turn by turn: who is admitted, who is cancelled, when it sleeps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from fastserve._ext.batch_ring import RECORDS
from fastserve._ext.token_records import TokenReader, prompt_bytes, write_prompt
from fastserve.backends.llm.protocols import Out, TextRequest
from fastserve.codec.generation import Finish, Info, Record, TextNote, read_extra, write_text
from fastserve.errors import Kind, ServeError
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.text_loop import BEAT_NS, TextLoop


class Engine:
    """Does what a test says, a step at a time."""

    def __init__(self, slots: int = 4) -> None:
        self.info = Info(slots=slots)
        self.asked: dict[int, TextRequest] = {}
        self.cancelled: list[tuple[int, Finish]] = []
        self.refuse: Exception | None = None
        self.tokens = 0
        self.stands = False

    def submit(self, request: TextRequest) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.asked[request.rid] = request

    def cancel(self, rid: int, why: Finish) -> None:
        self.cancelled.append((rid, why))

    def pending(self) -> int:
        return len(self.asked)

    def step(self, out: Out) -> bool:
        for rid, why in self.cancelled:
            out.end(rid, why)
            del self.asked[rid]
        self.cancelled.clear()
        for rid in list(self.asked)[: self.tokens]:
            if out.room(rid):
                out.token(rid, 7)
        return not self.stands

    def close(self) -> None:
        self.asked.clear()


class Desk:
    """An arena, a front's end of it and one or two loops."""

    def __init__(self, *, slots: int = 8, workers: int = 1) -> None:
        geometry = Geometry(slots, 1, (), (), 64, 0, workers, 1, window=4)
        self.arena = Arena.create(geometry)
        self.front = self.arena.ring(front=0)
        self.reader = TokenReader(
            self.arena.memory, front=0, worker_doorbells=self.arena.worker_doorbells, window=geometry.window
        )
        self.engines = [Engine() for _ in range(workers)]
        self.control, self.far = os.pipe()
        self.loops = [
            TextLoop(self.arena, self.arena.ring(worker=n, control=self.control), n, engine, self.control)
            for n, engine in enumerate(self.engines)
        ]

    def ask(self, note: TextNote | bytes | None = None, ids: tuple[int, ...] = (1, 2)) -> int:
        """A prompt committed; its slot."""
        said = note if isinstance(note, bytes) else write_text(note or TextNote())
        lease, nbytes = self.front.reserve(1), prompt_bytes(ids, said)
        assert lease >= 0
        offset = self.front.allocate_slab(nbytes)
        write_prompt(self.front.slab(offset, nbytes, writable=True), ids, said)
        self.reader.listen(lease >> 16, self.front.attach_slab(lease, offset, nbytes), lease >> 16)
        self.front.commit(lease, 1)
        return lease >> 16

    def hear(self) -> dict[int, list[Record]]:
        found = self.front.drain()
        heard = self.reader.read([entry for kind, entry in found if kind == RECORDS])
        for slot, seq in found:
            if slot >= 0 and self.front.is_done(slot, seq):
                self.front.release(slot << 16, 1)
        return {slot: records for slot, records in heard if records is not None}

    def close(self) -> None:
        os.close(self.control)
        os.close(self.far)
        del self.loops, self.front, self.reader  # which look at its memory
        self.arena.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def test_one_engine_gets_all_there_is(desk: Desk) -> None:
    """More than it can run at a time: its priorities are to order them."""
    for priority in range(1, 6):
        desk.ask(TextNote(priority=priority, text="x"))
    assert desk.loops[0].turn()
    (engine,) = desk.engines
    assert [request.note.priority for request in engine.asked.values()] == [1, 2, 3, 4, 5]
    assert [request.ids for request in engine.asked.values()] == [[1, 2]] * 5
    assert all(request.arrived_ns for request in engine.asked.values())


def test_of_several_each_takes_what_it_can_hold() -> None:
    desk = Desk(slots=16, workers=2)
    for _ in range(16):
        desk.ask()
    desk.loops[0].turn()
    assert desk.engines[0].pending() == 2, "half of what it could: others may be free"
    for _ in range(8):
        desk.loops[0].turn()
    assert desk.engines[0].pending() == 4
    desk.loops[1].turn()
    assert desk.engines[1].pending() == 2
    desk.close()


@pytest.mark.logs_errors
def test_what_an_engine_refuses_is_told(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    (engine,) = desk.engines
    for refusal, kind in (
        (ServeError(Kind.INVALID_ARGUMENT, "too long"), Kind.INVALID_ARGUMENT),
        (RuntimeError("kaboom"), Kind.INTERNAL),
    ):
        engine.refuse = refusal
        slot = desk.ask()
        desk.loops[0].turn()
        ((token, finish, _, extra),) = desk.hear()[slot]
        assert (token, finish) == (-1, Finish.FAILED)
        assert read_extra(extra).kind == kind.value
        assert str(refusal) in read_extra(extra).message
    assert (desk.front.outstanding(), desk.front.slab_pages_used()) == (0, 0)
    refusal.__traceback__ = None  # the loop is in its frames, and in those of the log
    caplog.clear()


def test_a_prompt_that_cannot_be_read(desk: Desk) -> None:
    slot = desk.ask(b"\xc1")
    desk.loops[0].turn()
    ((_, finish, _, extra),) = desk.hear()[slot]
    assert finish == Finish.FAILED
    assert read_extra(extra).message == "the prompt cannot be read"


def test_who_has_left_before_it_was_taken_is_not_run(desk: Desk) -> None:
    desk.front.drop(desk.ask() << 16, 1)
    desk.loops[0].turn()
    assert desk.engines[0].pending() == 0
    assert (desk.front.outstanding(), desk.front.slab_pages_used()) == (0, 0)


def test_who_leaves_is_cancelled_in_the_next_turn(desk: Desk) -> None:
    slot = desk.ask()
    desk.loops[0].turn()
    desk.front.drop(slot << 16, 1)
    desk.loops[0].turn()
    assert desk.engines[0].pending() == 0
    assert desk.front.outstanding() == 0


def test_whose_time_is_up_is_cancelled(desk: Desk) -> None:
    slot = desk.ask(TextNote(deadline_ns=time.monotonic_ns()))
    desk.loops[0].turn()
    assert [record[1] for record in desk.hear()[slot]] == [Finish.TIMEOUT]
    assert desk.front.outstanding() == 0


def test_how_long_it_sleeps(desk: Desk) -> None:
    (loop,), (engine,) = desk.loops, desk.engines
    assert loop.patience_ns(True) == 0
    assert loop.patience_ns(False) == -1, "nobody is there"
    desk.ask()
    engine.stands = True
    assert not loop.turn()
    assert loop.patience_ns(False) == BEAT_NS
    desk.ask(TextNote(deadline_ns=time.monotonic_ns() + 100_000_000))
    loop.turn()
    assert 0 < loop.patience_ns(False) <= 100_000_000


def test_a_reader_that_is_behind_holds_up_nobody_who_waits(desk: Desk) -> None:
    (loop,), (engine,) = desk.loops, desk.engines
    engine.info, engine.tokens = Info(slots=1), 1
    loop = TextLoop(desk.arena, desk.arena.ring(worker=0), 0, engine)
    slot = desk.ask()
    for _ in range(10):
        loop.turn()
    assert len(desk.hear()[slot]) == 4, "the window"
    desk.ask()  # for which there is no row
    for _ in range(10):
        loop.turn()
    assert len(desk.hear()[slot]) == 10
    engine.cancelled.append((list(engine.asked)[1], Finish.CANCELLED))  # it has left
    for _ in range(10):
        loop.turn()
    assert len(desk.hear().get(slot, [])) <= 1


def test_of_several_engines_each_sees_who_waits_for_any() -> None:
    desk = Desk(slots=16, workers=2)
    for loop, engine in zip(desk.loops, desk.engines, strict=True):
        engine.info, engine.tokens = Info(slots=1), 1
        loop._rows = loop._most = 1
    slots = [desk.ask(), desk.ask()]
    for _ in range(10):
        for loop in desk.loops:
            loop.turn()
    assert {slot: len(records) for slot, records in desk.hear().items()} == dict.fromkeys(slots, 4)
    desk.ask()
    for _ in range(10):
        for loop in desk.loops:
            loop.turn()
    assert {slot: len(records) for slot, records in desk.hear().items()} == dict.fromkeys(slots, 10)
    desk.close()


def test_it_stops_in_the_middle_of_work(desk: Desk) -> None:
    (loop,), (engine,) = desk.loops, desk.engines
    desk.ask()
    engine.tokens = 1
    told: list[bool] = []

    def stopped() -> bool:
        told.append(True)
        return len(told) > 2

    running = threading.Thread(target=loop.run, args=(stopped,))
    running.start()
    os.write(desk.far, b"x")
    running.join(60)
    assert not running.is_alive()
    assert len(told) == 3


def test_an_idle_worker_is_woken_by_a_prompt_and_by_its_owner(desk: Desk) -> None:
    (loop,), (engine,) = desk.loops, desk.engines
    running = threading.Thread(target=loop.run, args=(lambda: os.read(desk.control, 1) == b"!",))
    running.start()
    try:
        time.sleep(0.05)
        desk.ask()
        desk.front.wake_workers()
        end = time.monotonic() + 60
        while not engine.asked and time.monotonic() < end:
            time.sleep(0.001)
        assert engine.asked
    finally:
        os.write(desk.far, b"!")
        running.join(60)
    assert not running.is_alive()
