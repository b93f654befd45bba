"""A worker or a front that dies in the middle of a verb that moves a slab: nothing stays leased, nothing is
taken for another's.

It is a process of its own, killed by the kernel at a given store: the pages that the store goes to are
read-only there. Which store that is depends on the verb's order, which the tests do not prescribe.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import struct
from collections.abc import Callable

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import PART, RECORDS, BatchRing
from fastserve._ext.token_records import TokenReader, TokenSender, prompt_bytes, write_prompt

PAGE = 4096
SHAPE = {"slots": 1, "max_rows": 1, "slab_pages": 16}
# Of arena.h: three offsets of the header, a slab pool's header.
SLOTS_AT, RINGS_AT, SLABS_AT = 40, 48, 80
SLAB_WORDS = 192


def died(work: Callable[[], object]) -> bool:
    """Whether a process of its own dies of it."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        work()
    finally:
        os._exit(0)


class Torn:
    """An arena, its front, and a worker that lives in a child."""

    def __init__(self, **layout: int) -> None:
        shape = {**SHAPE, **layout}
        self.memory = mmap.mmap(-1, batch_ring.measure(**shape))
        batch_ring.format_arena(self.memory, **shape)
        self.front = BatchRing(self.memory, front=0)
        self.lease = self.front.reserve(1)
        nbytes = prompt_bytes((1, 2), b"")
        offset = self.front.allocate_slab(nbytes)
        write_prompt(self.front.slab(offset, nbytes, writable=True), (1, 2), b"")
        self.tag = self.front.attach_slab(self.lease, offset, nbytes)
        self.front.commit(self.lease, 1)

    def at(self, header: int) -> int:
        return struct.unpack_from("<Q", self.memory, header)[0]

    def protect(self, begin: int, nbytes: int) -> None:
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        first, end = begin // PAGE * PAGE, -(-(begin + nbytes) // PAGE) * PAGE
        libc = ctypes.CDLL(None, use_errno=True)
        at, size = ctypes.c_void_p(base + first), ctypes.c_size_t(end - first)
        assert libc.mprotect(at, size, mmap.PROT_READ) == 0

    def read_only(self, what: str) -> None:
        if what == "ring":
            self.protect(self.at(RINGS_AT), 2 * PAGE)
        elif what == "slot":
            self.protect(self.at(SLOTS_AT), 512)
        elif what == "pages":
            self.protect(self.at(SLABS_AT), SLAB_WORDS)

    def die(self, verb: Callable[[BatchRing, int], object], where: str) -> bool:
        """Let a worker of its own process take the batch and do `verb`; whether it died of it."""

        def work() -> None:
            reader, writer = os.pipe()
            if where == "bell":
                os.close(reader)  # ringing it is fatal, then
            worker = BatchRing(self.memory, worker=0, front_doorbells=[writer])
            verb(worker, worker.take())

        return died(work)

    def left(self) -> tuple[int, int]:
        """Return the slots and pages that nobody has given back."""
        return self.front.outstanding(), self.front.slab_pages_used()

    def bury(self) -> None:
        """The owner hears of it, and the caller."""
        assert self.front.worker_died(0, 1, 14, "died") == (0, 1)
        self.front.release(self.lease, 1)


def answer(ring: BatchRing, slot: int) -> int:
    offset = ring.allocate_slab(3 * PAGE)
    assert offset
    return offset


def send_part(torn: Torn, where: str) -> Callable[[BatchRing, int], object]:
    def verb(ring: BatchRing, slot: int) -> None:
        offset = answer(ring, slot)
        torn.read_only(where)
        ring.send_part(slot, 0, offset, 3 * PAGE, True)

    return verb


def answer_lease(torn: Torn, where: str) -> Callable[[BatchRing, int], object]:
    def verb(ring: BatchRing, slot: int) -> None:
        offset = answer(ring, slot)
        torn.read_only(where)
        ring.answer_lease(slot, 0, 0, offset, 3 * PAGE)

    return verb


def keep_inputs(torn: Torn, where: str) -> Callable[[BatchRing, int], object]:
    def verb(ring: BatchRing, slot: int) -> None:
        torn.read_only(where)
        ring.keep_inputs(slot, 0)

    return verb


