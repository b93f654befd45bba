"""The message ring against a queue, across processes with real doorbells, and with a hostile writer."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import message_ring
from fastserve._ext.message_ring import MessageRing
from tests.oracles.message_ring import PlainRing

KIND, HALF, WORD = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
SECOND_NS = 1_000_000_000


def make_memory(capacity: int) -> mmap.mmap:
    return mmap.mmap(-1, message_ring.ring_bytes(capacity))


@given(st.sampled_from([1, 2, 8]), st.lists(st.none() | st.tuples(KIND, HALF, WORD, WORD), max_size=60))
def test_agrees_with_the_oracle(capacity, events):
    """None is a pop."""
    memory = make_memory(capacity)
    writer, reader, oracle = MessageRing(memory, capacity), MessageRing(memory, capacity), PlainRing(capacity)
    for event in events:
        if event is None:
            assert reader.pop() == oracle.pop()
        else:
            kind, slot, seq, value = event
            assert writer.push(kind=kind, slot=slot, seq=seq, value=value) == oracle.push(*event)


def test_counters_wrap_around():
    memory = make_memory(4)
    start = (1 << 64) - 2
    struct.pack_into("<Q", memory, 0, start)
    struct.pack_into("<Q", memory, 64, start)
    ring = MessageRing(memory, 4)
    for n in range(10):
        assert ring.push(kind=1, value=n)
        assert ring.pop() == (1, 0, 0, n)


@given(WORD, WORD)
def test_a_hostile_writer_leads_the_reader_nowhere(tail, head):
    memory = make_memory(8)
    struct.pack_into("<Q", memory, 0, tail)
    struct.pack_into("<Q", memory, 64, head)
    ring = MessageRing(memory, 8)
    for _ in range(20):
        ring.pop()
        ring.push(kind=1)


def test_bounds_at_the_door():
    for capacity in (0, 3, 12):
        with pytest.raises(ValueError, match="power of two"):
            MessageRing(make_memory(16), capacity)
    with pytest.raises(ValueError, match="needs"):
        MessageRing(bytearray(100), 4)
    with pytest.raises(ValueError, match="64-byte"):
        MessageRing(memoryview(make_memory(16))[8:], 4)


def test_the_bell_wakes_a_sleeper_once():
    doorbell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        ring = MessageRing(make_memory(4), 4, doorbell)
        assert not ring.wait(0)
        ring.push(kind=1)
        ring.push(kind=2)
        assert ring.wait(SECOND_NS)
        assert not ring.wait(0), "one wait clears the bell; the messages say how many there were"
        assert [ring.pop(), ring.pop(), ring.pop()] == [(1, 0, 0, 0), (2, 0, 0, 0), None]
    finally:
        os.close(doorbell)


ECHO = """
import mmap, sys
from fastserve._ext.message_ring import MessageRing, ring_bytes
fd, there, back, count = map(int, sys.argv[1:])
memory = memoryview(mmap.mmap(fd, 2 * ring_bytes(16)))
half = ring_bytes(16)
reader, writer = MessageRing(memory[:half], 16, there), MessageRing(memory[half:], 16, back)
while count:
    message = reader.pop()
    if message is None:
        reader.wait(10**10)
        continue
    kind, slot, seq, value = message
    while not writer.push(kind=kind, slot=slot, seq=seq, value=value * 3):
        pass
    count -= 1
"""


def test_two_processes_lose_and_reorder_nothing():
    count, half = 20_000, message_ring.ring_bytes(16)
    fd = os.memfd_create("rings")
    os.ftruncate(fd, 2 * half)
    there, back = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    memory = memoryview(mmap.mmap(fd, 2 * half))
    writer, reader = MessageRing(memory[:half], 16, there), MessageRing(memory[half:], 16, back)
    arguments = [str(n) for n in (fd, there, back, count)]
    with subprocess.Popen([sys.executable, "-c", ECHO, *arguments], pass_fds=[fd, there, back]) as child:
        sent = received = 0
        while received < count:
            while sent < count and writer.push(kind=sent % 7, slot=sent, seq=sent * 5, value=sent):
                sent += 1
            message = reader.pop()
            if message is None:
                assert reader.wait(10 * SECOND_NS), "the echo is not coming"
                continue
            assert message == (received % 7, received, received * 5, received * 3)
            received += 1
    assert child.returncode == 0
    for number in (fd, there, back):
        os.close(number)
