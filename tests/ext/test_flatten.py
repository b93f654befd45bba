"""flatten against numpy, there and back, and everything it must refuse with a path."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastserve._ext.flatten import (
    FlattenCode,
    FlattenFault,
    flatten,
    join_columns,
    pack_bytes,
    take_column,
    unflatten,
    unpack_bytes,
    walk_bytes,
)
from fastserve.tensor import DTYPES
from tests.effort import examples
from tests.oracles import flatten as oracle

NUMBERS = [name for name in DTYPES if name not in ("bytes", "bfloat16")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@examples(150)
@given(st.sampled_from(NUMBERS), SHAPES, st.data())
def test_agrees_with_numpy(dtype: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    if 0 in shape:
        shape = shape[: shape.index(0) + 1]  # what lies behind an empty list cannot be seen
    array = data.draw(hnp.arrays(dtype, shape))
    code = DTYPES[dtype].code
    got_shape, memory = flatten(array.tolist(), code)
    assert got_shape == shape
    np.testing.assert_array_equal(np.frombuffer(memory, dtype).reshape(shape), array)
    np.testing.assert_array_equal(np.array(unflatten(memory, code, shape), dtype).reshape(shape), array)


@examples(200)
@given(st.lists(st.floats(-65000, 65000)), st.sampled_from(["float16", "bfloat16", "float32"]))
def test_narrow_floats_round_like_the_oracle(values: list[float], dtype: str) -> None:
    assert flatten(values, DTYPES[dtype].code) == oracle.flatten(values, dtype)


def test_every_half() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    halves = unflatten(every.tobytes(), DTYPES["float16"].code, (2**16,))
    np.testing.assert_array_equal(np.array(halves), every.view(np.float16).astype(np.float64))
    finite = [half for half in halves if half == half]
    _, memory = flatten(finite, DTYPES["float16"].code)
    np.testing.assert_array_equal(np.frombuffer(memory, np.float16), np.array(finite))


@given(
    st.lists(st.one_of(st.binary(max_size=9), st.text(st.characters(exclude_categories=["Cs"]), max_size=9)))
)
def test_texts(items: list[bytes | str]) -> None:
    plain = [item.encode() if isinstance(item, str) else item for item in items]
    packed = pack_bytes(items)
    assert packed == b"".join(struct.pack("<I", len(item)) + item for item in plain)
    assert unpack_bytes(packed, len(items)) == plain
    assert flatten(items, DTYPES["bytes"].code) == ((len(items),), packed)
    assert unflatten(packed, DTYPES["bytes"].code, (len(items), 1)) == [[item] for item in plain]


def test_numpy_scalars_are_values() -> None:
    assert flatten([np.float32(0.5), np.int8(2)], DTYPES["float64"].code)[1] == struct.pack("<dd", 0.5, 2.0)
    assert flatten((np.int64(-1),), DTYPES["int8"].code)[1] == b"\xff"
    assert flatten([np.True_], DTYPES["bool"].code)[1] == b"\x01"


@pytest.mark.parametrize(
    ("value", "dtype", "code", "path"),
    [
        ([[1], [2, 3]], "float32", FlattenCode.RAGGED, "[1]"),
        ([1, [2]], "float32", FlattenCode.RAGGED, "[1]"),
        ([[1], 2], "float32", FlattenCode.RAGGED, "[1]"),
        ([[[1, 2], [3]]], "float32", FlattenCode.RAGGED, "[0][1]"),
        ([[], [1]], "float32", FlattenCode.RAGGED, "[1]"),
        ([[0, 300]], "uint8", FlattenCode.OVERFLOW, "[0][1]"),
        ([-1], "uint64", FlattenCode.OVERFLOW, "[0]"),
        ([2**64], "uint64", FlattenCode.OVERFLOW, "[0]"),
        ([2**63], "int64", FlattenCode.OVERFLOW, "[0]"),
        ([-(2**31) - 1], "int32", FlattenCode.OVERFLOW, "[0]"),
        ([0, 1e39], "float32", FlattenCode.OVERFLOW, "[1]"),
        (70000, "float16", FlattenCode.OVERFLOW, ""),
        ([10**400], "float64", FlattenCode.OVERFLOW, "[0]"),
        ([1e39j], "complex64", FlattenCode.OVERFLOW, "[0]"),
        ([1.0], "int64", FlattenCode.TYPE, "[0]"),
        ([True], "int32", FlattenCode.TYPE, "[0]"),
        ([1], "bool", FlattenCode.TYPE, "[0]"),
        (["1"], "float32", FlattenCode.TYPE, "[0]"),
        ([None], "complex64", FlattenCode.TYPE, "[0]"),
        ([5], "bytes", FlattenCode.TYPE, "[0]"),
        ([{}], "float32", FlattenCode.TYPE, "[0]"),
    ],
)
def test_refuses(value: Any, dtype: str, code: FlattenCode, path: str) -> None:
    with pytest.raises(FlattenFault) as caught:
        flatten(value, DTYPES[dtype].code)
    assert (caught.value.code, caught.value.path) == (code, path)


def test_refuses_what_has_no_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(FlattenFault) as caught:
        flatten(endless, DTYPES["float32"].code)
    assert caught.value.code == FlattenCode.TOO_DEEP


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (b"\x01\x00\x00", 1, "element 0: no length at byte 0"),
        (b"\x00\x00\x00\x00\x05\x00\x00\x00a", 2, "element 1: 5 bytes at byte 4"),
        (b"\xff\xff\xff\xff", 1, "element 0: 4294967295 bytes"),
        (b"\x00\x00\x00\x00a", 1, "1 bytes after the last element, from byte 4"),
    ],
)
def test_unpack_refuses(data: bytes, count: int, words: str) -> None:
    with pytest.raises(FlattenFault, match=words):
        unpack_bytes(data, count)


@examples(150)
@given(st.lists(st.binary(max_size=4)), st.integers(0, 6), st.binary(max_size=9), st.integers(0, 9))
def test_walks_as_the_oracle(items: list[bytes], cut: int, more: bytes, most: int) -> None:
    data = bytes(pack_bytes(items))
    for whole in (data, data[: max(len(data) - cut, 0)], data + more):
        assert walk_bytes(whole, most) == oracle.walk_bytes(whole, most)


@pytest.mark.parametrize("shape", [(3,), (-1,), (2**40, 2**40), (10**9, 0)])
def test_unflatten_refuses(shape: tuple[int, ...]) -> None:
    with pytest.raises(FlattenFault) as caught:
        unflatten(b"\0" * 8 if shape[-1] else b"", DTYPES["float32"].code, shape)
    assert caught.value.code == FlattenCode.SIZE


PLAIN = [name for name in NUMBERS if name not in ("float16", "complex64", "complex128")]


@examples(150)
@given(st.sampled_from(["float32", "float64"]), st.integers(0, 600), st.data())
def test_columns_join_like_numpy(wanted: str, rows: int, data: st.DataObject) -> None:
    """Of any types of numbers, unaligned; each column taken out again is the one that was sent."""
    dtypes = data.draw(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    columns = [random.integers(0, 256, rows * np.dtype(one).itemsize, np.uint8) for one in dtypes]
    sent = [
        (column % 2).astype(bool) if one == "bool" else column.view(one)
        for column, one in zip(columns, dtypes, strict=True)
    ]
    given = [
        (memoryview(b"x" + one.tobytes())[1:], DTYPES[name].code)
        for one, name in zip(sent, dtypes, strict=True)
    ]
    with np.errstate(all="ignore"):
        right = np.column_stack([one.astype(wanted) for one in sent])
    code = DTYPES[wanted].code
    matrix = join_columns(given, code)
    np.testing.assert_array_equal(np.frombuffer(matrix, wanted).reshape(rows, len(dtypes)), right)
    for at in range(len(dtypes)):
        np.testing.assert_array_equal(
            np.frombuffer(take_column(matrix, code, len(dtypes), at, code), wanted), right[:, at]
        )


def test_columns_of_one_type_stay_as_they_are() -> None:
    code = DTYPES["int64"].code
    assert join_columns([(struct.pack("<q", one), code) for one in (2**62 + 1, -1)], code) == struct.pack(
        "<2q", 2**62 + 1, -1
    )
    assert join_columns([], code) == b""


@pytest.mark.parametrize(
    ("columns", "wanted", "words"),
    [
        ([(b"ab", "uint8"), (b"a", "uint8")], "float32", "columns of 2 and of 1 numbers"),
        ([(b"abc", "int16")], "float32", "3 bytes are no numbers of 2 bytes"),
        ([(b"ab", "float16")], "float32", "no numbers that can be converted"),
        ([(b"ab", "bytes")], "bytes", "no numbers that can be converted"),
        ([(b"a", "uint8")], "int64", "become float32 or float64"),
    ],
)
def test_no_columns(columns: list[tuple[bytes, str]], wanted: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        join_columns([(data, DTYPES[name].code) for data, name in columns], DTYPES[wanted].code)


@pytest.mark.parametrize(("width", "column"), [(2, 2), (2, -1), (0, 0), (-1, 0), (4, 0)])
def test_no_column(width: int, column: int) -> None:
    code = DTYPES["uint8"].code
    with pytest.raises(ValueError, match="no column"):
        take_column(b"abcdef", code, width, column, code)
