"""Memory that runs out, of a device or of the host, on every way a batch runs: by halves where that may be,
else RESOURCE_EXHAUSTED; counted once; and what else goes wrong meanwhile is told as what it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastserve.backends import model_callbacks
from fastserve.errors import Kind
from tests.devices.simulated_device import Fault, Script
from tests.workers.device_rig import DeviceFunction, device_pair
from tests.workers.pair import Function, pair, specs

pytestmark = pytest.mark.lingers  # a logged traceback keeps the arrays, and with them the arena
COLUMNS = specs(x=("float32", (2,))), specs(y=("float32", (2,)))
SLABS = specs(x=("float32", (-1,))), specs(y=("float32", (-1,)))
FORMS = pytest.mark.parametrize("form", [COLUMNS, SLABS], ids=["columns", "slabs"])
ERRORS = pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError("the host's")],
    ids=["torch", "host"],
)
WORDS = "there is no memory for a batch of 1 rows: "


class Line:
    """The line on which a worker tells the server."""

    def __init__(self) -> None:
        self.told: list[dict] = []

    def tell(self, wish) -> None:
        self.told.append(dict(wish))

    @property
    def shortages(self) -> int:
        return sum(wish["batches"] for wish in self.told if wish["do"] == "no_memory")


@pytest.fixture
def line(monkeypatch):
    made = Line()
    monkeypatch.setattr(model_callbacks.process, "channel", made)
    return made


def rows(*values: float) -> np.ndarray:
    return np.array([[v, -v] for v in values], np.float32)


class Memory:
    """A model with room for `most` rows: twice what comes in. Of -7 it says that it does not like it."""

    def __init__(self, most, error):
        self.most, self.error, self.sizes = most, error, []

    def __call__(self, inputs):
        x = inputs["x"]
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise type(self.error)(*self.error.args)
        if (x == -7).any():
            raise ValueError("no sevens")
        return {"y": x * 2}


def told(it, lease):
    """Outputs, or (kind, text), of one place: its own failure too, which columns have in a slab."""
    failure = it.front.lease_status(lease[0]) if it.arena.geometry.dense else 0
    if not failure:
        return it.get(*lease)
    text = bytes(it.front.slab(*it.front.answer_slab(lease[0]))).decode()
    it.front.release(*lease)
    return failure, text


@FORMS
@ERRORS
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("most", "batch"),
    [(2, [4]), (1, [4]), (2, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (1, [2, 2]), (1, [1, 3])],
)
def test_by_halves_of_requests_and_of_their_rows(form, error, device, most, batch, line):
    memory = Memory(most, error)
    made = DeviceFunction(*form, memory) if device else Function(*form, memory)
    with device_pair(made) if device else pair(made) as it:
        sent = [rows(*range(10 * i, 10 * i + n)) for i, n in enumerate(batch, 1)]
        leases = [it.put(x=array) for array in sent]
        it.step()
        if device:
            it.finish()
        for lease, array in zip(leases, sent, strict=True):
            np.testing.assert_array_equal(told(it, lease)["y"], 2 * array)
    assert memory.sizes[0] == 4
    assert max(memory.sizes[1:]) < 4
    assert line.shortages == 1


@FORMS
@ERRORS
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("batch", [[4], [1], [1, 1, 2]])
def test_no_memory_for_anything(form, error, device, batch, line):
    """503, in words; and well again when there is some."""
    memory = Memory(0, error)
    made = DeviceFunction(*form, memory) if device else Function(*form, memory)
    with device_pair(made) if device else pair(made) as it:
        for most, good in ((0, False), (4, True)):
            memory.most = most
            leases = [it.put(x=rows(*range(1, 1 + n))) for n in batch]
            it.step()
            if device:
                it.finish()
            for lease in leases:
                got = told(it, lease)
                if good:
                    assert "y" in got
                    continue
                kind, text = got
                of_host = isinstance(error, MemoryError)  # the model's own failure
                assert kind == (Kind.INTERNAL if of_host else Kind.RESOURCE_EXHAUSTED).value
                assert text == f"{WORDS}{type(error).__name__}: {error}"
    assert line.shortages == 1
    assert len(memory.sizes) <= 8


@pytest.mark.parametrize("device", [False, True])
@ERRORS
def test_what_has_no_batch_axis_cannot_be_smaller(device, error, line):
    memory = Memory(0, error)
    made = (DeviceFunction if device else Function)(*SLABS, memory)
    with device_pair(made, max_batch_size=0) if device else pair(made, max_batch_size=0) as it:
        lease = it.put(x=np.ones(3, np.float32))
        it.step()
        if device:
            it.finish()
        kind, text = it.get(*lease)
        assert kind == (Kind.INTERNAL if isinstance(error, MemoryError) else Kind.RESOURCE_EXHAUSTED).value
        assert text.startswith(WORDS)
    assert len(memory.sizes) == 1
    assert line.shortages == 1


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("batching", [4, 0])
def test_injected_on_a_device(free, batching, line):
    """By the device, on every form of arena."""
    form = SLABS if free or not batching else COLUMNS
    if not batching:
        form = specs(x=("float32", (1, 2) if not free else (-1, 2))), specs(y=("float32", None))
    script = Script(faults=[Fault(stage="compute", what="out of memory", at=0)])
    twice = DeviceFunction(*form, lambda inputs: {"y": inputs["x"] * 2})
    with device_pair(twice, script, max_batch_size=batching) as it:
        lease = it.put(x=rows(1) if not batching else rows(1, 2))
        it.step()
        it.finish()
        got = told(it, lease)
        if batching:
            np.testing.assert_array_equal(got["y"], 2 * rows(1, 2))
        else:
            assert got[0] == Kind.RESOURCE_EXHAUSTED.value
    assert line.shortages == 1


COPIES = pytest.mark.parametrize("stage", ["copy-in", "copy-out"])


@FORMS
@COPIES
@pytest.mark.parametrize("batch", [[4], [1, 3]])
@pytest.mark.parametrize("pins", [True, False])
def test_a_copy_there_is_no_memory_for(form, stage, batch, pins, line):
    """Of a result that is not contiguous, say: asked for when its run is, and refused there."""
    script = Script(pins=pins, faults=[Fault(stage=stage, what="out of memory")])
    twice = DeviceFunction(*form, lambda inputs: {"y": inputs["x"] * 2})
    with device_pair(twice, script) as it:
        sent = [rows(*range(10 * i, 10 * i + n)) for i, n in enumerate(batch, 1)]
        leases = [it.put(x=array) for array in sent]
        it.take()
        it.finish()
        for lease, array in zip(leases, sent, strict=True):
            np.testing.assert_array_equal(told(it, lease)["y"], 2 * array)
    assert line.shortages == 1


@COPIES
@pytest.mark.parametrize("what", ["out of memory", "error"])
def test_a_copy_that_is_refused_where_nothing_can_be_run_again(stage, what, line):
    """As a run that fails so: in the model's words, and RESOURCE_EXHAUSTED where memory was short."""
    script = Script(faults=[Fault(stage=stage, what=what)])
    twice = DeviceFunction(*SLABS, lambda inputs: {"y": inputs["x"] * 2})
    with device_pair(twice, script, isolate_failures=False) as it:
        lease = it.put(x=rows(1, 2))
        it.take()
        it.finish()
        kind, text = told(it, lease)
        assert kind == (Kind.RESOURCE_EXHAUSTED if what == "out of memory" else Kind.INTERNAL).value
        words = "CUDA out of memory" if what == "out of memory" else "the model does not like this batch"
        assert words in text
        again = it.put(x=rows(3))
        it.take()
        it.finish()
        np.testing.assert_array_equal(told(it, again)["y"], 2 * rows(3))


