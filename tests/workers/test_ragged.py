"""Batches in slabs: free shapes, strings, models without a batch axis; a fault stays with its caller."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve.errors import Kind
from fastserve.workers.warmup import SYNTHETIC_INPUTS
from tests.workers.pair import Function, pair, specs

X, Y = specs(x=("float32", (-1,))), specs(y=("float32", (-1,)))


def twice(inputs):
    return {"y": inputs["x"] * 2}


def rows(count: int, width: int, first: float = 1) -> np.ndarray:
    return np.arange(first, first + count * width, dtype=np.float32).reshape(count, width)


def strings(*values: bytes) -> np.ndarray:
    array = np.empty((len(values), 1), object)
    array[:, 0] = values
    return array


@pytest.mark.parametrize("mixed", ["group", "pad", "error"])
def test_rows_of_one_shape_run_together(mixed):
    backend = Function(X, Y, twice)
    with pair(backend, mixed_shapes=mixed) as it:
        sent = [rows(1, 3), rows(2, 3, 10), rows(1, 3, 20)]
        leases = [it.put(x=x) for x in sent]
        it.step()
        assert [len(seen["x"]) for seen in backend.seen] == [4]
        for lease, x in zip(leases, sent, strict=True):
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * x)


def test_group_runs_what_does_not_fit_apart():
    backend = Function(X, Y, twice)
    with pair(backend, mixed_shapes="group") as it:
        sent = [rows(1, 3), rows(1, 2, 10), rows(1, 3, 20), rows(1, 0)]
        leases = [it.put(x=x) for x in sent]
        it.step()
        assert sorted(seen["x"].shape for seen in backend.seen) == [(1, 0), (1, 2), (2, 3)]
        for lease, x in zip(leases, sent, strict=True):
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * x)


def test_pad_fills_up_to_the_largest_with_the_first_element():
    backend = Function(X, Y, twice)
    with pair(backend, mixed_shapes="pad") as it:
        leases = [it.put(x=rows(1, 3)), it.put(x=rows(1, 1, 9))]
        it.step()
        np.testing.assert_array_equal(backend.seen[0]["x"], [[1, 2, 3], [9, 9, 9]])
        assert it.get(*leases[1])["y"].tolist() == [[18, 18, 18]]
        it.get(*leases[0])


def test_pad_strings():
    inputs, outputs = specs(s=("bytes", (-1,))), specs(s=("bytes", (-1,)))
    with pair(Function(inputs, outputs, lambda x: {"s": x["s"]}), mixed_shapes="pad") as it:
        one, two = strings(b"a"), np.array([[b"bb", b"\xff"]], object)
        leases = [it.put(s=one), it.put(s=two)]
        it.step()
        assert it.get(*leases[0])["s"].tolist() == [[b"a", b"a"]]
        assert it.get(*leases[1])["s"].tolist() == [[b"bb", b"\xff"]]


def test_error_refuses_the_batch_in_tensorflow_servings_words():
    backend = Function(X, Y, twice)
    with pair(backend, mixed_shapes="error") as it:
        leases = [it.put(x=rows(1, 3)), it.put(x=rows(1, 1))]
        it.step()
        for lease in leases:
            kind, text = it.get(*lease)
            assert kind == Kind.FAILED_PRECONDITION.value
            assert text.startswith("Tensors with name 'x' from different tasks have different shapes")
        assert backend.seen == []


def test_a_group_that_fails_fails_alone(caplog):
    def run(inputs):
        if inputs["x"].shape[1] == 2:
            raise RuntimeError("not two")
        return twice(inputs)

    with pair(Function(X, Y, run)) as it:
        leases = [it.put(x=rows(1, 3)), it.put(x=rows(1, 2))]
        it.step()
        np.testing.assert_array_equal(it.get(*leases[0])["y"], 2 * rows(1, 3))
        kind, text = it.get(*leases[1])
        assert kind == Kind.INTERNAL.value
        assert "not two" in text
        caplog.clear()  # its record of the error holds the frames, and they the ring


def test_strings_whose_lengths_lie_reach_only_their_caller():
    inputs, outputs = specs(s=("bytes", (1,))), specs(n=("int64", (1,)))
    backend = Function(inputs, outputs, lambda x: {"n": np.array([[len(s)] for s in x["s"][:, 0]])})
    with pair(backend) as it:
        good, bad = it.put(s=strings(b"abc")), it.put(s=strings(b"defg"))
        (_, _, offset, size) = it.front.leases(bad[0] >> 16)[1]
        slab = it.front.slab(offset, size, True)
        at = bytes(slab).rfind(b"\4\0\0\0defg")
        slab[at : at + 4] = b"\xff\xff\xff\xff"
        it.step()
        assert it.get(*good)["n"].tolist() == [[3]]
        assert it.get(*bad)[0] == Kind.INVALID_ARGUMENT.value


def test_no_batch_axis_runs_each_request_alone():
    backend = Function(specs(x=("float64", None)), specs(y=("float64", None)), lambda x: {"y": x["x"] + 1})
    with pair(backend, max_batch_size=0) as it:
        for sent in (np.float64(3), np.zeros((2, 0)), np.arange(6.0).reshape(1, 2, 3)):
            lease = it.put(x=sent)
            it.step()
            got = it.get(*lease)["y"]
            assert got.shape == np.shape(sent)
            np.testing.assert_array_equal(got, sent + 1)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "complex128", "bytes"])
def test_every_kind_of_element(dtype):
    tensor = specs(x=(dtype, (-1,)))
    value = {"bytes": b"\0\xff", "bool": True, "complex128": 1j}.get(dtype, 3)
    kind = {"bytes": object, "bfloat16": np.uint16}.get(dtype, dtype)
    sent = np.full((2, 2), value, kind)
    with pair(Function(tensor, tensor, lambda x: {"x": x["x"]})) as it:
        lease = it.put(x=sent)
        it.step()
        np.testing.assert_array_equal(it.get(*lease)["x"], sent)


def test_no_room_for_the_answer_is_said():
    with pair(Function(X, Y, lambda x: {"y": np.repeat(x["x"], 100, 1)}), max_queue_bytes=40_000) as it:
        lease, count = it.put(x=rows(1, 1000))
        it.step()
        assert it.front.answer_slab(lease) == (0, 0)
        assert it.front.lease_status(lease) == Kind.RESOURCE_EXHAUSTED.value
        it.front.release(lease, count)


def test_a_batch_that_everybody_left_is_not_run():
    for size in (0, 4):
        backend = Function(X, Y, twice)
        with pair(backend, max_batch_size=size) as it:
            it.step(it.put(x=rows(1, 2)))
            assert backend.seen == []


def test_warm_up_fills_free_axes_and_strings():
    inputs = specs(s=("bytes", (-1, 2)), x=("float32", None))
    backend = Function(inputs, Y, lambda x: {})
    with pair(backend) as it:
        it.runner.warm_up(3, SYNTHETIC_INPUTS[0])
        it.runner.warm_up(3, SYNTHETIC_INPUTS[2])
        assert backend.seen[0]["s"].tolist() == [[[b"", b""]]] * 3
        assert backend.seen[0]["x"].shape == (3,)
        assert backend.seen[1]["s"].tolist() == [[[b"text"] * 2] * 8] * 3
