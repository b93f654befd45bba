"""Batches over a simulated device: order, overlap, what is published when, and every kind of fault."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve.backends.model_errors import DeviceLost, is_lost, is_out_of_memory
from fastserve.errors import Kind
from fastserve.workers.arena import WorkerContext, plan_geometry
from fastserve.workers.device.base import COMPUTE, COPY_IN, COPY_OUT
from tests.devices.simulated_device import Fault, Script
from tests.workers.device_rig import DeviceFunction, device_pair
from tests.workers.pair import SIZES, Function, pair, specs

X, Y = specs(x=("float32", (2,))), specs(y=("float32", (2,)))
FREE_X, FREE_Y = specs(x=("float32", (-1,))), specs(y=("float32", (-1,)))


def twice(inputs):
    return {"y": inputs["x"] * 2}


def rows(*values: float) -> np.ndarray:
    return np.array([[v, -v] for v in values], np.float32)


def backend(call=twice, inputs=X, outputs=Y):
    return DeviceFunction(inputs, outputs, call)


def prefer(*order):
    """The stream that goes on first, where several may."""
    return lambda ready: next(stream for stream in order if stream in ready)


# --- order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("pins", [True, False])
def test_answers_whatever_the_order(seed, free, pins):
    """Device memory is noise until it is copied to: a stage that came too early would show."""
    made = backend(inputs=FREE_X, outputs=FREE_Y) if free else backend()
    with device_pair(made, Script(seed=seed, pins=pins)) as it:
        sent, rng = [], random.Random(seed)
        for number in range(40):
            array = rows(*(number * 10 + i for i in range(rng.randint(1, 4))))
            sent.append((it.put(x=array), array))
            while it.worker.pending() and it.runner.room and rng.random() < 0.5:
                it.take()
            it.land(rng.randint(0, 9))
            if rng.random() < 0.3 or sum(map(len, (array for _, array in sent))) > 8:
                while it.worker.pending():
                    if it.runner.room:
                        it.take()
                    it.land()
                it.finish()
                for lease, wanted in sent:
                    np.testing.assert_array_equal(it.get(*lease)["y"], 2 * wanted)
                sent.clear()
        while it.worker.pending():
            it.take()
            it.finish()
        it.finish()
        for lease, wanted in sent:
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * wanted)


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_any_order_of_streams(order, sizes):
    choices = iter(order)
    with device_pair(backend(), choose=lambda ready: ready[next(choices, 0) % len(ready)]) as it:
        for number, size in enumerate(sizes):
            array = rows(*(number + i for i in range(size)))
            lease = it.put(x=array)
            it.take()
            it.land(3)
            it.finish()
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * array)


def test_copy_in_of_the_next_batches_goes_on_beside_a_run():
    """Three in flight: all are copied in before the first is computed, when the device likes it so."""
    with device_pair(backend(), choose=prefer(COPY_IN, COPY_OUT, COMPUTE)) as it:
        leases = [it.put(x=rows(*range(4))) for _ in range(3)]
        for _ in leases:
            it.take()
        assert it.runner.in_flight == 3
        assert not it.runner.room
        it.finish()
        stages = [stage for stage, _ in it.device.trace]
        assert stages[:3] == ["copy-in"] * 3
        for lease in leases:
            it.get(*lease)


def test_the_oldest_is_copied_out_while_the_next_is_computed():
    with device_pair(backend(), choose=prefer(COPY_IN, COMPUTE, COPY_OUT)) as it:
        leases = [it.put(x=rows(*range(4))) for _ in range(3)]
        for _ in leases:
            it.take()
        it.finish()
        stages = [stage for stage, _ in it.device.trace]
        assert stages.index("copy-out") > stages.index("compute") + 2  # all runs before the first copy out
        for lease in leases:
            it.get(*lease)


def test_a_batch_is_published_when_its_rows_are_there_and_not_before():
    with device_pair(backend(), choose=prefer(COPY_IN, COMPUTE, COPY_OUT)) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        slot = it.take()
        while ("compute", 0) not in it.device.trace:
            it.land()
            assert it.state(slot) == "running"
        assert bytes(it.front.output_rows(lease[0], 4, 0)) == b"\0" * 32  # computed, and still on the device
        while ("copy-out", 0) not in it.device.trace:
            assert it.state(slot) == "running"
            it.land()
        it.finish()
        assert it.state(slot) == "done"
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1, 2, 3, 4))


def test_a_slots_memory_is_not_touched_after_it_is_published():
    """Its rows are others' then: whatever the device still does, does not reach them."""
    with device_pair(backend()) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        slot = it.take()
        it.finish()
        it.get(*lease)
        assert it.state(slot) == "free"
        before = bytes(it.arena.memory)
        others = [it.put(x=rows(9)) for _ in range(2)]
        while it.device.step():
            pass
        for other in others:
            it.front.drop(*other)
        after = bytes(it.arena.memory)
        at, size = it.worker.column_span(slot, 0, True)
        assert before[at : at + 4 * size] == after[at : at + 4 * size]


