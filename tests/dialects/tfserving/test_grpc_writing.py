"""PredictResponses of the fast path, kept but for their values, against the writer of all of them."""

from __future__ import annotations

from math import prod
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.tensor_proto import IS_VARINT, write_model_spec, write_predict_response
from fastserve.dialects.tfserving.grpc_predict import PLAIN_BYTES, make_template, make_writer
from fastserve.tensor import DTYPES, DType

SPEC = write_model_spec("m", 3, "serving_default")
SIZED = [dtype for dtype in DTYPES.values() if dtype.item_bytes]
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
FLOAT = DTYPES["float32"].code


@given(st.lists(st.tuples(st.sampled_from(SIZED), SHAPES), max_size=3), st.booleans(), st.integers(0, 2**32))
def test_any_outputs(outputs: list[tuple[DType, tuple[int, ...]]], content: bool, seed: int) -> None:
    """In an order of their own, and more of them than are wanted."""
    random = Random(seed)
    memory = [random.randbytes(dtype.item_bytes * prod(shape)) for dtype, shape in outputs]
    found = [(f"y{at}", at, dtype.code, shape) for at, (dtype, shape) in enumerate(outputs)]
    random.shuffle(found)
    found = found[:2]
    described = [(alias, code, shape) for alias, _, code, shape in found]
    wanted = write_predict_response(described, [memory[at] for _, at, _, _ in found], SPEC, content)
    write = make_writer(found, SPEC, content)
    for _ in range(2):  # nothing of one response stays for the next
        assert write([memoryview(raw) for raw in memory]) == wanted
        write([bytes(len(raw)) for raw in memory])
    plain = content or not any(IS_VARINT[code] for _, code, _ in described)
    assert bool(make_template(described, SPEC, content)) == plain


def test_what_is_large_is_written_with_the_interpreter_free() -> None:
    for items, plain in ((PLAIN_BYTES // 4, True), (PLAIN_BYTES // 4 + 1, False)):
        described = [("y", FLOAT, (1, items))]
        assert bool(make_template(described, SPEC, content=False)) == plain
        raw = bytes(range(1, 5)) * items
        written = make_writer([("y", 0, FLOAT, (1, items))], SPEC, content=False)([raw])
        assert written == write_predict_response(described, [raw], SPEC)