@COPIES
def test_groups_of_a_batch_whose_copies_were_refused_run_apart_again(stage, line):
    """Shapes that do not run together: each group has its answers, none twice, and no slab is left."""
    script = Script(faults=[Fault(stage=stage, what="out of memory", at=1)])
    twice = DeviceFunction(*SLABS, lambda inputs: {"y": inputs["x"] * 2})
    with device_pair(twice, script) as it:
        sent = [np.full((n, n + 2), n, np.float32) for n in (1, 2)]
        leases = [it.put(x=array) for array in sent]
        it.take()
        it.finish()
        for lease, array in zip(leases, sent, strict=True):
            np.testing.assert_array_equal(told(it, lease)["y"], 2 * array)


@FORMS
def test_one_row_that_was_not_alone_is_tried_once_more(form, line):
    """The batch beside it on the device has landed by then."""
    script = Script(faults=[Fault(stage="compute", what="out of memory", at=0)])
    twice = DeviceFunction(*form, lambda inputs: {"y": inputs["x"] * 2})
    with device_pair(twice, script, max_batch_size=1) as it:
        leases = [it.put(x=rows(n)) for n in (1, 2)]
        for _ in leases:
            it.take()
        it.finish()
        for n, lease in enumerate(leases, 1):
            np.testing.assert_array_equal(told(it, lease)["y"], 2 * rows(n))
    assert line.shortages == 1


