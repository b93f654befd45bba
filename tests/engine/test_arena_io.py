"""Places filled without tensors in between: what a worker finds there is what `forms` would have written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from fastserve._ext import slab_tensors
from fastserve._ext.fast_path import Ticket
from fastserve.engine.arena_io import SLICE_BYTES, join_parts, lay_out_inputs, lay_out_outputs, read_response
from fastserve.engine.batch_queue import BatchQueue, QueueMetrics
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


MakeQueue = Callable[..., BatchQueue]


@pytest.fixture
def make_queue() -> Iterator[MakeQueue]:
    arenas: list[Arena] = []
    registry = Registry()

    def make(*, dense: bool, requests: bool = False, pages: int = 64) -> BatchQueue:
        columns = ROW_BYTES if dense else ()
        arenas.append(
            Arena.create(Geometry(2, 4, columns, columns, 0 if dense else pages, 0, 1, 1, requests))
        )
        queue = BatchQueue(arenas[-1], 0, SPECS, SPECS, QueueMetrics(registry, "m", 1, 0, 4))
        queue.wake_soon = lambda: None  # type: ignore[method-assign]  # there is no loop
        return queue

    yield make
    for arena in arenas:
        arena.close()
    registry.close()


def is_clean(queue: BatchQueue) -> bool:
    """Once a worker has found nobody waiting in what was abandoned."""
    worker = queue.arena.ring(worker=0)
    while (slot := worker.take()) >= 0:
        assert worker.leases(slot) == []
        worker.publish(slot)
    return queue.ring.outstanding() == 0 and queue.ring.slab_pages_used() == 0


def contents(rows: int, sizes: tuple[int, ...] = ROW_BYTES) -> list[bytes]:
    numbers = itertools.count(1)
    return [bytes(next(numbers) % 251 for _ in range(rows * size)) for size in sizes]


@pytest.mark.parametrize("note", [b"", b"\x81\xa1i\xa17"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("names", ["abc", "cb", "a"])
def test_slabs_hold_what_was_put_in(make_queue: MakeQueue, names: str, rows: int, note: bytes) -> None:
    queue = make_queue(dense=False, requests=True)
    layout_in = lay_out_inputs(queue, {name: INPUTS[name] for name in names}, batching=True)
    reserved = layout_in.reserve(rows, note)
    assert reserved is not None
    lease, memory, (offset, size) = reserved
    numbers = ["abc".index(name) for name in names]
    data = contents(rows, tuple(ROW_BYTES[number] for number in numbers))
    for into, given in zip(memory, data, strict=True):
        into[:] = given
    slab = queue.ring.slab(offset, size)
    specs = [SPECS[name] for name in names]
    assert [(n, code, shape, bytes(view)) for n, code, shape, view in slab_tensors.read(slab)] == [
        (number, spec.dtype.code, (rows, *(spec.shape or ())), given)
        for number, spec, given in zip(numbers, specs, data, strict=True)
    ]
    assert bytes(slab_tensors.read_note(slab)) == note
    layout_in.settle(reserved)
    queue.ring.commit(lease, rows)
    worker = queue.arena.ring(worker=0)
    assert worker.leases(worker.take()) == [(0, rows, offset, size)]


def test_columns_hold_what_was_put_in(make_queue: MakeQueue) -> None:
    queue = make_queue(dense=True)
    layout_in = lay_out_inputs(queue, {name: INPUTS[name] for name in "cab"}, batching=True)
    reserved = layout_in.reserve(2)
    assert reserved is not None
    lease, memory, _ = reserved
    data = contents(2, (2, 3, 32))
    for into, given in zip(memory, data, strict=True):
        into[:] = given
    layout_in.settle(reserved)
    assert [bytes(queue.ring.input_rows(lease, 2, column)) for column in range(3)] == [
        data[1],
        data[2],
        data[0],
    ]
    layout_in.abandon(reserved, 2)
    assert is_clean(queue)


@pytest.mark.parametrize("dense", [True, False])
def test_what_is_abandoned_is_free_again(make_queue: MakeQueue, dense: bool) -> None:
    queue = make_queue(dense=dense)
    layout_in = lay_out_inputs(queue, INPUTS, batching=True)
    for _ in range(20):
        reserved = layout_in.reserve(4)
        assert reserved is not None
        layout_in.abandon(reserved, 4)
        assert is_clean(queue)


def test_no_room(make_queue: MakeQueue) -> None:
    queue = make_queue(dense=True)
    layout_in = lay_out_inputs(queue, INPUTS, batching=True)
    found = [layout_in.reserve(4) for _ in range(3)]
    assert [reservation is None for reservation in found] == [False, False, True]
    queue = make_queue(dense=False, pages=1)
    large = {"a": Tensor(DTYPES["int8"], (1, 10_000), b"")}
    assert lay_out_inputs(queue, large, batching=True).reserve(1) is None
    assert is_clean(queue)


def test_answers_are_known_by_their_form(make_queue: MakeQueue) -> None:
    queue = make_queue(dense=False, requests=True)
    layout_out, lease = lay_out_outputs(queue, ("c",)), queue.ring.reserve(1)
    data = contents(1)
    entries: list[slab_tensors.Entry] = [(2, DTYPES["int16"].code, (1,), data[2]), (0, 6, (1, 3), data[0])]
    ticket = Ticket(queue, lease, 1, lambda *_: None, 0, None)
    queue.ring.commit(lease, 1)
    worker = queue.arena.ring(worker=0)
    desk = slab_tensors.SlabCodec(queue.arena.memory, worker=0)
    slot = worker.take()
    worker.answer_lease(slot, 0, 0, *desk.put(entries))
    worker.publish(slot)
    found = layout_out.read(lease, 1)
    assert found is not None
    assert [bytes(view) for view in found[1]] == [data[2], data[0]]
    assert layout_out.describe(found[0]) == [("c", DTYPES["int16"], (1,)), ("a", DTYPES["int8"], (1, 3))]
    assert list(read_response(queue, ticket, ("c",)).outputs) == ["c", "a"]  # the model's own choice


def test_errors_are_left_to_others(make_queue: MakeQueue) -> None:
    queue = make_queue(dense=False, requests=True)
    lease = queue.ring.reserve(1)
    queue.ring.commit(lease, 1)
    worker = queue.arena.ring(worker=0)
    slot = worker.take()
    worker.answer_lease(slot, 0, 3, 0, 0)
    worker.publish(slot)
    assert lay_out_outputs(queue, ()).read(lease, 1) is None
    with pytest.raises(ServeError):
        read_response(queue, Ticket(queue, lease, 1, lambda *_: None, 0, None), ())


class Broken:
    """A ring, or a desk, of which one thing cannot be had."""

    def __init__(self, ring: object, name: str) -> None:
        self._ring, self._name = ring, name

    def __getattr__(self, name: str) -> object:
        return self._fail if name == self._name else getattr(self._ring, name)

    def _fail(self, *given: object) -> None:
        raise MemoryError(self._name)


@pytest.mark.parametrize(("dense", "of", "name"), [(True, "ring", "input_rows"), (False, "codec", "lay")])
def test_what_cannot_be_had_leaves_nothing_reserved(
    make_queue: MakeQueue, dense: bool, of: str, name: str
) -> None:
    queue = make_queue(dense=dense)
    whole = getattr(queue, of)
    setattr(queue, of, Broken(whole, name))
    layout_in = lay_out_inputs(queue, INPUTS, batching=True)
    with pytest.raises(MemoryError):
        layout_in.reserve(2)
    setattr(queue, of, whole)
    assert is_clean(queue)


def test_a_settled_place_can_be_abandoned(make_queue: MakeQueue) -> None:
    queue = make_queue(dense=False)
    layout_in = lay_out_inputs(queue, INPUTS, batching=True)
    reserved = layout_in.reserve(2)
    assert reserved is not None
    layout_in.settle(reserved)
    layout_in.abandon(reserved, 2)
    assert is_clean(queue)


def test_parts_of_a_split_request_are_joined_in_order() -> None:
    parts = [bytes([number]) * (SLICE_BYTES * number + number) for number in range(1, 4)]
    made = [{"y": Tensor(DTYPES["uint8"], (len(part),), memoryview(part))} for part in parts]
    joined = join_parts(made)["y"]
    assert (joined.shape, bytes(joined.data)) == ((sum(map(len, parts)),), b"".join(parts))
    with pytest.raises(ServeError, match="differ in shape"):
        join_parts([*made, {"y": Tensor(DTYPES["uint8"], (1, 1), b"1")}])
