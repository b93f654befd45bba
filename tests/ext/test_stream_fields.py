"""The fields that every request over HTTP/2 begins with, against plain Python ones."""

from __future__ import annotations

import gc
import weakref
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import stream_fields as ext
from fastserve.wire.grpc.metadata import NEVER_NS
from tests.oracles import stream_fields as oracle

TIMED = {"received_ns", "deadline_ns"}


def fields(made: Any) -> dict[str, Any]:
    """All of them but times."""
    names = set(getattr(oracle, type(made).__name__).__slots__)
    return {name: getattr(made, name) for name in names - TIMED}


@given(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_a_stream(number: int, window: int) -> None:
    connection, head, state = SimpleNamespace(client_window=window), object(), object()
    made = [of.StreamFields(connection, number, head, state) for of in (ext, oracle)]
    assert fields(made[0]) == fields(made[1])


@given(st.one_of(st.just(-1), st.integers(0, NEVER_NS)))
def test_a_call(timeout_ns: int) -> None:
    head, stream = SimpleNamespace(timeout_ns=timeout_ns), object()
    before = monotonic_ns()
    made = [of.CallFields(head, stream) for of in (ext, oracle)]
    after = monotonic_ns()
    assert fields(made[0]) == fields(made[1])
    for call in made:
        assert before <= call.received_ns <= after
        assert call.deadline_ns == (call.received_ns + timeout_ns if timeout_ns >= 0 else 0)


def test_fields_take_what_they_are_given() -> None:
    stream = ext.StreamFields(SimpleNamespace(client_window=0), 1, None, None)
    stream.window -= 10  # SETTINGS may take it below zero
    assert stream.window == -10
    call = ext.CallFields(SimpleNamespace(timeout_ns=-1), stream)
    call.over, call.sent_bytes, call.trailing = True, 1 << 40, (("a", "b"),)
    assert (call.over, call.sent_bytes, call.trailing) == (True, 1 << 40, (("a", "b"),))
    with pytest.raises(AttributeError):
        call.unheard_of = 1


def test_a_circle_is_found_by_the_collector() -> None:
    class Head:
        timeout_ns = -1

    head = Head()
    stream = ext.StreamFields(SimpleNamespace(client_window=0), 1, head, None)
    stream.context = ext.CallFields(head, stream)
    gone = weakref.ref(head)
    del head, stream
    gc.collect()
    assert gone() is None