@FORMS
@pytest.mark.parametrize("device", [False, True])
def test_a_bad_request_of_a_batch_that_was_too_large_is_told_so(form, device, line):
    """An error of a smaller run is not taken for the shortage it came after."""
    memory = Memory(2, torch.OutOfMemoryError("CUDA out of memory."))
    made = (DeviceFunction if device else Function)(*form, memory)
    with device_pair(made) if device else pair(made) as it:
        leases = [it.put(x=rows(v)) for v in (1, -7, 3, 4)]
        it.step()
        if device:
            it.finish()
        for value, lease in zip((1, -7, 3, 4), leases, strict=True):
            got = told(it, lease)
            if value == -7:
                assert got == (Kind.INTERNAL.value, "ValueError: no sevens")
            else:
                np.testing.assert_array_equal(got["y"], 2 * rows(value))
    assert line.shortages == 1


@FORMS
def test_a_model_whose_runs_have_effects_is_not_run_again(form, line):
    memory = Memory(2, MemoryError())
    with pair(Function(*form, memory), isolate_failures=False) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        it.step()
        kind, text = it.get(*lease)
    assert kind == Kind.INTERNAL.value, "the model's failure"
    assert text == "there is no memory for a batch of 4 rows: MemoryError"
    assert memory.sizes == [4]
    assert line.shortages == 1


def test_outputs_whose_rows_differ_between_parts_cannot_be_joined(line):
    """A free axis of the outputs that depends on what else is in the batch."""

    def ragged(inputs):
        x = inputs["x"]
        if len(x) > 2:
            raise MemoryError
        return {"y": np.zeros((len(x), int(x.max())), np.float32)}

    with pair(Function(*SLABS, ragged)) as it:
        lease = it.put(x=rows(1, 2, 3, 4))
        it.step()
        kind, text = it.get(*lease)
    assert kind == Kind.INTERNAL.value, "the model's failure"
    assert text == "there is no memory for a batch of 4 rows: MemoryError"


def test_no_numbers_of_processes_are_told():
    """torch says who has the memory."""
    words = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which "
        "1.2 GiB is free. Process 41234 has 20.00 GiB memory in use. This process has 2.00 GiB memory in use."
    )
    memory = Memory(0, torch.OutOfMemoryError(words))
    with pair(Function(*COLUMNS, memory)) as it:
        lease = it.put(x=rows(1))
        it.step()
        text = it.get(*lease)[1]
    assert "41234" not in text
    assert "Process … has 20.00 GiB" in text
