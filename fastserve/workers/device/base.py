"""The device interface of a worker: streams, which keep their order, marks (events) on them, and memory.

    device.copy(COPY_IN, berth, column)      enqueued: it happens after all that was enqueued there before
    came = device.mark(COPY_IN)              reached once all of it has happened
    device.after(COMPUTE, came)              what is enqueued on COMPUTE from here on waits for the mark
    device.enqueue(COMPUTE, work)            work() calls what runs on the device; it may enqueue more
    device.reached(came)                     True, or not yet; never waits

Tensors are torch's, of the device (`empty`) or of the host. `CudaDevice` (device/cuda.py) is the one that
workers open; the tests have another, of the host's memory, with any order of events that these rules allow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

from fastserve.backends.base import SupportsDevice

log = logging.getLogger(__name__)

Tensor = Any  # torch.Tensor
Mark = Any  # whatever a device makes of one


class DeviceStream(Enum):
    """The three streams of a pipeline. Each keeps its own order; between them only marks order."""

    COPY_IN, COMPUTE, COPY_OUT = "copy-in", "compute", "copy-out"


COPY_IN, COMPUTE, COPY_OUT = DeviceStream


class ComputeDevice(Protocol):
    """One device of one process. Any method may raise DeviceLost."""

    name: str

    def pin(self, memory: Any) -> str:
        """Make host memory, which stays where it is, readable by DMA; "" or why that cannot be."""

    def unpin(self) -> None:
        """Undo `pin`, before the memory is unmapped."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Allocate memory of the device."""

    def staging(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Allocate pinned memory of the host, for use where `pin` has failed."""

    def copy(self, stream: DeviceStream, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy, one side of which is the host's."""

    def enqueue(self, stream: DeviceStream, work: Callable[[], None]) -> None:
        """Enqueue the kernels that `work` launches. A real device calls it at once, on the stream."""

    def mark(self, stream: DeviceStream) -> Mark:
        """Record a mark after all that is enqueued on the stream."""

    def after(self, stream: DeviceStream, mark: Mark) -> None:
        """Let the stream wait for a mark."""

    def reached(self, mark: Mark) -> bool:
        """Whether a mark has been reached."""

    def between_ns(self, first: Mark, last: Mark) -> int:
        """Nanoseconds from one reached mark to another."""

    def run(self, call: Callable[[Any], Any], inputs: Mapping[str, Tensor]) -> Any:
        """Call the model on a batch, on the current stream."""

    def check(self, error: BaseException) -> None:
        """Raises DeviceLost when the device is what failed."""

    def close(self) -> None:
        """Wait for all that is enqueued: the host memory that it copies from and to is unmapped next, also
        after a fault of this process that left batches in flight."""


def runs_there(config: Mapping[str, Any], backend: Any) -> bool:
    """Whether batches of this instance go over a device, and its worker reads clients' memory there itself;
    asked when the backend has loaded."""
    there = str(config.get("device") or "cpu") != "cpu"
    return there and isinstance(backend, SupportsDevice) and backend.takes_device_tensors


def open_device(config: Mapping[str, Any], compute: Any = None) -> ComputeDevice:
    """Open the device of an instance; `compute` is the stream that its backend computes on, if it has its
    own. Raises ConfigError for a device that is not there."""
    from fastserve.workers.device.cuda import CudaDevice

    return CudaDevice(str(config["device"]), compute)