@pytest.mark.lingers  # the logged traceback keeps the arena
def test_input_rows_are_read_before_publishing_also_of_a_batch_that_failed():
    """A fault at the launch: the copies that were enqueued before it are waited for."""
    faults = [Fault(stage="compute", what="error")]
    one_at_a_time = {"isolate_failures": False}
    with device_pair(
        backend(), Script(faults=faults), choose=prefer(COMPUTE, COPY_OUT, COPY_IN), **one_at_a_time
    ) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        slot = it.take()
        while it.state(slot) == "running":
            it.land()
        assert ("copy-in", 0) in it.device.trace
        assert it.device.step() is False
        kind, text = it.get(*lease)
        assert kind == Kind.INTERNAL.value
        assert "does not like this batch" in text


def test_padding_and_leaving():
    with device_pair(backend(), allowed_batch_sizes=[2, 4]) as it:
        lease = it.put(x=rows(1, 2, 3))
        it.take()
        it.finish()
        assert it.backend.on_device[0]["x"].tolist() == rows(1, 2, 3, 3).tolist()
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1, 2, 3))
        gone = it.put(x=rows(1))
        slot = it.worker.take()
        it.front.drop(*gone)
        assert it.runner.run(slot) is False
        it.worker.publish(slot)
        leaving = it.put(x=rows(5))
        slot = it.take()
        it.front.drop(*leaving)
        it.finish()
        assert it.state(slot) == "free"


def test_stages_are_timed(monkeypatch):
    told = []
    monkeypatch.setattr(
        "fastserve.workers.device.device_runner.model_callbacks.notify",
        lambda do, **more: told.append((do, more)),
    )
    with device_pair(backend(), Script(step_us=200)) as it:
        lease = it.put(x=rows(1))
        slot = it.take()
        it.finish()
        _, taken, run, ran, done = it.front.times_ns(slot)
        assert taken < run < ran < done
        it.get(*lease)
    do, report = next((do, report) for do, report in told if report["batches"])
    assert (do, report["device"], report["pinned"], report["batches"]) == ("device", "simulated", True, 1)
    assert min(report["copy_in_ns"], report["compute_ns"], report["copy_out_ns"]) > 100_000


def test_memory_that_cannot_be_registered_is_said(caplog):
    with caplog.at_level(logging.WARNING), device_pair(backend(), Script(pins=False)) as it:
        assert (
            "simulated: the arena could not be registered (this simulated device registers no memory)"
            in caplog.text
        )
        assert it.runner.report.pinned is False
        lease = it.put(x=rows(1))
        it.take()
        it.finish()
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1))


def test_an_arena_of_a_device_is_small_and_never_trimmed():
    config = {**SIZES, "max_batch_size": 32, "max_queue_rows": 1024, "max_queue_bytes": 1 << 28}
    pictures, scores = specs(x=("uint8", (600_000,))), specs(y=("float32", (1000,)))
    plain = plan_geometry(config, pictures, scores)
    pinned = plan_geometry({**config, "device": "cuda:0"}, pictures, scores)
    assert (plain.pinned, pinned.pinned) == (False, True)
    assert pinned.slots < plain.slots
    assert plan_geometry(
        {**config, "places": [{"device": "cpu"}, {"device": "cuda:0"}]}, pictures, scores
    ).pinned


# --- slabs ----------------------------------------------------------------------------------------------


def test_requests_of_different_shapes_run_apart_in_one_flight():
    made = backend(inputs=FREE_X, outputs=FREE_Y)
    with device_pair(made, Script(seed=2)) as it:
        arrays = [np.ones((1, 3), np.float32), np.full((2, 5), 2, np.float32), np.full((1, 3), 3, np.float32)]
        leases = [it.put(x=array) for array in arrays]
        it.take()
        it.finish()
        assert [tuple(seen["x"].shape) for seen in made.on_device] == [(2, 3), (2, 5)]
        for lease, array in zip(leases, arrays, strict=True):
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * array)


