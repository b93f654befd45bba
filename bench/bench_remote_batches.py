"""Packing and reading a frame of eight small batches, against the same in plain Python."""

from __future__ import annotations

import pytest

from fastserve._ext.remote_batches import MessageKind, WireMessage, read_messages
from tests.oracles import remote_batches as plain

FIELDS = (MessageKind.BATCH, 1 << 40, 32, 0, 0, [(0, 16), (16, 16)], [bytes(512)])
COUNT = 8


def compiled() -> int:
    frame = b"".join(WireMessage(*FIELDS).pack()[0] for _ in range(COUNT))
    return sum(message.rows for message in read_messages([memoryview(frame)]))


def interpreted() -> int:
    frame = b"".join(plain.pack(plain.PlainMessage(*FIELDS))[0] for _ in range(COUNT))
    return sum(message.rows for message in plain.read([frame]))


@pytest.mark.parametrize(("kind", "limit_s"), [(compiled, 200e-6), (interpreted, 2e-3)])
def test_frame(benchmark, kind, limit_s):  # type: ignore[no-untyped-def]
    assert benchmark(kind) == 32 * COUNT
    assert benchmark.disabled or benchmark.stats["min"] < limit_s
