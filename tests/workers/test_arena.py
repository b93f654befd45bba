"""Which arena a model's tensors need, and how processes join it."""

from __future__ import annotations

import os

import pytest

from fastserve.workers.arena import LEAST_SLOTS, MOST_SLOTS, WORDS_PAGES, Arena, plan_geometry
from tests.workers.pair import SIZES, specs

DENSE = specs(x=("float32", (3,))), specs(y=("int64", ()))


def plan(inputs=DENSE[0], outputs=DENSE[1], **config):
    return plan_geometry({**SIZES, **config}, inputs, outputs)


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch", "dense"),
    [
        (*DENSE, 4, True),
        (*DENSE, 0, False),
        (specs(x=("bytes", (1,))), DENSE[1], 4, False),
        (DENSE[0], specs(y=("float32", (-1,))), 4, False),
        (specs(x=("float32", None)), DENSE[1], 4, False),
        (DENSE[0], {}, 4, False),
    ],
)
def test_columns_when_every_row_has_a_known_size(inputs, outputs, batch, dense):
    geometry = plan(inputs, outputs, max_batch_size=batch)
    assert geometry.dense is dense
    assert (geometry.inputs, geometry.outputs) == (((12,), (8,)) if dense else ((), ()))
    assert (geometry.slab_pages == WORDS_PAGES) is dense
    assert geometry.max_rows == max(batch, 1)


def test_rows_and_bytes_bound_the_queue_and_slots_do_not() -> None:
    assert plan(max_queue_rows=40).max_queued == 40
    assert plan(max_queue_rows=400, max_queue_bytes=12 * 70).max_queued == 70
    assert plan(max_queue_rows=1).max_queued == 4  # a batch always finds room in an empty queue
    assert plan(queued_elsewhere=True).max_queued == 0
    assert plan(max_queue_rows=40).slots == 2 * 10 + 2 * 1 + 8
    assert plan(max_queue_rows=1).slots == LEAST_SLOTS
    assert plan(max_queue_rows=1_000_000).slots == MOST_SLOTS
    assert plan(max_batch_size=1 << 20, max_queue_rows=1).max_rows == 65535
    strings = specs(x=("bytes", (1,)))
    assert plan(strings, max_queue_bytes=1 << 20).slab_pages == 512
    assert plan(max_queue_delay_us=7, instances=3).max_delay_ns == 7000


def test_a_slot_for_every_sequence_that_may_run_or_wait() -> None:
    text = {"max_sequences": 4, "max_waiting": 10, "reader_tokens": 9}
    geometry = plan({}, {}, backend="text_python", text=text, instances=2, max_queue_bytes=1 << 20)
    assert (geometry.slots, geometry.max_rows, geometry.window, geometry.slab_pages) == (18, 1, 9, 512)
    assert not geometry.dense
    many = plan({}, {}, backend="text", text={"max_waiting": 1 << 20})
    assert many.slots == 65536
    assert plan().window == 0


@pytest.mark.parametrize("slabs", [False, True])
def test_others_join_with_what_they_are_sent(slabs):
    arena = Arena.create(plan(*(({}, {}) if slabs else DENSE), instances=2))
    message, fds = arena.fds_for_worker(1)
    joined = Arena.join(message, [os.dup(fd) for fd in fds])
    try:
        assert message["worker"] == 1
        assert joined.geometry == arena.geometry
        front, worker = arena.ring(front=0), joined.ring(worker=1)
        lease = front.reserve(1)
        if slabs:
            offset = front.allocate_slab(5)
            front.slab(offset, 5, True)[:] = b"hello"
            front.attach_slab(lease, offset, 5)
        else:
            front.input_rows(lease, 1, 0)[:] = b"x" * 12
        front.commit(lease, 1)
        slot = worker.take()
        if slabs:
            (_, _, offset, size) = worker.leases(slot)[0]
            assert bytes(worker.slab(offset, size)) == b"hello"
        else:
            at, size = worker.column_span(slot, 0)
            assert joined.memory[at : at + size] == b"x" * 12
        worker.publish(slot)
        assert os.eventfd_read(arena.front_doorbells[0]) == 1, "the doorbell is the same"
        front.release(lease, 1)
        assert front.slab_pages_used() == 0
    finally:
        joined.close()
        arena.close()


def test_nothing_of_it_has_a_name_or_survives_an_exec():
    arena = Arena.create(plan())
    try:
        for fd in (arena.memory_fd, *arena.worker_doorbells, *arena.front_doorbells):
            assert not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{arena.memory_fd}").startswith("/memfd:")
    finally:
        arena.close()
    assert arena.memory_fd == -1


def test_the_memory_goes_with_the_last_ring_even_while_the_arena_is_kept():
    """A closed arena stays in a circle with its workers' objects until the collector comes by."""

    def mapped():
        with open("/proc/self/maps") as maps:
            return any(line.split()[4] == number for line in maps)

    arena = Arena.create(plan())
    number = str(os.fstat(arena.memory_fd).st_ino)
    ring = arena.ring(front=0)
    arena.close()
    assert mapped(), "the ring still looks at it"
    del ring
    assert not mapped()
    assert arena.memory_fd == -1
