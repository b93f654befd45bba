"""One front beside one worker whose batches go over a simulated device, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fastserve.workers.arena import WorkerContext
from fastserve.workers.device.base import DeviceStream
from fastserve.workers.loop import answer, make_device_runner
from tests.devices.simulated_device import NAME, Script, SimulatedDevice
from tests.devices.simulated_worker import simulated
from tests.workers.pair import Function, Pair

Tensors = dict[str, torch.Tensor]


class DeviceFunction(Function):
    """A backend that is a function of tensors, on the device and on the plain way."""

    takes_device_tensors = True

    def __init__(self, inputs: Any, outputs: Any, call: Callable[[Tensors], Tensors]) -> None:
        super().__init__(inputs, outputs, self._plain)
        self._call = call
        self.on_device: list[Tensors] = []

    def run_on_device(self, inputs: Tensors) -> Tensors:
        self.on_device.append({name: tensor.clone() for name, tensor in inputs.items()})
        return self._call(inputs)

    def _plain(self, inputs: Any) -> Any:
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
        return {name: tensor.numpy() for name, tensor in self._call(tensors).items()}


class DevicePair(Pair):
    """`take` starts a batch, `land` looks once, `finish` until nothing is in flight."""

    def __init__(self, backend: Any, device: SimulatedDevice, **config: Any) -> None:
        with simulated():
            super().__init__(backend, **{"device": NAME, "warmup": "off", **config})
        self.device = device
        self.runner.close()
        self.runner = make_device_runner(WorkerContext(self.arena, self.worker, backend, self.config), device)

    def take(self) -> int:
        slot = self.worker.take()
        assert slot >= 0
        answer(self.worker, self.runner, slot)
        return slot

    def land(self, looks: int = 1) -> None:
        for _ in range(looks):
            self.runner.land()

    def finish(self) -> None:
        self.runner.drain()

    def state(self, slot: int) -> str:
        return str(self.front.describe(slot)[0])


@contextlib.contextmanager
def device_pair(
    backend: Any,
    script: Script | None = None,
    choose: Callable[[list[DeviceStream]], DeviceStream] | None = None,
    **config: Any,
) -> Iterator[DevicePair]:
    """Nothing may be outstanding afterwards."""
    made = DevicePair(backend, SimulatedDevice(script=script or Script(), choose=choose), **config)
    try:
        yield made
        made.finish()
        assert made.front.outstanding() == 0
        assert made.front.slab_pages_used() == 0
    finally:
        made.runner.close()
        made.arena.close()
