"""What a token costs: said, sent and read, 32 sequences a step, against pickled lists through a pipe."""

from __future__ import annotations

import mmap
import os
import pickle

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import RECORDS, BatchRing
from fastserve._ext.token_records import TokenReader, TokenSender

SEQUENCES = 32
TOKENS = [(5122 + n, 0, 4000, b"") for n in range(SEQUENCES)]


def ring():  # type: ignore[no-untyped-def]
    shape = {"slots": SEQUENCES, "max_rows": 1, "slab_pages": 64}
    memory = mmap.mmap(-1, batch_ring.measure(**shape))
    batch_ring.format_arena(memory, **shape)
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    front, worker = BatchRing(memory, front=0, own_doorbell=bell), BatchRing(memory, worker=0)
    reader = TokenReader(memory, front=0)
    sender = TokenSender(memory, worker=0, front_doorbells=[bell])
    for n in range(SEQUENCES):
        lease = front.reserve(1)
        reader.listen(lease >> 16, front.attach_slab(lease, front.allocate_slab(64), 64), n)
        front.commit(lease, 1)
    rids = [sender.admit(worker.take()) for _ in range(SEQUENCES)]

    def step():  # type: ignore[no-untyped-def]
        for rid, (token, _, took_us, _) in zip(rids, TOKENS, strict=True):
            if sender.room(rid):
                sender.token(rid, token, 0, took_us)
        sender.publish()
        heard = reader.read([entry for kind, entry in front.drain() if kind == RECORDS])
        for slot in range(SEQUENCES):
            reader.taken(slot, 1)
        return [records[0] for _, records in heard]

    return step


def pipe():  # type: ignore[no-untyped-def]
    there, here = os.pipe()

    def step():  # type: ignore[no-untyped-def]
        os.write(here, pickle.dumps(TOKENS))
        return pickle.loads(os.read(there, 65536))

    return step


@pytest.mark.lingers
@pytest.mark.parametrize(("make", "most_us"), [(ring, 3), (pipe, 0)])
def test_a_step_of_tokens(benchmark, make, most_us):  # type: ignore[no-untyped-def]
    found = benchmark.pedantic(make(), rounds=20, iterations=500)
    assert found == TOKENS
    assert benchmark.disabled or not most_us or benchmark.stats["min"] < most_us * 1e-6 * SEQUENCES