def test_models_without_a_batch_axis():
    with device_pair(backend(inputs=FREE_X, outputs=FREE_Y), max_batch_size=0) as it:
        lease = it.put(x=np.arange(5, dtype=np.float32))
        it.take()
        it.finish()
        assert it.get(*lease)["y"].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.lingers  # the logged traceback keeps the arena
def test_a_group_that_fails_fails_alone():
    def call(inputs):
        if inputs["x"].shape[1] == 5:
            raise ValueError("not five")
        return twice(inputs)

    with device_pair(backend(call, FREE_X, FREE_Y)) as it:
        good = it.put(x=np.ones((1, 3), np.float32))
        bad = it.put(x=np.ones((1, 5), np.float32))
        it.take()
        it.finish()
        assert it.get(*good)["y"].tolist() == [[2, 2, 2]]
        assert it.get(*bad) == (Kind.INTERNAL.value, "ValueError: not five")


def test_answers_without_room_are_refused():
    def long(inputs):
        return {"y": torch.zeros(len(inputs["x"]), 1 << 20)}

    with device_pair(backend(long, FREE_X, FREE_Y)) as it:
        lease = it.put(x=np.ones((1, 3), np.float32))
        it.take()
        it.finish()
        assert it.front.lease_status(lease[0]) == Kind.RESOURCE_EXHAUSTED.value
        it.front.release(*lease)


# --- faults ---------------------------------------------------------------------------------------------


@pytest.mark.lingers  # the logged traceback keeps the arena
def test_one_bad_request_fails_alone():
    def picky(inputs):
        if (inputs["x"] == 13).any():
            raise ValueError("no thirteens")
        return twice(inputs)

    with device_pair(backend(picky)) as it:
        leases = [it.put(x=rows(value)) for value in (1, 13, 3)]
        it.take()
        it.finish()
        assert it.get(*leases[0])["y"].tolist() == [[2, -2]]
        status = it.front.lease_status(leases[1][0])
        assert status == Kind.INTERNAL.value
        it.front.release(*leases[1])
        assert it.get(*leases[2])["y"].tolist() == [[6, -6]]


class Memory:
    """A model that has room for so many rows."""

    def __init__(self, most):
        self.most, self.sizes, self.forgot = most, [], 0

    def __call__(self, inputs):
        self.sizes.append(len(inputs["x"]))
        if len(inputs["x"]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return twice(inputs)


@pytest.mark.lingers  # the logged traceback keeps the arena
@pytest.mark.parametrize(("most", "sizes"), [(2, [4, 2, 2]), (1, [4, 2, 1, 1, 1, 1]), (3, [4, 2, 2])])
def test_out_of_memory_is_tried_again_by_halves(most, sizes):
    memory = Memory(most)
    with device_pair(backend(memory)) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        it.take()
        it.finish()
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1, 2, 3, 4))
        assert memory.sizes == sizes


@pytest.mark.lingers  # what was put in the runner's place holds it
def test_others_in_flight_land_before_a_batch_is_tried_again():
    memory = Memory(2)
    with device_pair(backend(memory), choose=prefer(COPY_IN, COMPUTE, COPY_OUT)) as it:
        leases = [it.put(x=rows(*range(n))) for n in (4, 2, 2)]
        slots = [it.take() for _ in range(2)]
        assert len(set(slots)) == 2
        beside, recover = [], it.runner.plain.recover

        def recovers(slot, error, *, whole):
            beside.append((it.runner.in_flight, whole))
            recover(slot, error, whole=whole)

        it.runner.plain.recover = recovers
        it.finish()
        assert [there for there, _ in beside] == [
            0,
            0,
        ]  # both of four rows: the second fails while the first waits
        for lease, n in zip(leases, (4, 2, 2), strict=True):
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(*range(n)))
        assert it.runner.in_flight == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "there is no memory for a batch of 1 rows: OutOfMemoryError: CUDA out of memory"),
        ({"allowed_batch_sizes": [4]}, "there is no memory for a batch of 2 rows"),
    ],
)
@pytest.mark.lingers  # the logged traceback keeps the arena
def test_out_of_memory_for_anything_fails_the_batch_and_not_the_worker(config, words):
    memory = Memory(0)
    with device_pair(backend(memory), **config) as it:
        lease = it.put(x=rows(1, 2))
        it.take()
        it.finish()
        kind, text = it.get(*lease)
        assert kind == Kind.RESOURCE_EXHAUSTED.value
        assert words in text
        memory.most = 4
        lease = it.put(x=rows(1, 2))
        it.take()
        it.finish()
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1, 2))


