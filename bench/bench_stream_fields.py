"""What is made for one call of gRPC, its stream and itself: compiled, and as plain Python."""

from types import SimpleNamespace
from typing import Any

import pytest

from fastserve._ext import stream_fields
from tests.oracles import stream_fields as oracle


@pytest.mark.parametrize("of", [stream_fields, oracle], ids=["compiled", "python"])
def test_a_stream_and_its_call(benchmark: Any, of: Any) -> None:
    connection, head = SimpleNamespace(client_window=65535), SimpleNamespace(timeout_ns=-1)

    class Stream(of.StreamFields):  # type: ignore[misc]
        __slots__ = ()

    class Call(of.CallFields):  # type: ignore[misc]
        __slots__ = ("more",)

    call = benchmark(lambda: Call(head, Stream(connection, 1, head, None)))
    assert (call.stream.window, call.deadline_ns, call.over) == (65535, 0, False)
