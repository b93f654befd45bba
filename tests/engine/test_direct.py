"""Places filled without tensors in between: what a worker finds there is what `forms` would have written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from fastserve._ext import slab_tensors
from fastserve.engine.direct import open_intake, open_outlet, read_response
from fastserve.engine.lane import Lane, Ticket
from fastserve.engine.meters import LaneMeters
from fastserve.errors import ServeError
from fastserve.metrics.registry import Registry
from fastserve.tensor import DTYPES, Tensor, TensorSpec
from fastserve.workers.arena import Arena, Geometry

SPECS = {
    "a": TensorSpec("a", DTYPES["int8"], (3,)),
    "b": TensorSpec("b", DTYPES["float64"], (2, 2)),
    "c": TensorSpec("c", DTYPES["int16"], ()),
}
INPUTS = {name: Tensor(spec.dtype, (1, *(spec.shape or ())), b"") for name, spec in SPECS.items()}
ROW_BYTES = (3, 32, 2)


MakeLane = Callable[..., Lane]


@pytest.fixture
def make_lane() -> Iterator[MakeLane]:
    arenas: list[Arena] = []
    registry = Registry()

    def make(*, dense: bool, requests: bool = False, pages: int = 64) -> Lane:
        columns = ROW_BYTES if dense else ()
        arenas.append(
            Arena.create(Geometry(2, 4, columns, columns, 0 if dense else pages, 0, 1, 1, requests))
        )
        lane = Lane(arenas[-1], 0, SPECS, SPECS, LaneMeters(registry, "m", 1, 0, 4))
        lane._kick_soon = lambda: None  # type: ignore[method-assign]  # there is no loop
        return lane

    yield make
    for arena in arenas:
        arena.close()
    registry.close()


def is_clean(lane: Lane) -> bool:
    """Once a worker has found nobody waiting in what was abandoned."""
    worker = lane.arena.ring(worker=0)
    while (slot := worker.take()) >= 0:
        assert worker.places(slot) == []
        worker.publish(slot)
    return lane.ring.outstanding() == 0 and lane.ring.slab_pages_used() == 0


def contents(rows: int, sizes: tuple[int, ...] = ROW_BYTES) -> list[bytes]:
    numbers = itertools.count(1)
    return [bytes(next(numbers) % 251 for _ in range(rows * size)) for size in sizes]


@pytest.mark.parametrize("note", [b"", b"\x81\xa1i\xa17"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("names", ["abc", "cb", "a"])
def test_slabs_hold_what_was_put_in(make_lane: MakeLane, names: str, rows: int, note: bytes) -> None:
    lane = make_lane(dense=False, requests=True)
    intake = open_intake(lane, {name: INPUTS[name] for name in names}, batching=True)
    seat = intake.reserve(rows, note)
    assert seat is not None
    place, memory, (offset, size) = seat
    numbers = ["abc".index(name) for name in names]
    data = contents(rows, tuple(ROW_BYTES[number] for number in numbers))
    for into, given in zip(memory, data, strict=True):
        into[:] = given
    slab = lane.ring.slab(offset, size)
    specs = [SPECS[name] for name in names]
    assert [(n, code, shape, bytes(view)) for n, code, shape, view in slab_tensors.read(slab)] == [
        (number, spec.dtype.code, (rows, *(spec.shape or ())), given)
        for number, spec, given in zip(numbers, specs, data, strict=True)
    ]
    assert bytes(slab_tensors.read_note(slab)) == note
    intake.settle(seat)
    lane.ring.commit(place, rows)
    worker = lane.arena.ring(worker=0)
    assert worker.places(worker.take()) == [(0, rows, offset, size)]


def test_columns_hold_what_was_put_in(make_lane: MakeLane) -> None:
    lane = make_lane(dense=True)
    intake = open_intake(lane, {name: INPUTS[name] for name in "cab"}, batching=True)
    seat = intake.reserve(2)
    assert seat is not None
    place, memory, _ = seat
    data = contents(2, (2, 3, 32))
    for into, given in zip(memory, data, strict=True):
        into[:] = given
    intake.settle(seat)
    assert [bytes(lane.ring.input_rows(place, 2, column)) for column in range(3)] == [
        data[1],
        data[2],
        data[0],
    ]
    intake.abandon(seat, 2)
    assert is_clean(lane)


@pytest.mark.parametrize("dense", [True, False])
def test_what_is_abandoned_is_free_again(make_lane: MakeLane, dense: bool) -> None:
    lane = make_lane(dense=dense)
    intake = open_intake(lane, INPUTS, batching=True)
    for _ in range(20):
        seat = intake.reserve(4)
        assert seat is not None
        intake.abandon(seat, 4)
        assert is_clean(lane)


def test_no_room(make_lane: MakeLane) -> None:
    lane = make_lane(dense=True)
    intake = open_intake(lane, INPUTS, batching=True)
    seats = [intake.reserve(4) for _ in range(3)]
    assert [seat is None for seat in seats] == [False, False, True]
    lane = make_lane(dense=False, pages=1)
    large = {"a": Tensor(DTYPES["int8"], (1, 10_000), b"")}
    assert open_intake(lane, large, batching=True).reserve(1) is None
    assert is_clean(lane)


def test_answers_are_known_by_their_form(make_lane: MakeLane) -> None:
    lane = make_lane(dense=False, requests=True)
    outlet, place = open_outlet(lane, ("c",)), lane.ring.reserve(1)
    data = contents(1)
    entries: list[slab_tensors.Entry] = [(2, DTYPES["int16"].code, (1,), data[2]), (0, 6, (1, 3), data[0])]
    ticket = Ticket(lane, place, 1, lambda *_: None, 0, None)
    lane.ring.commit(place, 1)
    worker = lane.arena.ring(worker=0)
    desk = slab_tensors.SlabDesk(lane.arena.memory, worker=0)
    slot = worker.take()
    worker.answer_place(slot, 0, 0, *desk.put(entries))
    worker.publish(slot)
    found = outlet.read(place, 1)
    assert found is not None
    assert [bytes(view) for view in found[1]] == [data[2], data[0]]
    assert outlet.describe(found[0]) == [("c", DTYPES["int16"], (1,)), ("a", DTYPES["int8"], (1, 3))]
    assert list(read_response(lane, ticket, ("c",)).outputs) == ["c", "a"]  # the model's own choice


def test_errors_are_left_to_others(make_lane: MakeLane) -> None:
    lane = make_lane(dense=False, requests=True)
    place = lane.ring.reserve(1)
    lane.ring.commit(place, 1)
    worker = lane.arena.ring(worker=0)
    slot = worker.take()
    worker.answer_place(slot, 0, 3, 0, 0)
    worker.publish(slot)
    assert open_outlet(lane, ()).read(place, 1) is None
    with pytest.raises(ServeError):
        read_response(lane, Ticket(lane, place, 1, lambda *_: None, 0, None), ())
