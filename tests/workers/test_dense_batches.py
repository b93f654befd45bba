"""Batches in columns: what the model sees, what comes back, and what it may not do."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve.errors import Kind
from fastserve.workers.warmup import SYNTHETIC_INPUTS
from tests.workers.pair import Function, pair, specs

X, Y = specs(x=("float32", (2,))), specs(y=("float32", (2,)))


def twice(inputs):
    return {"y": inputs["x"] * 2}


def rows(*values: float) -> np.ndarray:
    return np.array([[v, -v] for v in values], np.float32)


def test_requests_run_as_one_contiguous_array_and_get_their_own_rows():
    backend = Function(X, Y, twice)
    with pair(backend) as it:
        leases = [it.put(x=rows(1)), it.put(x=rows(2, 3)), it.put(x=rows(4))]
        it.step()
        np.testing.assert_array_equal(backend.seen[0]["x"], rows(1, 2, 3, 4))
        got = [it.get(*lease)["y"] for lease in leases]
        for y, wanted in zip(got, (rows(2), rows(4, 6), rows(8)), strict=True):
            np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize(("given", "filled"), [(1, 2), (2, 2), (3, 4)])
def test_allowed_batch_sizes_are_filled_with_the_last_row(given, filled):
    backend = Function(X, Y, twice)
    with pair(backend, allowed_batch_sizes=[2, 4]) as it:
        lease = it.put(x=rows(*range(1, given + 1)))
        it.step()
        seen = backend.seen[0]["x"]
        assert len(seen) == filled
        np.testing.assert_array_equal(seen[given:], np.repeat(rows(given), filled - given, axis=0))
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(*range(1, given + 1)))


@pytest.mark.lingers  # the logged traceback keeps the arrays, and with them the arena
def test_inputs_are_read_only_so_that_a_retry_sees_what_was_sent():
    def spoil(inputs):
        inputs["x"][:] = 0
        return twice(inputs)

    with pair(Function(X, Y, spoil)) as it:
        lease = it.put(x=rows(1))
        it.step()
        kind, text = it.get(*lease)
        assert kind == Kind.INTERNAL.value
        assert "read-only" in text


@pytest.mark.parametrize("shape", [(1, 2), (3,), (2, 3), (4, 2)])
def test_outputs_of_another_shape_are_the_models_fault(shape):
    with pair(Function(X, Y, lambda inputs: {"y": np.zeros(shape, np.float32)})) as it:
        lease = it.put(x=rows(1, 2))
        it.step()
        kind, text = it.get(*lease)
        assert kind == Kind.INTERNAL.value
        assert "declared [2, 2]" in text


def test_a_batch_that_everybody_left_is_not_run():
    backend = Function(X, Y, twice)
    with pair(backend) as it:
        it.step(it.put(x=rows(1, 2)))
        assert backend.seen == []


def test_dtypes_and_several_columns():
    inputs = specs(a=("int8", ()), b=("bfloat16", (3,)), c=("complex64", (1,)), d=("bool", (2, 2)))
    outputs = specs(d=("bool", (2, 2)), a=("int64", ()))
    with pair(Function(inputs, outputs, lambda x: {"a": x["a"] * 2, "d": ~x["d"]})) as it:
        sent = {
            "a": np.array([-5, 7], np.int8),
            "b": np.array([[1, 2, 3]] * 2, np.uint16),
            "c": np.array([[1j], [2]], np.complex64),
            "d": np.array([[[True, False]] * 2] * 2),
        }
        lease = it.put(**sent)
        it.step()
        for name, wanted in sent.items():
            np.testing.assert_array_equal(it.backend.seen[0][name], wanted)
        got = it.get(*lease)
        assert got["a"].tolist() == [-10, 14]
        np.testing.assert_array_equal(got["d"], ~sent["d"])


def test_warm_up_touches_no_slot():
    backend = Function(X, Y, twice)
    with pair(backend, allowed_batch_sizes=[4]) as it:
        it.runner.warm_up(1, SYNTHETIC_INPUTS[0])
        assert backend.seen[0]["x"].shape == (4, 2)
        assert it.front.describe(0)[0] == "free"
