"""PredictResponses out of memory that a worker shares: what is measured is what is written. No server."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve._ext.flatten import pack_bytes
from fastserve._ext.tensor_proto import write_model_spec, write_predict_response
from fastserve.dialects.tfserving import grpc_fast
from fastserve.dialects.tfserving.grpc_fast import write_response
from fastserve.protos import load
from fastserve.tensor import DTYPES

SPEC = write_model_spec("m", 1, "serving_default")


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "uint64", "float16", "bytes"])
def test_a_worker_cannot_change_what_was_measured(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Varints and strings are as long as their values say: one changed to a longer one has no room."""

    def scribble(described: object, raw: list[memoryview], *more: object) -> bytes:
        before = [bytes(memory) for memory in raw]
        shared[:] = b"\xff" * len(shared)  # between measuring and writing
        assert [bytes(memory) for memory in raw] == before
        return write_predict_response(described, raw, *more)  # type: ignore[arg-type]

    code = DTYPES[dtype].code
    shared = bytearray(pack_bytes([b"ab", b"c"]) if dtype == "bytes" else bytes(2 * DTYPES[dtype].item_bytes))
    monkeypatch.setattr(grpc_fast, "write_predict_response", scribble)
    data = write_response([("y", code, (2,))], [memoryview(shared)], SPEC, False)
    told = load("tfserving").PredictResponse.FromString(data).outputs["y"]
    assert [size.size for size in told.tensor_shape.dim] == [2]
    assert dtype != "bytes" or list(told.string_val) == [b"ab", b"c"]


def test_numbers_as_they_lie_in_memory_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(grpc_fast, "write_predict_response", lambda described, raw, *_: given.extend(raw))
    memory = memoryview(np.ones(4, "<f4").tobytes())
    write_response([("y", DTYPES["float32"].code, (4,))], [memory], SPEC, False)
    assert given[0] is memory
