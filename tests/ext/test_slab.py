"""Slabs against a plain oracle, and under processes that die and scrawl."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import slab
from fastserve._ext.slab import PAGE_BYTES, SlabPool
from tests.oracles.slab import PlainSlabs

PAGES = 12
WORDS_AT = 128  # of the pool's header


def make_pool(pages: int = PAGES) -> SlabPool:
    return SlabPool.create(mmap.mmap(-1, slab.pool_bytes(pages)), pages)


EVENTS = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 5 * PAGE_BYTES), st.integers(1, 3)),
    st.tuples(st.sampled_from(["release", "give 1", "give 2"]), st.integers(0, PAGES), st.integers(1, 3)),
    st.tuples(st.just("reclaim"), st.just(0), st.integers(1, 3)),
    st.tuples(st.just("trim"), st.just(0), st.just(9)),
)


@given(st.lists(EVENTS, max_size=40))
def test_agrees_with_the_oracle(events):
    pool, oracle = make_pool(), PlainSlabs(PAGES)
    first_page = slab.pool_bytes(PAGES) - PAGES * PAGE_BYTES
    for verb, number, owner in events:
        if verb == "allocate":
            got, wanted = pool.allocate(number, owner), oracle.allocate(number, owner)
            assert got == (0 if wanted is None else first_page + wanted * PAGE_BYTES)
            if got:
                assert len(pool.view(got, number)) == number
        elif verb == "trim":
            assert pool.trim(owner) == oracle.trim()
        elif verb == "reclaim":
            assert pool.reclaim(owner) == oracle.reclaim(owner)
        else:
            offset = first_page + number * PAGE_BYTES
            giver = int(verb[-1]) if verb != "release" else 0
            known = oracle.give(number, giver, owner) if giver else oracle.release(number)
            with contextlib.nullcontext() if known else pytest.raises(ValueError, match="start of a lease"):
                pool.give(offset, giver, owner) if giver else pool.release(offset)
        assert pool.used() == oracle.used()


def test_leases_do_not_overlap_and_keep_their_bytes():
    pool = make_pool()
    offsets = [pool.allocate(n * PAGE_BYTES, 1) for n in (1, 2, 3)]
    for i, offset in enumerate(offsets):
        pool.view(offset, (i + 1) * PAGE_BYTES)[:] = bytes([i]) * (i + 1) * PAGE_BYTES
    for i, offset in enumerate(offsets):
        assert set(pool.view(offset, (i + 1) * PAGE_BYTES)) == {i}


def test_the_lowest_pages_with_room_are_leased():
    """Pages that a load keeps touched are as many as it holds at a time, however long it goes on."""
    pool = make_pool()
    first = pool.allocate(1, 1)
    held = [pool.allocate(1, 1) for _ in range(4)]
    for offset in (held[2], held[0]):
        pool.release(offset)
    assert pool.allocate(2 * PAGE_BYTES, 1) == held[3] + PAGE_BYTES, "neither hole has room for two pages"
    assert [pool.allocate(1, 1), pool.allocate(1, 1)] == [held[0], held[2]]
    for _ in range(100 * PAGES):
        offset = pool.allocate(1, 1)
        assert offset <= first + 7 * PAGE_BYTES
        pool.release(offset)


def test_pages_free_at_two_looks_are_given_back_and_no_others():
    pool = make_pool()
    kept, left, again = (pool.allocate(2 * PAGE_BYTES, 1) for _ in range(3))
    for offset in (kept, left, again):
        pool.view(offset, 2 * PAGE_BYTES)[:] = b"x" * 2 * PAGE_BYTES
    pool.release(left)
    pool.release(again)
    assert pool.trim(9) == 0, "free at one look only"
    assert pool.allocate(2 * PAGE_BYTES, 1) == left
    assert pool.trim(9) == 2
    pages = [(kept, b"x"), (left, b"x"), (again, b"\0")]
    assert pool.allocate(2 * PAGE_BYTES, 1) == again
    assert [bytes(pool.view(offset, 2 * PAGE_BYTES)) for offset, _ in pages] == [
        byte * 2 * PAGE_BYTES for _, byte in pages
    ]


def test_a_death_while_giving_back_is_swept():
    memory = mmap.mmap(-1, slab.pool_bytes(PAGES))
    pool = SlabPool.create(memory, PAGES)
    pool.release(pool.allocate(PAGES * PAGE_BYTES, 1))
    pool.trim(9)
    held = 9 << 32 | 0xFFFFFFFF  # pages 1 and 2, on their way out
    struct.pack_into("<2Q", memory, WORDS_AT + 8, held, held)
    assert pool.allocate(PAGES * PAGE_BYTES, 1) == 0
    assert pool.reclaim(9) == 2
    assert pool.allocate(PAGES * PAGE_BYTES, 1)


@pytest.mark.parametrize("offset", [0, 1, PAGE_BYTES, 1 << 40, (1 << 64) - PAGE_BYTES])
def test_what_is_no_lease_is_refused(offset):
    pool = make_pool()
    pool.allocate(3 * PAGE_BYTES, 1)
    for call in (
        lambda: pool.release(offset + 1),
        lambda: pool.view(offset + 1, 1),
        lambda: pool.give(offset + 1, 1, 1),
    ):
        with pytest.raises((ValueError, OverflowError)):
            call()


def test_a_lease_is_not_larger_than_it_is():
    pool = make_pool()
    offset = pool.allocate(10, 1)
    assert len(pool.view(offset, PAGE_BYTES)) == PAGE_BYTES
    for size in (PAGE_BYTES + 1, 1 << 62):
        with pytest.raises(ValueError, match="leased slab"):
            pool.view(offset, size)
    assert pool.allocate(PAGES * PAGE_BYTES, 1) == 0
    assert pool.allocate(1 << 63, 1) == 0


def test_half_made_and_half_released_leases_are_swept():
    memory = mmap.mmap(-1, slab.pool_bytes(PAGES))
    pool = SlabPool.create(memory, PAGES)
    inside = 0xFFFFFFFF
    pool.release(pool.allocate(3 * PAGE_BYTES, 1))
    struct.pack_into("<3Q", memory, WORDS_AT, 7 << 32 | inside, 7 << 32 | inside, 8 << 32 | 1)
    assert pool.used() == 3
    assert pool.reclaim(7) == 2
    assert pool.used() == 1


@given(st.binary(min_size=PAGES * 8, max_size=PAGES * 8), st.integers(0, 1 << 63))
def test_scrawled_words_lead_nobody_outside(words, hint):
    size = slab.pool_bytes(PAGES)
    memory = mmap.mmap(-1, size)
    pool = SlabPool.create(memory, PAGES)
    first = pool.allocate(1, 1)
    memory[WORDS_AT - 64 : WORDS_AT - 56] = hint.to_bytes(8, "little")
    memory[WORDS_AT : WORDS_AT + PAGES * 8] = words
    for page in range(PAGES):
        offset = first + page * PAGE_BYTES
        with contextlib.suppress(ValueError):
            pool.view(offset, 2 * PAGE_BYTES)[:] = bytes(2 * PAGE_BYTES)
        with contextlib.suppress(ValueError):
            pool.release(offset)
        pool.allocate(3 * PAGE_BYTES, 2)
    pool.trim(9)
    pool.reclaim(2)
    assert pool.used() <= PAGES


def test_memory_that_holds_no_pool():
    for size in (64, 1 << 16):
        with pytest.raises(ValueError, match="no slab pool"):
            SlabPool(bytearray(size))
    with pytest.raises(ValueError, match="needs"):
        SlabPool.create(bytearray(100), 4)
    memory = bytearray(slab.pool_bytes(2))
    SlabPool.create(memory, 2)
    memory[4:8] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(ValueError, match="no slab pool"):
        SlabPool(memory)


CHILD = """
import mmap, os, sys
from fastserve._ext.slab import SlabPool
pool = SlabPool(mmap.mmap(int(sys.argv[1]), int(sys.argv[2])))
for turn in range(3000):
    held = [pool.allocate(n * 4000, 9) for n in (1, 3, 2)]
    for offset in filter(None, held):
        pool.view(offset, 4)[:] = b"kid!"
    for offset in filter(None, held):
        assert bytes(pool.view(offset, 4)) == b"kid!"
        if turn < 2999:
            pool.release(offset)
