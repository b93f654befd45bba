"""A CUDA device, by torch: its streams, events and asynchronous copies.

The arena is registered where it lies (cudaHostRegister), so a copy out of a batch's columns is one DMA with
nothing on the way. Memory that was registered is the device's to read until it is unregistered: its pages
must not be exchanged, which is why an arena with a device on it is not trimmed (engine/supervision.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastserve.backends.frameworks.torch_tensors import import_torch, open_device
from fastserve.backends.model_errors import DeviceLost, end_if_lost
from fastserve.devices.cuda import Cuda, CudaFault
from fastserve.workers.device.base import COMPUTE, COPY_IN, DeviceStream, Mark, Tensor

log = logging.getLogger(__name__)


class CudaDevice:
    """`name` is cuda or cuda:N, `compute` torch's stream of a backend that has one of its own."""

    def __init__(self, name: str, compute: Any = None) -> None:
        """Raises ConfigError when it is not there."""
        self._torch = import_torch()
        number = int(name.partition(":")[2] or 0)
        self.name = f"cuda:{number}"
        self._device = open_device(self._torch, self.name)
        self._streams = {stream: self._torch.cuda.Stream(self._device) for stream in DeviceStream}
        if compute is not None:
            self._streams[COMPUTE] = compute
        self._number, self._cuda = number, Cuda.load()
        self._pinned = 0

    def pin(self, memory: Any) -> str:
        """See Device."""
        if self._cuda is None:  # torch has found one
            return "the driver's library cannot be loaded"
        try:
            self._cuda.enter(self._number)  # the primary context, which is torch's
            self._pinned = self._cuda.register(memory)
        except CudaFault as fault:
            return str(fault)
        return ""

    def unpin(self) -> None:
        """See Device."""
        start, self._pinned = self._pinned, 0
        if start and self._cuda is not None:
            with contextlib.suppress(CudaFault):  # a broken context has let go of it
                self._cuda.enter(self._number)
                self._cuda.unregister(start)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """See Device. Of the copy-in stream, which writes it first: torch's allocator gives a stream's memory
        again as soon as it is let go of, when kernels of that stream may still write there."""
        with self._torch.cuda.stream(self._streams[COPY_IN]):
            return self._torch.empty(shape, dtype=dtype, device=self._device)

    def staging(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """See Device."""
        return self._torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, stream: DeviceStream, target: Tensor, source: Tensor) -> None:
        """See Device."""
        with self._torch.cuda.stream(self._streams[stream]):
            target.copy_(source, non_blocking=True)

    def enqueue(self, stream: DeviceStream, work: Callable[[], None]) -> None:
        """See Device."""
        with self._torch.cuda.stream(self._streams[stream]):
            work()

    def mark(self, stream: DeviceStream) -> Mark:
        """See Device."""
        event = self._torch.cuda.Event(enable_timing=True)
        with _or_lost():
            event.record(self._streams[stream])
        return event

    def after(self, stream: DeviceStream, mark: Mark) -> None:
        """See Device."""
        with _or_lost():
            self._streams[stream].wait_event(mark)

    def reached(self, mark: Mark) -> bool:
        """See Device."""
        with _or_lost():
            return bool(mark.query())

    def between_ns(self, first: Mark, last: Mark) -> int:
        """See Device."""
        return int(first.elapsed_time(last) * 1e6)

    def run(self, call: Callable[[Any], Any], inputs: Mapping[str, Tensor]) -> Any:
        """See Device."""
        return call(inputs)

    def check(self, error: BaseException) -> None:
        """A library's own words may hide what CUDA has to say: it is asked, of the streams that a run is on.
        To ask the whole device is refused while another thread captures a graph, and nothing is lost then."""
        end_if_lost(error)
        text = str(error)
        if not any(name in text for name in ("CUDA", "CUDNN", "CUBLAS", "cuda", "cuDNN", "cuBLAS")):
            return
        try:
            for stream in (self._torch.cuda.current_stream(self._device), *self._streams.values()):
                stream.synchronize()
        except RuntimeError as found:
            raise DeviceLost(found) from error

    def close(self) -> None:
        """See Device."""
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
                stream.synchronize()
        self.unpin()
        self._streams.clear()


@contextlib.contextmanager
def _or_lost() -> Iterator[None]:
    """Raise DeviceLost for a failed event call. Without events there is no order, and cudaEventQuery fails
    with the error of the work before it."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceLost(error) from error
