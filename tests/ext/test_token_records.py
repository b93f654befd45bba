"""Prompts and tokens across an arena: against an oracle, with slow readers, and whoever dies in between."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastserve._ext import batch_ring, token_records
from fastserve._ext.batch_ring import RECORDS, BatchRing
from fastserve._ext.token_records import TokenReader, TokenSender, prompt_bytes, read_prompt, write_prompt
from fastserve.codec.generation import Finish
from tests.oracles import token_records as plain

IDS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=50)
SECOND_NS = 1_000_000_000


class Line:
    """An arena with its fronts and one worker, in one process."""

    def __init__(self, *, slots: int = 4, fronts: int = 1, pages: int = 64, window: int = 8) -> None:
        shape = {"slots": slots, "max_rows": 1, "fronts": fronts, "slab_pages": pages}
        self.memory = mmap.mmap(-1, batch_ring.measure(**shape))
        batch_ring.format_arena(self.memory, **shape)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.window, self.slots = window, slots
        self.fronts = [self.front(n) for n in range(fronts)]
        self.readers = [self.reader(n) for n in range(fronts)]
        self.worker = BatchRing(self.memory, worker=0)
        self.sender = self.new_sender()

    def front(self, number: int) -> BatchRing:
        return BatchRing(self.memory, front=number, worker_doorbells=[self.bell])

    def reader(self, number: int) -> TokenReader:
        return TokenReader(self.memory, front=number, worker_doorbells=[self.bell], window=self.window)

    def new_sender(self) -> TokenSender:
        return TokenSender(
            self.memory, worker=0, own_doorbell=self.bell, window=self.window, statuses=[0] * 6
        )

    def ask(self, run: object, ids=(1, 2), note: bytes = b"note", front: int = 0) -> int:
        """A prompt committed; its place."""
        ring = self.fronts[front]
        lease = ring.reserve(1)
        assert lease >= 0
        nbytes = prompt_bytes(ids, note)
        offset = ring.allocate_slab(nbytes)
        write_prompt(ring.slab(offset, nbytes, writable=True), ids, note)
        self.readers[front].listen(lease >> 16, ring.attach_slab(lease, offset, nbytes), run)
        ring.commit(lease, 1)
        return lease

    def admit(self, deadline_ns: int = 0) -> int:
        """The next prompt taken; its rid."""
        slot = self.worker.take()
        assert slot >= 0
        return self.sender.admit(slot, deadline_ns)

    def begin(self, run: object, **fields: int) -> int:
        self.ask(run, **fields)
        return self.admit()

    def publish(self) -> list[int]:
        over = self.sender.publish()
        for slot in over:
            self.worker.publish(slot)
        return over

    def hear(self, front: int = 0) -> list[tuple[object, list[plain.Record] | None]]:
        """Read the records that came, and give back places that are over."""
        ring = self.fronts[front]
        found = ring.drain()
        heard = self.readers[front].read([entry for kind, entry in found if kind == RECORDS])
        for slot, seq in found:
            if slot >= 0 and ring.is_done(slot, seq):
                ring.release(slot << 16, 1)
        return heard

    def left(self) -> tuple[int, int]:
        return self.worker.outstanding(), self.worker.slab_pages_used()

    def close(self) -> None:
        os.close(self.bell)


@pytest.fixture
def line():
    made = Line()
    yield made
    made.close()


@given(IDS, st.binary(max_size=200))
def test_prompts_there_and_back(ids, note):
    slab = bytearray(prompt_bytes(ids, note))
    write_prompt(slab, ids, note)
    assert slab == plain.write_prompt(ids, note)
    assert read_prompt(slab) == (ids, note)


@given(st.binary(max_size=100), st.integers(0, 1 << 32), st.integers(0, 1 << 40))
def test_bytes_that_are_no_prompt(data, count, length):
    for slab in (data, struct.pack("<IIQ", plain.MAGIC, count & 0xFFFFFFFF, length) + data):
        if len(slab) == 16 + 4 * (count & 0xFFFFFFFF) + length:
            continue
        with pytest.raises(ValueError, match="no prompt"):
            read_prompt(slab)


def test_a_prompt_needs_its_size_and_ids_of_32_bits():
    with pytest.raises(ValueError, match="size"):
        write_prompt(bytearray(40), [1], b"")
    with pytest.raises(OverflowError):
        write_prompt(bytearray(20), [1 << 31], b"")


def test_the_reasons_are_those_of_the_codec():
    assert (token_records.CANCELLED, token_records.TIMEOUT) == (Finish.CANCELLED, Finish.TIMEOUT)


def test_a_steps_tokens_are_one_message_for_each_front():
    line = Line(fronts=2)
    rids = [line.begin(name, front=front) for name, front in (("a", 0), ("b", 1), ("c", 0))]
    line.worker.leases(0)
    for n, rid in enumerate(rids):
        line.sender.token(rid, 100 + n, 0, 7, b"extra" * n)
    assert line.sender.publish() == []
    assert len(line.fronts[0].drain()) == 1, "one message"
    line.sender.token(rids[0], 5, 2)
    line.publish()
    assert line.hear(1) == [("b", [(101, 0, 7, b"extra")])]
    line.close()


def test_the_last_record_gives_everything_back(line):
    rid = line.begin("a")
    line.sender.token(rid, 7, 0, 11)
    assert line.left() == (1, 0), "the prompt's page went with the first token"
    line.sender.token(rid, 8, 2, 12, b"x")
    assert line.publish() == [0]
    assert line.hear() == [("a", [(7, 0, 11, b""), (8, 2, 12, b"x")])]
    assert line.left() == (0, 0)
    with pytest.raises(LookupError, match="has ended"):
        line.sender.token(rid, 9)
    assert not line.sender.room(rid)


def test_bounds_at_the_door(line):
    rid = line.begin("a")
    with pytest.raises(ValueError, match="at most 15 and"):
        line.sender.token(rid, 1, 16)
    with pytest.raises(ValueError, match="at most 15 and"):
        line.sender.token(rid, 1, 0, 0, b"x" * (1 << 24))
    with pytest.raises(ValueError, match="reason"):
        line.sender.end(rid, 0)
    with pytest.raises(ValueError, match="cannot be taken"):
        line.sender.admit(0)
    with pytest.raises(ValueError, match="cannot be taken"):
        line.sender.admit(line.slots)
    with pytest.raises(IndexError):
        line.readers[0].listen(line.slots, 1, "x")
    assert line.readers[0].read([(4096, 100), (1 << 40, 1 << 63)]) == []
    with pytest.raises(ValueError, match="such a front"):
        TokenReader(line.memory, front=1)
    with pytest.raises(ValueError, match="such a worker"):
        TokenSender(line.memory, worker=1)


def test_who_left_and_whose_time_is_up_is_said_once(line):
    leaving, staying = line.ask("a"), line.ask("b")
    first, second = line.admit(), line.admit(time.monotonic_ns() + 100 * SECOND_NS)
    assert line.sender.gone() == []
    assert line.sender.next_deadline_ns() > time.monotonic_ns()
    line.fronts[0].drop(leaving, 1)
    line.readers[0].leave(leaving >> 16)
    assert line.sender.gone() == [(first, token_records.CANCELLED)]
    assert line.sender.gone() == []
    line.sender.end(first, token_records.CANCELLED)
    line.sender.token(second, 5)
    line.publish()
    assert line.hear() == [("b", [(5, 0, 0, b"")])]
    assert line.left() == (1, 0)
    late = Line()
    late.ask("c")
    rid = late.admit(time.monotonic_ns() - 1)
    assert late.sender.gone() == [(rid, token_records.TIMEOUT)]
    assert late.sender.next_deadline_ns() == 0
    assert staying >> 16 == 1
    late.close()


def test_a_reader_that_is_behind_has_no_room(line):
    rid = line.begin("a")
    for n in range(line.window):
        assert line.sender.room(rid)
        line.sender.token(rid, n)
    assert not line.sender.room(rid)
    line.publish()
    line.hear()
    assert not line.sender.room(rid), "heard is not taken"
    line.readers[0].taken(0, 1)
    assert line.sender.room(rid)


def test_a_reader_wakes_the_worker_that_sleeps(line):
    rid = line.begin("a")
    for n in range(line.window):
        line.sender.token(rid, n)
    line.publish()
    line.hear()
    assert not line.sender.room(rid)
    sleeper = threading.Thread(target=line.sender.sleep, args=(100 * SECOND_NS,))
    sleeper.start()
    line.readers[0].taken(0, line.window)
    sleeper.join(60)
    assert not sleeper.is_alive()
    began = time.monotonic()
    line.sender.sleep(100 * SECOND_NS, True)
    assert time.monotonic() - began < 60, "whoever was refused has room: it looks before it sleeps"


@pytest.mark.parametrize("full", [False, True])
def test_a_prompt_wakes_who_is_not_full(line, full):
    line.ask("a")
    began = time.monotonic()
    line.sender.sleep(50_000_000 if full else 100 * SECOND_NS, full)
    slept_s = time.monotonic() - began
    assert slept_s >= 0.05 if full else slept_s < 60


def test_a_full_ring_loses_nothing(line):
    rid = line.begin("a")
    capacity = 0
    while not line.sender.unsent:
        line.sender.token(rid, capacity)
        line.publish()
        capacity += 1
        assert capacity < 1000
    for n in range(5):
        line.sender.token(rid, capacity + n, 2 * (n == 4))
    assert line.publish() == [], "not before its last record is sent"
    ((_, heard),) = line.hear()
    assert line.publish() == [0]
    ((_, rest),) = line.hear()
    assert [record[0] for record in heard + rest] == list(range(capacity + 5))
    assert line.left() == (0, 0)


def test_no_memory_for_tokens_is_waited_for(line):
    rid = line.begin("a")
    line.sender.token(rid, 1)
    ring = line.fronts[0]
    taken = []
    while offset := ring.allocate_slab(4096):
        taken.append(offset)
    line.publish()
    assert line.sender.unsent
    ring.free_slab(taken.pop())
    line.publish()
    assert not line.sender.unsent
    assert line.hear() == [("a", [(1, 0, 0, b"")])]


def test_a_worker_that_dies_leaves_nothing(line):
    """Begun: it fails; not begun: the next worker gets it, prompt and all. Words under way go with it."""
    begun, waiting = line.begin("a"), line.begin("b")
    line.sender.token(begun, 1)
    line.sender.publish()
    retried, failed = line.fronts[0].worker_died(0, 2, 14, "died")
    assert (retried, failed) == (1, 1)
    assert line.worker.slab_pages_used() == 1
    sender = line.new_sender()
    line.sender = sender
    assert line.admit() == waiting
    sender.token(waiting, 5)
    sender.publish()
    assert line.hear() == [("b", [(5, 0, 0, b"")])]
    assert line.fronts[0].failure(begun & 0xFFFF) == (14, "died")


def test_a_message_that_outlives_its_slab(line):
    """The dead worker's successor leases the same page: the old message must not be taken for its own."""
    rid = line.begin("a")
    line.sender.token(rid, 1)
    line.sender.publish()
    line.fronts[0].worker_died(0, 1, 14, "died")
    line.sender = line.new_sender()
    for ring in line.fronts:
        ring.release(0, 1)
    again = line.begin("b")
    line.sender.token(again, 2)
    line.sender.publish()
    assert line.hear() == [("b", [(2, 0, 0, b"")])]


