"""A small message read and written, and one of 600 KB in the pieces of a socket: against slices, a join."""

from __future__ import annotations

import pytest

from fastserve._ext.grpc_messages import MessageReader, frame_message, whole_message

SMALL, LARGE = bytes(range(100)), bytes(range(256)) * 2400
PIECES = [frame_message(LARGE)[at : at + 16384] for at in range(0, len(LARGE) + 5, 16384)]


def plainly(body: bytes) -> bytes:
    assert not body[0]
    assert int.from_bytes(body[1:5], "big") == len(body) - 5
    return body[5:]


@pytest.mark.parametrize("read", [lambda body: whole_message(body, 1 << 20), plainly], ids=["ours", "plain"])
def test_a_small_message(benchmark, read):  # type: ignore[no-untyped-def]
    assert benchmark(lambda: read(frame_message(SMALL))) == SMALL
    assert benchmark.disabled or benchmark.stats["min"] < 2e-6


def in_place() -> bytes:
    reader = MessageReader(1 << 20)
    return next(message for piece in PIECES for message, _ in reader.feed(piece))


@pytest.mark.parametrize("read", [in_place, lambda: b"".join(PIECES)[5:]], ids=["ours", "plain"])
def test_a_large_message(benchmark, read):  # type: ignore[no-untyped-def]
    assert benchmark(read) == LARGE
    assert benchmark.disabled or benchmark.stats["min"] < 1e-3
