"""The compiled way of a streamed reply's pieces does what its oracle does; a subclass may do otherwise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import stream_path as ext
from tests.oracles import stream_path as oracle

SIZES = st.sampled_from([0, 1, 9, 15, 16, 255, 256, 4095, 4096, 65535, 65536])
FLAGS = ("gone", "closed", "choked", "other")
STEPS = st.lists(st.one_of(SIZES, st.sampled_from(FLAGS)), max_size=8)


class Connection:
    """Keeps what is written."""

    def __init__(self, call: Any) -> None:
        self._current, self._choked, self._transport = call, False, self
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def play(of: Any, head: bytes, chunked: bool, silent: bool, steps: list[Any]) -> Any:
    """All that can be seen of these steps: pieces of such sizes, and flags that turn."""
    call = SimpleNamespace(gone=False)
    connection = Connection(call)
    stream = of.StreamPath(call, connection, head, chunked, silent)
    seen: list[Any] = [stream.ready]
    for step in steps:
        if step == "gone":
            call.gone = not call.gone
        elif step == "closed":
            stream._closed = not stream._closed
        elif step == "choked":
            connection._choked = not connection._choked
        elif step == "other":
            connection._current = None if connection._current is call else call
        else:
            stream.send(b"\x00\xff\r\n"[: step % 4] + b"x" * (step - step % 4))
        seen.append((stream.ready, stream.sent_bytes, stream._head, stream._closed))
    return seen, connection.written


@given(st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n\r\n"]), st.booleans(), st.booleans(), STEPS)
def test_pieces(head: bytes, chunked: bool, silent: bool, steps: list[Any]) -> None:
    assert play(ext, head, chunked, silent, steps) == play(oracle, head, chunked, silent, steps)


def test_a_transport_that_changed_is_the_one_written_to() -> None:
    """As when the client has sent its last byte (wire.halves)."""
    call = SimpleNamespace(gone=False)
    connection, later = Connection(call), Connection(call)
    stream = ext.StreamPath(call, connection, b"", True, False)
    stream.send(b"a")
    connection._transport = later
    stream.send(b"b")
    assert (connection.written, later.written) == ([b"1\r\na\r\n"], [b"1\r\nb\r\n"])


def test_a_subclass_may_do_it_otherwise() -> None:
    """As HTTP/2 does."""

    class Framed(ext.StreamPath):
        full = False

        def _may_send(self) -> bool:
            return not self.full

        def _send_piece(self, data: bytes) -> None:
            sent.append(data)

    sent: list[bytes] = []
    stream = Framed(SimpleNamespace(gone=False), None, b"", True, False)
    assert stream.ready
    stream.send(b"abc")
    stream.full = True
    assert not stream.ready
    assert (sent, stream.sent_bytes) == ([b"abc"], 3)


def test_what_asking_raises_is_raised() -> None:
    class Broken(ext.StreamPath):
        def _may_send(self) -> bool:
            raise ZeroDivisionError

    stream = Broken(SimpleNamespace(gone=False), None, b"", True, False)
    with pytest.raises(ZeroDivisionError):
        _ = stream.ready
    with pytest.raises(AttributeError):
        ext.StreamPath(SimpleNamespace(gone=False), asyncio, b"", True, False).send(b"x")