def test_a_front_that_dies_leaves_what_was_for_it_to_the_next(line):
    rid = line.begin("a")
    line.sender.token(rid, 1)
    line.sender.publish()
    line.fronts[0].reclaim_front(0)
    line.fronts[0], line.readers[0] = line.front(0), line.reader(0)
    assert line.hear() == []
    assert line.sender.gone() == [(rid, token_records.CANCELLED)]
    line.sender.end(rid, token_records.CANCELLED)
    line.publish()
    line.hear()
    assert line.left() == (0, 0)


def test_a_record_that_was_lost_is_told(line):
    rid = line.begin("a")
    line.sender.token(rid, 1)
    line.sender.publish()
    line.fronts[0].drain()  # and never read
    line.sender.token(rid, 2)
    line.sender.publish()
    assert line.hear() == [("a", None)]
    assert line.hear() == []


def test_a_worker_that_scrawls_over_its_slabs(line):
    """The reader stays inside and gives the slab back, whatever lies there."""
    rng = random.Random(5)
    for turn in range(300):
        rid = line.begin("a")
        line.sender.token(rid, 1, 0, 0, b"abc" * rng.randrange(9))
        line.sender.token(rid, 2, 2)
        line.publish()
        found = line.fronts[0].drain()
        messages = [entry for kind, entry in found if kind == RECORDS]
        offset, nbytes = messages[0]
        slab = line.fronts[0].slab(offset, nbytes, writable=True)
        for _ in range(1 + turn % 5):
            slab[rng.randrange(nbytes)] = rng.randrange(256)
        line.readers[0].read(messages)
        line.fronts[0].release(0, 1)
        line.readers[0].leave(0)
        assert line.left() == (0, 0)


