"""Tensors in a slab: they come back as they went in, and a damaged slab is refused, not believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.codec.slab_contents import measure_tensors, read_tensors, write_tensors
from fastserve.tensor import DTYPES, Tensor

HEAD_BYTES = 8
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(SHAPES)
    items = 1
    for length in shape:
        items *= length
    size = items * dtype.item_bytes if dtype.item_bytes else draw(st.integers(0, 40))
    return draw(st.integers(0, 60_000)), Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


def write(numbered) -> memoryview:
    slab = memoryview(bytearray(measure_tensors(numbered) + 100))
    write_tensors(slab, numbered)
    return slab


@given(st.lists(tensors(), max_size=5))
def test_comes_back_as_it_went_in(numbered):
    read = read_tensors(write(numbered))
    assert [(n, t.dtype, t.shape, bytes(t.data)) for n, t in read] == [
        (n, t.dtype, t.shape, bytes(t.data)) for n, t in numbered
    ]


def test_tensors_are_aligned_views():
    numbered = [(n, Tensor(DTYPES["uint8"], (3,), b"abc")) for n in range(3)]
    slab = write(numbered)
    for _, tensor in read_tensors(slab):
        assert tensor.data.obj is slab.obj
    starts = [bytes(slab).find(b"abc", at) for at in range(0, len(slab), 64) if slab[at : at + 3] == b"abc"]
    assert len(starts) == 3


@given(st.lists(tensors(), min_size=1, max_size=3), st.data())
def test_a_damaged_slab_is_refused_or_stays_inside_itself(numbered, data):
    slab = write(numbered)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(slab) - 1))
        slab[at] = data.draw(st.integers(0, 255))
    cut = slab[: data.draw(st.integers(0, len(slab)))]
    try:
        found = read_tensors(cut)
    except ValueError:
        return
    for _, tensor in found:
        assert len(tensor.data) <= len(cut)
        assert all(length >= 0 for length in tensor.shape)


@pytest.mark.parametrize("size", range(HEAD_BYTES + 1))
def test_too_small_to_hold_anything(size):
    with pytest.raises(ValueError, match="holds no tensors"):
        read_tensors(memoryview(bytes(size)))


def test_shapes_that_overflow():
    slab = write([(0, Tensor(DTYPES["uint8"], (1,), b"x"))])
    axes = (1 << 4, (1 << 60) + 2)
    for i, length in enumerate(axes):
        at = HEAD_BYTES + 24 + 8 * i
        slab[at : at + 8] = length.to_bytes(8, "little")
    slab[HEAD_BYTES + 3] = 2  # rank
    with pytest.raises(ValueError, match="does not fill"):
        read_tensors(slab)


def test_at_most_16_axes():
    deep = Tensor(DTYPES["uint8"], (1,) * 17, b"x")
    with pytest.raises(ValueError, match="at most 16 axes"):
        write_tensors(memoryview(bytearray(4096)), [(0, deep)])
