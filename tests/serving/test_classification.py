"""Classes: how values are ordered, and which have no order."""

from __future__ import annotations

import struct
from array import array
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import Kind, ServeError
from fastserve.serving.model_view import check_order, classify
from fastserve.tensor import ARRAY_CODE, DTYPES, Tensor

NAN = float("nan")


def test_classes_in_order() -> None:
    data = struct.pack("<8f", 1, 3, 3, NAN, -1, float("-inf"), 2, NAN)
    found = classify(Tensor(DTYPES["float32"], (2, 4), data), 3, ("a", "b"), batching=True)
    assert [[(c.idx, c.value, c.label) for c in row] for row in found] == [
        [(1, 3.0, "b"), (2, 3.0, ""), (0, 1.0, "a")],
        [(2, 2.0, ""), (0, -1.0, "a"), (1, float("-inf"), "b")],  # NaN is the least of all
    ]


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.integers(1, 30))
def test_the_best_come_first(values: list[float], most: int) -> None:
    tensor = Tensor(DTYPES["float32"], (len(values),), array("f", values).tobytes())
    [found] = classify(tensor, most, (), batching=False)
    order = sorted((isnan(v), -v if v == v else 0, i) for i, v in enumerate(array("f", values)))
    assert [c.idx for c in found] == [i for _, _, i in order][:most]


@pytest.mark.parametrize("name", list(ARRAY_CODE))
def test_every_ordered_type(name: str) -> None:
    """Its own width and sign, over whatever axes; the whole tensor is one row without a batch axis."""
    numbers = [0, 1, 5, 4, 2, 3] if name.startswith("u") else [0, 1, 5, -4, -2, -3]
    data = array(ARRAY_CODE[name], numbers).tobytes()
    assert len(data) == 6 * DTYPES[name].item_bytes
    tensor = Tensor(DTYPES[name], (2, 1, 3), memoryview(data))
    best = [2, 0] if name.startswith("u") else [2, 1]
    assert [row[0].idx for row in classify(tensor, 1, (), batching=True)] == best
    assert [c.idx for c in classify(tensor, 1, (), batching=False)[0]] == [2]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_nothing_to_order(shape: tuple[int, int]) -> None:
    found = classify(Tensor(DTYPES["int64"], shape, b""), 3, (), batching=True)
    assert found == [[]] * shape[0]


@pytest.mark.parametrize("name", ["bool", "bytes", "float16", "bfloat16", "complex64"])
def test_types_without_order(name: str) -> None:
    with pytest.raises(ServeError) as caught:
        check_order(Tensor(DTYPES[name], (1,), b""), "output 'y'", "X")
    assert (caught.value.kind, caught.value.message) == (
        Kind.INVALID_ARGUMENT,
        "class result not available for output 'y' due to unsupported type 'X'",
    )
