"""Tensors in slabs: the module and its oracle write the same bytes and read the same tensors, broken slabs
included; nothing read lies outside the slab."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import slab_tensors
from fastserve._ext.slab_tensors import MAX_RANK, SlabCodec
from fastserve.tensor import DTYPE_BY_CODE, DTYPES
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.arrays import open_slab_codec
from tests.oracles import slab_tensors as plain

INT32 = DTYPES["int32"].code
NOTES = st.binary(max_size=20)


@st.composite
def entries(draw):
    code = draw(st.sampled_from(sorted(DTYPE_BY_CODE)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=5)))
    item_bytes = DTYPE_BY_CODE[code].item_bytes
    size = int(np.prod(shape, dtype=int)) * item_bytes if item_bytes else draw(st.integers(0, 40))
    return draw(st.integers(0, 65535)), code, shape, draw(st.binary(min_size=size, max_size=size))


def plainly(read):
    return [(number, code, shape, bytes(data)) for number, code, shape, data in read]


def made(tensors, note=b""):
    slab = bytearray(plain.measure(tensors, note))
    plain.write(slab, tensors, note)
    return slab


@given(st.lists(entries(), max_size=4), NOTES)
def test_writes_what_the_oracle_writes(tensors, note):
    assert slab_tensors.measure(tensors, note) == plain.measure(tensors, note)
    ours = bytearray(plain.measure(tensors, note))
    slab_tensors.write(ours, tensors, note)
    assert ours == made(tensors, note)


@given(st.lists(st.tuples(entries(), st.booleans()), max_size=4), NOTES)
def test_room_is_left_where_it_is_asked_for(tensors, note):
    """Numbers of bytes in the place of data: the same slab, but for what lay there before."""
    given = [entry for entry, _ in tensors]
    rooms = [(*entry[:3], len(entry[3])) if room else entry for entry, room in tensors]
    assert slab_tensors.measure(rooms, note) == plain.measure(given, note)
    ours = bytearray(made(given, note))
    slab_tensors.write(ours, rooms, note)
    assert ours == made(given, note)
    with_noise = bytearray(b"\x5b" * len(ours))
    slab_tensors.write(with_noise, rooms, note)
    found = slab_tensors.read(with_noise)
    assert [one[:3] for one in found] == [one[:3] for one in given]
    for (_, _, _, data), (entry, room) in zip(found, tensors, strict=True):
        assert bytes(data) == (b"\x5b" * len(entry[3]) if room else entry[3])


@given(st.lists(entries(), max_size=4), NOTES)
def test_lays_out_what_is_filled_later(tensors, note):
    described = [(number, code, shape, len(data)) for number, code, shape, data in tensors]
    slab = made(tensors, note)
    head, starts, size = slab_tensors.lay_out(described, bool(note))
    assert (slab[: len(head)], size) == (head, plain.measure(tensors))
    for at, (*_, data) in zip(starts, tensors, strict=True):
        assert slab[at : at + len(data)] == data
        slab[at : at + len(data)] = bytes(len(data))
    assert not any(slab[len(head) : size])


@given(st.lists(entries(), max_size=4), NOTES)
def test_reads_what_the_oracle_reads(tensors, note):
    slab = made(tensors, note)
    assert plainly(slab_tensors.read(slab)) == plain.read(bytes(slab)) == tensors
    assert bytes(slab_tensors.read_note(slab)) == note


@given(st.lists(entries(), max_size=3), NOTES, st.data())
def test_a_broken_slab_is_judged_as_the_oracle_judges_it(tensors, note, data):
    slab = made(tensors, note)
    for _ in range(data.draw(st.integers(1, 5))):
        slab[data.draw(st.integers(0, len(slab) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(slab[: data.draw(st.integers(0, len(slab)) | st.just(len(slab)))])
    for ours, theirs in ((slab_tensors.read, plain.read), (slab_tensors.read_note, plain.read_note)):
        try:
            wanted = theirs(cut)
        except ValueError:
            with pytest.raises(ValueError):
                ours(cut)
            continue
        found = ours(cut)
        assert (bytes(found) if theirs is plain.read_note else plainly(found)) == wanted


@given(st.integers(2, 1 << 40), st.integers(2, 1 << 40), st.integers(2, 1 << 40))
def test_products_that_overflow(a, b, c):
    slab = made([(0, INT32, (2, 2, 2), bytes(32))])
    for axis, length in enumerate((a, b, c)):
        at = plain.HEAD.size + 24 + 8 * axis
        slab[at : at + 8] = length.to_bytes(8, "little")
    if (a, b, c) == (2, 2, 2):
        assert len(slab_tensors.read(slab)) == 1
    else:
        with pytest.raises(ValueError, match="does not fill its bytes"):
            slab_tensors.read(slab)


def test_an_arrays_own_shape():
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    slab = bytearray(slab_tensors.measure([(7, INT32, None, array)]))
    slab_tensors.write(slab, [(7, INT32, None, array)])
    assert plainly(slab_tensors.read(slab)) == [(7, INT32, (3, 4), array.tobytes())]


@pytest.mark.parametrize("shape", [None, (1,) * (MAX_RANK + 1)])
def test_too_many_axes(shape):
    if shape is not None:
        with pytest.raises(ValueError, match="at most 16 axes"):
            slab_tensors.lay_out([(0, INT32, shape, 0)])
    data = np.zeros((1,) * (MAX_RANK + 1), np.int32)
    with pytest.raises(ValueError, match="at most 16 axes, not 17"):
        slab_tensors.measure([(0, INT32, shape, data)])


def test_what_is_no_tensor_is_refused_and_nothing_stays_borrowed():
    held = bytearray(4)
    with pytest.raises((TypeError, BufferError)):
        slab_tensors.measure([(0, INT32, (1,), held), (1, INT32, (1,), object())])
    held.append(0)  # a buffer that were still lent out could not grow
    with pytest.raises((ValueError, BufferError)):
        slab_tensors.measure([(0, INT32, None, np.zeros((4, 4), np.int32)[:, ::2])])


def test_a_slab_that_is_too_small():
    with pytest.raises(ValueError, match="bytes of room for 256"):
        slab_tensors.write(bytearray(255), [(0, INT32, (1,), bytes(4))])


@pytest.fixture
def arena():
    geometry = Geometry(
        slots=4, max_rows=8, inputs=(), outputs=(), slab_pages=4, max_delay_ns=0, workers=1, fronts=1
    )
    made = Arena.create(geometry)
    yield made
    gc.collect()
    made.close()


def test_the_desks_of_two_processes(arena):
    front, worker = SlabCodec(arena.memory, front=0), open_slab_codec(arena, arena.ring(worker=0))
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    offset, nbytes = front.put(
        [(0, INT32, (1, 16), numbers.tobytes()), (1, DTYPES["bytes"].code, (1,), b"xy")], b"n"
    )
    ((_, code, shape, array), (_, _, _, packed)), note = worker.arrays(offset, nbytes)
    assert (code, shape, bytes(packed), note) == (INT32, (1, 16), b"xy", b"n")
    assert array.tolist() == numbers.tolist()
    assert not array.flags.writeable
    assert plainly(front.read(offset, nbytes)[0])[0] == (0, INT32, (1, 16), numbers.tobytes())
    ring = arena.ring(front=0)
    ring.free_slab(offset)
    with pytest.raises(ValueError, match="not the bytes of a leased slab"):
        front.read(offset, nbytes)
    assert ring.slab_pages_used() == 0


def test_no_room(arena):
    desk = SlabCodec(arena.memory, front=0)
    offset, nbytes = desk.put([(0, DTYPES["uint8"].code, (1 << 20,), bytes(1 << 20))])
    assert (offset, nbytes > 1 << 20) == (0, True)
    assert arena.ring(front=0).slab_pages_used() == 0


def test_memory_without_slabs():
    bare = Arena.create(
        Geometry(
            slots=4, max_rows=8, inputs=(4,), outputs=(4,), slab_pages=0, max_delay_ns=0, workers=1, fronts=1
        )
    )
    with pytest.raises(ValueError, match="no arena with slabs"):
        SlabCodec(bare.memory, front=0)
    with pytest.raises(ValueError, match="no arena with slabs"):
        SlabCodec(bytes(64), front=0)
    bare.close()


@given(tensors=st.lists(entries(), max_size=4), note=NOTES, at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_desk_lays_out_and_looks_as_the_others_write_and_read(tensors, note, at, byte):
    arena = Arena.create(Geometry(1, 1, (), (), 16, 0, 1, 1, False))
    ring, desk = arena.ring(front=0), SlabCodec(arena.memory, front=0)
    described = [(number, code, shape, len(data)) for number, code, shape, data in tensors]
    head, starts, size = slab_tensors.lay_out(described, bool(note))
    spans = [(start, len(data)) for start, (*_, data) in zip(starts, tensors, strict=True)]
    offset, nbytes, memory = desk.lay(head, spans, size, note)
    for room, (*_, data) in zip(memory, tensors, strict=True):
        room[:] = data
    entries_read, note_read = desk.read(offset, nbytes)
    assert (plainly(entries_read), note_read) == (tensors, note)
    found = desk.look(offset, nbytes)
    assert (found is None) == bool(note)
    slab = ring.slab(offset, nbytes, True)
    slab[at % nbytes] = byte  # whatever it says now, both ways in believe the same
    found = desk.look(offset, nbytes)
    try:
        entries_read, note_read = desk.read(offset, nbytes)
    except ValueError:
        assert found is None
    else:
        if found is not None:
            assert not note_read
            assert list(found[0]) == [entry[:3] for entry in entries_read]
            assert [bytes(m) for m in found[1]] == [bytes(entry[3]) for entry in entries_read]
    ring.free_slab(offset)
    slab = memory = entries_read = found = room = ring = desk = None
    arena.close()


def test_a_desk_lays_nothing_out_that_does_not_fit(arena):
    desk, ring = SlabCodec(arena.memory, front=0), arena.ring(front=0)
    used = ring.slab_pages_used()
    for head, spans in ((b"", [(0, 65)]), (b"", [(65, 0)]), (bytes(65), [])):
        with pytest.raises(ValueError, match="does not lie in its slab"):
            desk.lay(head, spans, 64)
    assert desk.lay(b"", [], 1 << 40)[0] == 0
    assert ring.slab_pages_used() == used
