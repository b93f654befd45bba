"""Round trips, type by type; values that cannot travel are named; bytes never crash the reader."""

from __future__ import annotations

import contextlib
import enum
import math
import pickle
import random
import subprocess
import sys
from collections import OrderedDict, namedtuple
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastserve.codec.safe_msgpack import MAX_DEPTH, CannotTravel, Damaged, decode, encode
from tests.effort import examples


def same(a: object, b: object) -> bool:
    """Equal, with the same types all the way down, and NaN equal to NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) if a == b else a != a and b != b
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set | frozenset):
        return a == b and sorted(map(repr, map(type, a))) == sorted(map(repr, map(type, b)))
    return a == b


dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
scalars = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, 1).map(lambda array: array[0]))
zones = st.none() | st.integers(-1439, 1439).map(lambda m: timezone(timedelta(minutes=m)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.text(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.dates(),
    st.datetimes(timezones=zones),
)
keys = st.recursive(
    leaves.filter(lambda x: x == x),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    leaves | arrays | scalars | st.binary().map(bytearray) | st.sets(keys, max_size=3) | keys,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


@examples(150)
@given(values)
def test_what_travels_comes_back_the_same(value: object) -> None:
    found = decode(encode(value))
    assert same(found, value), (found, value)
    assert same(decode(memoryview(bytearray(encode(value)))), value)


@pytest.mark.parametrize(
    "value",
    [
        [(), [()], set(), frozenset(), {}, "", b"", bytearray()],
        {1: "a", (1, 2): "b", None: "c", b"x": "d", frozenset({1}): "e"},
        [2**64 - 1, -(2**63), 2**64, -(2**63) - 1, 10**1000, True, 1.0],
        [-0.0, math.inf, math.nan, 5e-324],
        ["\ud800", {"\udfff": 1}],
        np.float64(1.5),
        np.arange(24, dtype=">i4").reshape(2, 3, 4)[:, ::2].T,
        np.zeros((0, 3), np.float16),
        np.array(3),
        np.array(["a", "bc"]),
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.bytes_(b""),
        np.datetime64("NaT"),
        datetime(2026, 1, 1, 12, fold=1, tzinfo=timezone.utc),
        date(1, 1, 1),
    ],
    ids=repr,
)
def test_corners(value: object) -> None:
    assert same(decode(encode(value)), value)


def test_arrays_come_back_writable_and_their_own() -> None:
    data = bytearray(encode(np.arange(3)))
    array = decode(data)
    array[0] = 7
    data[:] = bytes(len(data))
    assert array.tolist() == [7, 1, 2]


class Bar:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("nothing here is ever pickled")


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


class MyArray(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (Bar(), "value", "tests.codec.test_safe_msgpack.Bar"),
        ([0, 1, 2, {"x": Bar()}], "value[3]['x']", "tests.codec.test_safe_msgpack.Bar"),
        (({"a": [Decimal(1)]},), "value[0]['a'][0]", "decimal.Decimal"),
        ({Point(1, 2): 1}, "value.keys()[a key of type Point]", "Point"),
        ({"n": {Decimal(1)}}, "value['n']{...}", "decimal.Decimal"),
        ([Colour.RED], "value[0]", "Colour"),
        (OrderedDict(), "value", "collections.OrderedDict"),
        ([1j], "value[0]", "complex"),
        ([object()], "value[0]", "object"),
        ([len], "value[0]", "builtin_function_or_method"),
        (np.array([None]), "value", "numpy.ndarray with dtype object"),
        (np.zeros(2, [("a", "i4")]), "value", "numpy.ndarray with dtype"),
        (np.zeros(2).view(MyArray), "value", "MyArray"),
        ([2**70, "\ud800", Bar()], "value[2]", "tests.codec.test_safe_msgpack.Bar"),
        (
            datetime.max.time(),
            "value",
            "datetime.time",
        ),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value: object, place: str, kind: str) -> None:
    with pytest.raises(CannotTravel) as caught:
        encode(value)
    text = str(caught.value)
    assert text.startswith(f"{place}: objects of type ")
    assert kind in text.split(" cannot travel between processes; supported are ")[0]


def nest(depth: int, kind: type) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"k": value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict, frozenset])
def test_depth(kind: type) -> None:
    assert same(decode(encode(nest(MAX_DEPTH, kind))), nest(MAX_DEPTH, kind))
    for depth in (MAX_DEPTH + 1, 500):
        with pytest.raises(CannotTravel, match=f"more than {MAX_DEPTH} containers"):
            encode(nest(depth, kind))


def test_a_list_within_itself_is_too_deep() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(CannotTravel, match="containers within each other"):
        encode(value)


def ext(code: int, data: bytes = b"") -> bytes:
    return b"\xc7" + bytes([len(data), code]) + data


MARKED = b"\x81\x0a"
BLOCK0 = ext(34)


@examples(300)
@given(st.binary(max_size=200), st.sampled_from([b"", MARKED]))
def test_any_bytes_are_read_or_refused(data: bytes, form: bytes) -> None:
    with contextlib.suppress(Damaged):
        decode(form + data)


@examples(150)
@given(values, st.randoms(use_true_random=False))
def test_spoiled_bytes_are_read_or_refused(value: object, rng: random.Random) -> None:
    data = bytearray(encode(value))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(Damaged):
        decode(data)
    with contextlib.suppress(Damaged):
        decode(data[: rng.randrange(len(data))])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0\xc0",
        MARKED,
        ext(1),
        MARKED + b"\x81\x01\x01",
        MARKED + b"\x81\x05\xa1x",
        MARKED + b"\x81\x63\x90",
        MARKED + b"\x82\x01\x90\x02\x90",
        MARKED + b"\x81\x91\x01\x90",
        MARKED + ext(99),
        MARKED + b"\x91" + ext(1, b"x"),
        MARKED + b"\x81\x04\x91\x01",
        MARKED + b"\x81\x04\x92\x90\x01",
        MARKED + b"\x81\x02\x91\x90",
        MARKED + b"\x81\x08\x93\xa3<f8\x91\x03" + BLOCK0,
        MARKED + b"\x81\x08\x93\xa3<f8\x91\xff" + BLOCK0,
        MARKED + b"\x81\x08\x93\xa2|O\x91\x01" + ext(34, bytes(8)),
        MARKED + b"\x81\x08\x93\xa3<f8\x92\xcf" + b"\x40" + bytes(7) + b"\x04" + BLOCK0,
        MARKED + b"\x81\x08\x93\xa3<f8\xdc\x00\x80" + b"\x01" * 128 + ext(34, bytes(8)),
        MARKED + b"\x81\x08\x93\xa3<f8\x93\x00" + 2 * (b"\xcf\x3f" + b"\xff" * 7) + BLOCK0,
        MARKED + b"\x81\x09\x92\xa3<f8" + BLOCK0,
        MARKED + b"\x81\x06\x92\xa3abc\x00",
        MARKED + b"\x81\x06\x92\x01\x00",
        MARKED + b"\x81\x05\x91\xce\xff\xff\xff\xff",
        MARKED + ext(33, b"\xff"),
        b"\x91" * 100_000 + b"\xc0",
        MARKED + b"\x91" * 100 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        pickle.dumps([1]),
        MARKED + MARKED + b"\x01",
        MARKED + BLOCK0,
        MARKED + b"\x91" + ext(34, b"x"),
        BLOCK0,
    ],
)
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(Damaged, match="not an encoded object"):
        decode(data)


def test_numpy_is_not_imported_for_others() -> None:
    code = (
        "import sys; from fastserve.codec.safe_msgpack import *;"
        "assert decode(encode([(1, {2}), 2**80])) == [(1, {2}), 2**80];"
        "assert 'numpy' not in sys.modules and 'pickle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
