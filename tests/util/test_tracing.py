"""Request ids and trace context."""

from __future__ import annotations

import os

import pytest

from fastserve.util import tracing
from fastserve.util.tracing import (
    choose_request_id,
    make_request_id,
    read_trace_context,
    read_trace_id,
)

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_sane_id_is_kept() -> None:
    for given_id in (b"abc-123", b"a" * 128, b"Root=1-67891233-abcdef012345678912345678"):
        assert choose_request_id(given_id, PARENT) == given_id.decode()


@pytest.mark.parametrize(
    "given_id", [b"", b"a" * 129, b"a\r\nb", b"a b", b"\x00", b"\xff", b'"x"', b"a\n", b"<x>"]
)
def test_another_is_replaced(given_id: bytes) -> None:
    assert choose_request_id(given_id, PARENT) == "0af7651916cd43dd8448eb211c80319c"
    assert choose_request_id(given_id) != choose_request_id(given_id)


def test_made_ids_are_unique_and_sane() -> None:
    made = [make_request_id() for _ in range(10_000)]
    assert len(set(made)) == len(made)
    assert choose_request_id(made[0].encode()) == made[0]


def test_a_forked_child_makes_other_ids() -> None:
    before = tracing._prefix
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, tracing._prefix.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 100).decode() != before
    os.close(read_end)
    os.close(write_end)


def test_traceparent() -> None:
    assert read_trace_id(PARENT) == "0af7651916cd43dd8448eb211c80319c"
    assert read_trace_id(b"01" + PARENT[2:] + b"-more") == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"ff" + PARENT[2:],
        PARENT + b"-more",
        PARENT.upper(),
        PARENT + b"\n",
        PARENT[:-1],
        b"00-" + b"0" * 32 + PARENT[35:],
        PARENT[:36] + b"0" * 16 + b"-01",
        b"01" + PARENT[2:] + b"-" + b"x" * 1000,
    ],
)
def test_insane_traceparents(header: bytes) -> None:
    assert read_trace_id(header) == ""


def test_a_tracestate_that_cannot_be_is_left_out() -> None:
    parent = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
    for given, state in ((b"a=b,c=d", "a=b,c=d"), (b"", ""), (b"\xff", ""), (b"a=" + b"b" * 511, "")):
        found = read_trace_context(parent, given)
        assert found is not None
        assert found.state == state
        assert found.traceparent.encode() == parent