class Lines(RuleBasedStateMachine):
    """Every order of asking, saying, sending, reading, taking and leaving."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(slots=3, window=3)
        self.oracle = plain.PlainLine(3)
        self.names = itertools.count()
        self.running: dict[int, int] = {}  # name -> rid
        self.unread: dict[int, int] = {}  # name -> heard and not taken
        self.leases: dict[int, int] = {}

    def teardown(self) -> None:
        for name in list(self.running):
            self.say(name, finish=2)
        self.publish()
        self.hear()
        assert self.line.left() == (0, 0)
        self.line.close()

    @precondition(lambda self: len(self.leases) < 3)
    @rule()
    def ask(self) -> None:
        name = next(self.names)
        self.leases[name] = self.line.ask(name)
        self.running[name] = self.line.admit()
        self.unread[name] = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finish=st.sampled_from([0, 0, 0, 1]), extra=st.binary(max_size=9))
    def token(self, data, finish, extra) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        assert self.line.sender.room(self.running[name]) == self.oracle.room(name)
        if finish or self.oracle.room(name):
            self.say(name, finish, extra)

    def say(self, name: int, finish: int, extra: bytes = b"") -> None:
        record = (name * 7, finish, name, extra)
        self.line.sender.token(self.running[name], *record)
        self.oracle.say(name, record)
        if finish:
            del self.running[name]

    @rule()
    def publish(self) -> None:
        over = {self.leases[name] >> 16 for name in self.oracle.publish()}
        assert set(self.line.publish()) == over

    @rule()
    def hear(self) -> None:
        wanted = self.oracle.read()
        assert dict(self.line.hear()) == wanted
        for name, records in wanted.items():
            self.unread[name] += len(records)
            if records[-1][1]:
                del self.leases[name]

    @precondition(lambda self: any(self.unread[name] for name in self.running))
    @rule(data=st.data())
    def take(self, data) -> None:
        name = data.draw(st.sampled_from([n for n in sorted(self.running) if self.unread[n]]))
        count = data.draw(st.integers(1, self.unread[name]))
        self.unread[name] -= count
        self.oracle.taken[name] += count
        self.line.readers[0].taken(self.leases[name] >> 16, count)

    @invariant()
    def agrees(self) -> None:
        assert self.line.sender.active == len(self.running)


TestLines = Lines.TestCase