def send_records(torn: Torn, where: str) -> Callable[[BatchRing, int], object]:
    def verb(ring: BatchRing, slot: int) -> None:
        bell = os.pipe()[1]
        sender = TokenSender(torn.memory, worker=0, front_doorbells=[bell])
        sender.token(sender.admit(slot), 7)
        torn.read_only(where)
        sender.publish()

    return verb


VERBS = {
    send_part: ("ring", "bell", "pages"),
    send_records: ("ring", "pages", "slot"),
    answer_lease: ("slot", "pages"),
    keep_inputs: ("slot", "pages"),
}
CASES = [pytest.param(verb, where, id=f"{verb.__name__}-{where}") for verb in VERBS for where in VERBS[verb]]


@pytest.mark.parametrize(("verb", "where"), CASES)
def test_a_worker_that_dies_in_a_verb_leaves_nothing(verb, where):
    torn = Torn()
    assert torn.die(verb(torn, where), where), f"{verb.__name__} does not come to the {where}"
    torn.bury()
    torn.front.drain()
    assert torn.left() == (0, 0)


@pytest.mark.parametrize(("verb", "where"), CASES)
def test_nor_does_its_successor_lose_what_it_has_leased_meanwhile(verb, where):
    """Words that outlive what they are about come to a front that reads them later."""
    torn = Torn()
    reader = TokenReader(torn.memory, front=0)
    reader.listen(0, torn.tag, "it")
    assert torn.die(verb(torn, where), where)
    torn.bury()
    successor = BatchRing(torn.memory, worker=0)
    mine = [successor.allocate_slab(3 * PAGE), successor.allocate_slab(PAGE)]
    found = torn.front.drain()
    assert not [said for kind, said in found if kind in (PART, RECORDS)]
    assert reader.read([]) == []
    assert torn.left() == (0, 4), "the successor's"
    for offset in mine:
        successor.free_slab(offset)
    assert torn.left() == (0, 0)


def test_parts_of_an_answer_that_is_done_outlive_their_worker():
    torn = Torn()

    def verb(ring: BatchRing, slot: int) -> None:
        offset = answer(ring, slot)
        ring.slab(offset, 3 * PAGE, writable=True)[:4] = b"part"
        assert ring.send_part(slot, 0, offset, 3 * PAGE, True)
        assert ring.publish(slot)
        os.kill(os.getpid(), signal.SIGKILL)

    assert torn.die(verb, "")
    assert torn.front.worker_died(0, 1, 14, "died") == (0, 0)
    ((kind, part),) = [said for said in torn.front.drain() if said[0] == PART]
    assert kind == PART
    assert bytes(torn.front.slab(part[3], part[4])[:4]) == b"part"
    torn.front.free_slab(part[3])
    torn.front.release(torn.lease, 1)
    assert torn.left() == (0, 0)


@pytest.mark.parametrize("where", ["slot", "pages"])
@pytest.mark.parametrize("verb", ["release", "free_slab", "abandon"])
def test_a_front_that_dies_as_it_lets_go_leaves_nothing(verb, where):
    """Of what was answered, of what it has leased, of what it cannot submit."""
    torn = Torn(fronts=2)
    dying, worker = BatchRing(torn.memory, front=1), BatchRing(torn.memory, worker=0)
    torn.front.drop(torn.lease, 1)
    lease = dying.reserve(1)
    slab = dying.allocate_slab(2 * PAGE)

    def work() -> None:
        torn.read_only(where)
        dying.free_slab(slab) if verb == "free_slab" else getattr(dying, verb)(lease, 1)

    if verb != "free_slab":
        dying.attach_slab(lease, slab, 2 * PAGE)
    if verb == "release":
        dying.commit(lease, 1)
        slot = worker.take()
        worker.answer_lease(slot, 0, 0, answer(worker, slot), 3 * PAGE)
        worker.publish(slot)
    assert died(work) or (verb, where) == ("free_slab", "slot")
    for _ in range(2):
        torn.front.reclaim_front(1)
        lost = torn.front.lost()
    for one in lost:
        assert torn.front.forgive(*one)
    if (slot := worker.take()) >= 0:
        worker.publish(slot)
    assert torn.left() == (0, 0)
