"""What a worker asks of a device: streams, in whose order things happen, marks on them, and memory.

    device.copy(COPY_IN, berth, column)      enqueued: it happens after all that was enqueued there before
    came = device.mark(COPY_IN)              reached once all of it has happened
    device.after(COMPUTE, came)              what is enqueued on COMPUTE from here on waits for the mark
    device.enqueue(COMPUTE, work)            work() calls what runs on the device; it may enqueue more
    device.reached(came)                     True, or not yet; never waits

Tensors are torch's, of the device (`empty`) or of the host. `CudaDevice` is the real one (device_cuda.py);
`SimulatedDevice` (device_simulated.py) has the host's memory and any order of events that these rules allow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

log = logging.getLogger(__name__)

Tensor = Any  # torch.Tensor
Mark = Any  # whatever a device makes of one
SIMULATED = "simulated"


class Stream(Enum):
    """The three of a pipeline. Each keeps its order; nothing else is kept."""

    COPY_IN, COMPUTE, COPY_OUT = "copy-in", "compute", "copy-out"


COPY_IN, COMPUTE, COPY_OUT = Stream


class Device(Protocol):
    """One device of one process. Any method may raise DeviceLost."""

    name: str

    def pin(self, memory: Any) -> str:
        """Make host memory, which stays where it is, readable by DMA; "" or why that cannot be."""

    def unpin(self) -> None:
        """The way back, before the memory goes."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Memory of the device."""

    def staging(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Memory of the host that DMA can reach, for what `pin` could not be had for."""

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy, one side of which is the host's."""

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Enqueue what `work` calls. A real device has it called at once, on the stream."""

    def mark(self, stream: Stream) -> Mark:
        """A mark after all that is enqueued on the stream."""

    def after(self, stream: Stream, mark: Mark) -> None:
        """Let the stream wait for a mark."""

    def reached(self, mark: Mark) -> bool:
        """Whether a mark has been reached. Work a simulated device does is done here."""

    def between_ns(self, first: Mark, last: Mark) -> int:
        """Time from one reached mark to another."""

    def run(self, call: Callable[[Any], Any], inputs: Mapping[str, Tensor]) -> Any:
        """Call what computes a batch, on the current stream."""

    def check(self, error: BaseException) -> None:
        """Raises DeviceLost when the device is what failed."""

    def close(self) -> None:
        """Nothing is enqueued any more, and what was is over: the host's memory that it copies from and to
        goes next, also after a fault of this process's own that left batches in flight."""


def runs_there(config: Mapping[str, Any], backend: Any) -> bool:
    """Whether batches of this instance go over a device, and its worker reads clients' memory there itself;
    asked when the backend has loaded."""
    there = str(config.get("device") or "cpu") != "cpu"
    return there and bool(getattr(backend, "takes_device_tensors", False))


def open_device(config: Mapping[str, Any], compute: Any = None) -> Device:
    """The device of an instance that has one; `compute` is the stream that its backend computes on, if it has
    one. Raises ConfigError for one that is not there."""
    name = str(config["device"])
    if name.partition(":")[0] == SIMULATED:
        from fastserve.workers.device_simulated import SimulatedDevice, read_script

        return SimulatedDevice(name, read_script())
    from fastserve.workers.device_cuda import CudaDevice

    return CudaDevice(name, compute)
