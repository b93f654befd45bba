"""Arrays of clients as bytes of V2, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fastserve.client.tensors import (
    DeclaredTensor,
    as_values,
    from_values,
    numpy_type,
    pack,
    to_array,
    unpack,
)
from fastserve.errors import ServeError
from fastserve.tensor import DTYPE_BY_KSERVE

NUMBERS = sorted(set(DTYPE_BY_KSERVE) - {"BYTES", "BF16"})


@given(st.data())
def test_numbers_come_back_bit_by_bit(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(NUMBERS))
    array = data.draw(arrays.arrays(numpy_type(datatype), arrays.array_shapes(min_dims=0, min_side=0)))
    found = unpack(pack(array, datatype), datatype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert (found.dtype, found.shape, found.flags.writeable) == (array.dtype, array.shape, True)


@given(st.lists(st.binary() | st.text()))
def test_strings_come_back_as_bytes(texts: list[bytes | str]) -> None:
    found = unpack(pack(np.array([*texts, None], object)[:-1], "BYTES"), "BYTES", (len(texts),))
    assert found.tolist() == [one if isinstance(one, bytes) else one.encode() for one in texts]


@given(arrays.arrays(np.float32, 5))
def test_bfloat16_rounds_as_ml_dtypes_does(array: np.ndarray[Any, Any]) -> None:
    with np.errstate(invalid="ignore"):
        rounded = array.astype(ml_dtypes.bfloat16)
        found = unpack(pack(array, "BF16"), "BF16", (5,))
        np.testing.assert_array_equal(found, rounded.astype(np.float32))


@given(st.data())
def test_values_of_json_come_back(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(NUMBERS))
    finite = {} if datatype[:2] != "FP" else {"allow_nan": False, "allow_infinity": False}
    array = data.draw(arrays.arrays(numpy_type(datatype), (2, 2), elements=finite or None))
    np.testing.assert_array_equal(from_values(as_values(array, datatype), datatype, (2, 2)), array)


def test_values_take_the_declared_type_where_their_kind_is_kept() -> None:
    wanted = DeclaredTensor("x", "UINT8", (-1,))
    assert to_array([1, 255], wanted).dtype == np.uint8
    for wrong in ([256], [-1], np.array([300])):
        with pytest.raises(ValueError, match="x: uint8 has values from 0 to 255"):
            to_array(wrong, wanted)
    with pytest.raises(ValueError, match="x: "):
        to_array([[1], [1, 2]], wanted)
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert to_array(half, DeclaredTensor("x", "BF16", (-1,))).tolist() == [1, 1]
    assert to_array(torch.arange(2), DeclaredTensor("x", "FP32", (-1,))).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("data", "datatype", "shape"),
    [
        (b"123", "FP32", (1,)),
        (b"\5\0\0\0a", "BYTES", (1,)),
        (b"\1\0\0\0a", "BYTES", (2,)),
        (b"", "WHAT", (0,)),
    ],
)
def test_an_answer_that_does_not_fit_its_shape_is_an_error(
    data: bytes, datatype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ServeError):
        unpack(data, datatype, shape)