@pytest.mark.lingers  # the logged traceback keeps the arena
def test_a_model_whose_runs_have_effects_is_not_run_again():
    memory = Memory(2)
    with device_pair(backend(memory), isolate_failures=False) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        it.take()
        it.finish()
        assert memory.sizes == [4]
        kind, text = it.get(*lease)
        assert kind == Kind.RESOURCE_EXHAUSTED.value
        assert "there is no memory for a batch of 4 rows: OutOfMemoryError: CUDA out of memory" in text


@pytest.mark.parametrize("stage", ["copy-in", "compute", "copy-out"])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.lingers  # the traceback of what was lost keeps the arena
def test_a_lost_device_ends_it_all_and_publishes_nothing(stage, free):
    made = backend(inputs=FREE_X, outputs=FREE_Y) if free else backend()
    with device_pair(made, Script(faults=[Fault(stage=stage, what="lost", at=1)])) as it:
        leases = [it.put(x=rows(*range(4))) for _ in range(3)]
        slots = [it.take() for _ in range(3)]
        with pytest.raises(
            DeviceLost, match="its GPU has failed, and it answers no more: CUDA error: an illegal"
        ):
            it.finish()
        with pytest.raises(DeviceLost):
            it.runner.drain()
        running = [slot for slot in slots if it.state(slot) == "running"]
        assert len(running) >= 2
        retried, failed = it.front.worker_died(0, 2, Kind.UNAVAILABLE.value, "gone")
        assert (retried, failed) == (len(running), 0)
        it.device.lost = ""
        it.worker = it.arena.ring(worker=0)  # as the next process sees it: another owner of slabs
        it.runner = type(it.runner)(WorkerContext(it.arena, it.worker, made, it.config), type(it.device)())
        for _ in running:
            it.take()
        it.finish()
        for lease in leases:
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(*range(4)))


@pytest.mark.lingers  # the traceback of what was lost keeps the arena
@pytest.mark.parametrize("sides", [(X, Y), (FREE_X, FREE_Y)])
def test_a_plain_model_whose_device_is_lost_is_not_run_again(sides):
    """A model of Python's that uses CUDA by itself: known by the words, on every way."""

    def call(inputs):
        raise RuntimeError("CUDA error: device-side assert triggered")

    made = Function(*sides, call)
    with pair(made) as it:
        leases = [it.put(x=rows(1)), it.put(x=rows(2))]
        with pytest.raises(DeviceLost):
            it.step()
        assert len(made.seen) == 1
        assert it.front.describe(leases[0][0] >> 16)[0] == "running"
        assert it.front.worker_died(0, 1, Kind.UNAVAILABLE.value, "gone") == (0, 1)
        assert [it.get(*lease) for lease in leases] == [(Kind.UNAVAILABLE.value, "gone")] * 2


def test_which_errors_are_which():
    lost = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported ...")
    assert is_lost(lost)
    assert not is_out_of_memory(lost)
    for words in (
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "CUDA error: tensor memory not completely freed",
        "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=h",
    ):
        assert is_lost(RuntimeError(words)), words
    wrapped = ValueError("the model failed")
    wrapped.__cause__ = lost
    assert is_lost(wrapped)
    for harmless in (
        "CUDA error: invalid argument",
        "CUDA out of memory.",
        "mat1 and mat2 shapes cannot be multiplied",
    ):
        assert not is_lost(RuntimeError(harmless))
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(MemoryError("the host's"))
    for theirs in (
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer",
        "[ONNXRuntimeError] : 6 : std::bad_alloc",
        "CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=cuda_allocator.cc",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "OOM when allocating tensor with shape[64,512] and type float",
    ):
        assert is_out_of_memory(RuntimeError(theirs)), theirs
    assert not is_out_of_memory(ValueError("no room for a batch of 3"))
    assert (
        str(DeviceLost(lost))
        == "its GPU has failed, and it answers no more: CUDA error: device-side assert triggered"
    )
