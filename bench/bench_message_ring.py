"""A message through the ring and its doorbell, against a pipe."""

from __future__ import annotations

import mmap
import os

import pytest

from fastserve._ext.message_ring import MessageRing, ring_bytes


def ring(doorbell: int = -1):  # type: ignore[no-untyped-def]
    end = MessageRing(mmap.mmap(-1, ring_bytes(64)), 64, doorbell)

    def turn() -> int:
        end.push(kind=1, slot=2, seq=3, value=4)
        if doorbell >= 0:
            end.wait(-1)
        message = end.pop()
        return message[3] if message else 0

    return turn


def ring_and_bell():  # type: ignore[no-untyped-def]
    return ring(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))


def pipe():  # type: ignore[no-untyped-def]
    there, here = os.pipe()
    return lambda: (os.write(here, b"\1\2\3\4"), os.read(there, 4)[3])[1]


@pytest.mark.lingers
@pytest.mark.parametrize(("make", "most_ns"), [(ring, 500), (ring_and_bell, 5000), (pipe, 0)])
def test_one_message(benchmark, make, most_ns):  # type: ignore[no-untyped-def]
    assert benchmark.pedantic(make(), rounds=20, iterations=5000) == 4
    assert benchmark.disabled or not most_ns or benchmark.stats["min"] < most_ns * 1e-9