os._exit(9)
"""


def test_two_processes_share_pages_and_the_dead_ones_are_swept():
    size = slab.pool_bytes(PAGES)
    fd = os.memfd_create("slabs")
    os.ftruncate(fd, size)
    pool = SlabPool.create(mmap.mmap(fd, size), PAGES)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(fd), str(size)], pass_fds=[fd])
    while child.poll() is None:
        offset = pool.allocate(5000, 1)
        if offset:
            pool.view(offset, 5000)[:] = b"p" * 5000
            pool.trim(2)
            assert set(pool.view(offset, 5000)) == {ord("p")}
            pool.release(offset)
    assert child.returncode == 9
    os.close(fd)
    held = pool.used()
    assert held > 0
    assert pool.reclaim(9) == held
    assert pool.used() == 0


def test_threads_share_pages():
    pool = make_pool(32)
    done = threading.Event()

    def trim() -> None:
        while not done.is_set():
            pool.trim(9)

    trimming = threading.Thread(target=trim)
    trimming.start()

    def turn(owner: int) -> None:
        for n in range(2000):
            offset = pool.allocate(n % 9000, owner)
            if offset:
                pool.view(offset, n % 9000)[:] = bytes([owner]) * (n % 9000)
                assert bytes(pool.view(offset, n % 9000)) == bytes([owner]) * (n % 9000)
                pool.release(offset)

    threads = [threading.Thread(target=turn, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    trimming.join()
    assert pool.used() == 0
