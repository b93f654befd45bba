"""Readers of grps's two forms by themselves: what they pass, what they bound, what is learned. No server."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any, SupportsIndex

import numpy as np
import pytest

from fastserve._ext.message_skeleton import MOST_HEAD_BYTES
from fastserve.codec.byte_formats import head_of, write_varint
from fastserve.dialects.grps import rpcs
from fastserve.dialects.grps.json_messages import cut_arrays, find_arrays, wants_stream
from fastserve.dialects.grps.rpcs import SCHEME, GrpsPredictRpc
from fastserve.protos import load
from fastserve.repository.catalog import VersionListeners
from fastserve.request import InferRequest
from fastserve.serving import request_templates
from fastserve.tensor import DTYPES, Tensor

UNKNOWN = write_varint(15 << 3 | 2) + b"\x02\x0b\x0c"  # a field nobody knows, which is no message


def a_message(*values: float) -> Any:
    message = load("grps").GrpsMessage(model="m")
    message.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=[len(values)], flat_float32=values)
    return message


def test_fields_nobody_knows_make_another_request() -> None:
    data = a_message(1.0, 2.0).SerializeToString()
    known = SCHEME.read(data)
    assert known is not None
    assert (known.sizes, known.leads, known.fields) == ((8,), (2,), ((0, 10),))
    tensors = a_message(1.0, 2.0).gtensors.SerializeToString()
    for other in (data + UNKNOWN, head_of(5, len(tensors) + len(UNKNOWN)) + tensors + UNKNOWN):
        found = SCHEME.read(other)
        assert found is not None
        assert (found.sizes, found.leads) == ((8,), (2,))
        assert found.head != known.head


def test_floats_that_are_not_packed_are_not_learned() -> None:
    one = b"\x55\x00\x00\x80\x3f"  # field 10, four bytes
    tensor = one * 2000
    tensors = head_of(1, len(tensor)) + tensor
    data = head_of(5, len(tensors)) + tensors
    assert len(load("grps").GrpsMessage.FromString(data).gtensors.tensors[0].flat_float32) == 2000
    assert SCHEME.read(data) is None


@pytest.mark.parametrize(("more", "learned"), [(0, True), (MOST_HEAD_BYTES, False)])
def test_what_is_kept_of_a_message_is_bounded(
    more: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(request_templates, "open_path", lambda version, *_: opened.append(version))
    service: Any = SimpleNamespace(
        keepers=VersionListeners(SimpleNamespace(on_change=[], on_renewed=[])),
        traffic=None,
        answered=None,
        offload=None,
    )
    fast = GrpsPredictRpc(service)
    data = a_message(1.0, 2.0).SerializeToString() + head_of(99, more) + bytes(more)
    request = InferRequest({"x": Tensor(DTYPES["float32"], (2,), np.array([1, 2], "<f4").tobytes())})
    version: Any = SimpleNamespace(model="m")
    monkeypatch.setattr(rpcs, "speaks_messages", lambda version: False)
    fast.cache_template(data, a_message(1.0, 2.0), request, version)
    assert bool(opened) is learned


@pytest.mark.parametrize(("rows", "in_a_thread"), [(1000, False), (200_000, True)])
def test_large_answers_are_written_in_a_thread(rows: int, in_a_thread: bool) -> None:
    """Numbers that are no plain floats become objects, each of them: 10 MB held the event loop for 0.7 s."""
    replies, works = list[bytes](), list[int]()

    async def offload(nbytes: int, work: Any, *given: Any) -> Any:
        works.append(nbytes)
        return work(*given)

    service: Any = SimpleNamespace(offload=offload, look_up=str)
    exchange: Any = SimpleNamespace(reply=replies.append)
    response: Any = SimpleNamespace(nbytes=rows, outputs={"y": Tensor(DTYPES["int8"], (rows,), bytes(rows))})
    later = rpcs.GrpsTemplate(service, "m").write_response(exchange, response, None, None)
    assert (later is not None) == in_a_thread
    if later is not None:
        asyncio.run(later)
    assert len(works) == in_a_thread
    (message,) = map(load("grps").GrpsMessage.FromString, replies)
    assert len(message.gtensors.tensors[0].flat_int8) == rows


class Counted(bytes):
    """Counts the bytes that `find` has gone over."""

    seen = 0

    def find(self, sub: Any, start: Any = None, end: SupportsIndex | None = None) -> int:
        found = super().find(sub, start, end)
        Counted.seen += (len(self) if found < 0 else found) - int(start or 0)
        return found


@pytest.mark.parametrize("end", [b"", b"]"])
def test_a_body_of_keys_alone_is_read_through_once(end: bytes) -> None:
    body = Counted(b'"flat_int8":[' * 2000 + end)
    Counted.seen = 0
    assert len(list(find_arrays(body))) == len(end)  # the last of them has an end
    assert Counted.seen < 3 * len(body)


def test_arrays_are_cut_where_they_are() -> None:
    body = b'{"flat_int8":[1,2],"a":[3],"flat_float32":[[4]],"flat_int32":[5]}'
    text, cut = cut_arrays(body)
    assert cut == [b"[1,2]", b"[5]"]
    assert text == b'{"=flat_int8":0,"a":[3],"flat_float32":[[4]],"=flat_int32":1}'


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"stream": true}', True),
        (b' {"a": [1, {"stream": false}], "stream"\t:\ntrue , "b": "\\u00e9"}', True),
        (b'{"stream": false}', False),
        (b'{"stream": "true"}', False),
        (b'{"stream": [true]}', False),
        (b'{"a": {"stream": true}}', False),
        (b'{"stream": true', False),
        (b'[{"stream": true}]', False),
        (b"", False),
        (b"\xff\xfe", False),
        (b'{"a": ' + b"[" * 100_000, False),
    ],
)
def test_what_a_body_of_a_deployments_own_says_of_streaming(body: bytes, wanted: bool) -> None:
    assert wants_stream(bytearray(body), "stream") is wanted


def test_a_body_of_many_values_becomes_no_objects() -> None:
    body = b'{"a": [' + b"[]," * 2_000_000 + b'[]], "stream": true}'
    tracemalloc.start()
    try:
        assert wants_stream(body, "stream")
        assert tracemalloc.get_traced_memory()[1] < len(body)  # 2 million lists would be 112 MB
    finally:
        tracemalloc.stop()
