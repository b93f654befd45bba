"""A token's event from its stream to the transport: the compiled way against its oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastserve._ext import stream_path
from tests.oracles import stream_path as oracle

EVENT = b'data: {"prefill_time":null,"decode_time":9.871,"token":{"id":269,"text":" of"}}\n\n'


@pytest.mark.parametrize("of", [stream_path, oracle], ids=["compiled", "python"])
def test_thirty_two_streams(benchmark: Any, of: Any) -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append)
    calls = [SimpleNamespace(gone=False) for _ in range(32)]
    streams = [
        of.StreamPath(
            call, SimpleNamespace(_current=call, _choked=False, _transport=transport), b"", True, False
        )
        for call in calls
    ]

    def step() -> None:
        for stream in streams:
            assert stream.ready
            stream.send(EVENT)

    benchmark(step)
    assert set(written) == {b"%x\r\n%b\r\n" % (len(EVENT), EVENT)}
