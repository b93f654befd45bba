"""Workers whose `device: simulated` is the one of the tests.

    python -m tests.devices.simulated_worker [shared] FD
WorkerGroup(..., entry=WORKER)     SharedWorkers(entry=SHARED)
with simulated(): ...              the same in this process, for runners and backends that a test makes
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

from fastserve.backends.frameworks import onnx, torch, torch_tensors
from fastserve.workers import loop, main, thread_host
from fastserve.workers.control import exit_now
from fastserve.workers.process import ENTRY
from tests.devices.simulated_device import NAME, SimulatedDevice, read_script

WORKER = (*ENTRY[:-1], "tests.devices.simulated_worker")
SHARED = (*WORKER, "shared")


def _instead(call: Callable[..., Any], made: Callable[[], Any]) -> Callable[..., Any]:
    """`call`, but what `made` gives where its first argument is, or configures, a simulated device."""

    def ask(config: Any, *more: Any, **named: Any) -> Any:
        device = config.get("device") if isinstance(config, Mapping) else config
        return made() if device == NAME else call(config, *more, **named)

    return ask


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Frameworks compute on the CPU for a simulated device, ONNX models may have batches in flight there, and
    batches go over a SimulatedDevice."""
    names = _instead(torch_tensors.device_of, lambda: "cpu")
    with contextlib.ExitStack() as stack:
        for module, name, call in (
            (torch, "device_of", names),
            (torch_tensors, "device_of", names),
            (onnx, "_providers", _instead(onnx._providers, lambda: ["CPUExecutionProvider"])),
            (
                onnx,
                "find_device_place",
                _instead(onnx.find_device_place, lambda: onnx.DevicePlace("cpu", 0)),
            ),
            (loop, "open_device", _instead(loop.open_device, lambda: SimulatedDevice(script=read_script()))),
        ):
            stack.enter_context(mock.patch.object(module, name, call))
        yield


@contextlib.contextmanager
def simulated_services() -> Iterator[None]:
    """A BatchedService may say `device="simulated"`."""
    from fastserve.batching import batched_service  # no worker's business
    from fastserve.workers import group

    with (
        mock.patch.object(batched_service, "DEVICE", re.compile(f"{batched_service.DEVICE.pattern}|{NAME}")),
        mock.patch.object(group, "WorkerGroup", partial(group.WorkerGroup, entry=WORKER)),
    ):
        yield


if __name__ == "__main__":
    with simulated():
        read_script()  # by one thread: msgspec builds what it knows of a type without a lock
        if sys.argv[1] == "shared":
            exit_now(thread_host.main(sys.argv[2:]))
        sys.exit(main.main(sys.argv[1:]))
