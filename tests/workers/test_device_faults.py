"""Faults of a device beside the model: no memory for a batch's rows, copies that are refused, an owner that
does not listen. Everybody is answered, and nothing is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastserve.backends import model_callbacks
from fastserve.workers.control import ControlFault
from fastserve.workers.device import device_runner
from fastserve.workers.device.base import COPY_OUT
from tests.devices.simulated_device import SimulatedOutOfMemoryError
from tests.workers.device_rig import DeviceFunction, device_pair
from tests.workers.pair import specs

X, Y = specs(x=("float32", (2,))), specs(y=("float32", (2,)))
FREE_X, FREE_Y = specs(x=("float32", (-1,))), specs(y=("float32", (-1,)))


def twice(inputs: Any) -> Any:
    return {"y": inputs["x"] * 2}


def rows(*values: float) -> Any:
    return np.array([[v, -v] for v in values], np.float32)


def failing(call: Any, error: Exception, *, first: int = 1, when: Any = lambda *given: True) -> Any:
    """Raises so often, where `when` says so, and then does what it did."""
    left = [first]

    def instead(*given: Any, **more: Any) -> Any:
        if when(*given) and left[0]:
            left[0] -= 1
            raise error
        return call(*given, **more)

    return instead


@pytest.mark.lingers  # what is logged keeps the traceback, and that the arena
@pytest.mark.parametrize("busy", [0, 1])
def test_no_memory_for_the_rows_of_a_batch(busy: int, caplog: pytest.LogCaptureFixture) -> None:
    """Batches in flight land first; then this one is run as one without memory while it computed."""
    with device_pair(DeviceFunction(X, Y, twice)) as it:
        leases = [it.put(x=rows(1, 2, 3, 4)) for _ in range(busy + 1)]
        for _ in range(busy):
            it.take()
        error = SimulatedOutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        it.device.empty = failing(it.device.empty, error)  # type: ignore[method-assign]
        it.take()
        assert it.runner.in_flight == 0
        for lease in leases:
            np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1, 2, 3, 4))


@pytest.mark.lingers
@pytest.mark.parametrize("free", [False, True])
def test_a_copy_that_is_refused_keeps_nothing(free: bool) -> None:
    """Slabs of answers are made before they are copied out: these go back. What was in it is run again."""
    made = DeviceFunction(FREE_X, FREE_Y, twice) if free else DeviceFunction(X, Y, twice)
    with device_pair(made) as it:
        refused = RuntimeError("CUDA error: invalid argument")
        it.device.copy = failing(  # type: ignore[method-assign]
            it.device.copy, refused, when=lambda stream, *rest: stream is COPY_OUT
        )
        for _ in range(2):
            leases = [it.put(x=rows(1, 2)), it.put(x=rows(3, 4))]
            it.take()
            it.finish()
            for lease, wanted in zip(leases, (rows(1, 2), rows(3, 4)), strict=True):
                np.testing.assert_array_equal(it.get(*lease)["y"], 2 * wanted)


class DeafLine:
    """An owner that is gone, or does not read."""

    def ask(self, wish: Any) -> Any:
        raise ControlFault("the line is closed")

    tell = ask


def test_an_owner_that_does_not_listen_costs_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_callbacks.process, "channel", DeafLine())
    monkeypatch.setattr(device_runner, "EVERY_NS", 0)
    backend = DeviceFunction(X, Y, twice)
    with device_pair(backend) as it:
        lease = it.put(x=rows(1))
        it.take()
        it.finish()
        np.testing.assert_array_equal(it.get(*lease)["y"], 2 * rows(1))
        assert backend.seen == [], "it was not run again"
        it.runner.close()
        assert not it.device.pinned
