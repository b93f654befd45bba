"""ONNX Runtime on batches that lie on a device: I/O binding, on the stream that a worker computes on.

    place = find_device_place(config)           None: one batch at a time, as ONNX Runtime copies by itself
    session = InferenceSession(..., providers=place.provider_options(...))
    bound = BoundSession(place, session, ...)
    bound.run({"x": tensor}) -> {"y": tensor}   enqueued, not waited for

The pipeline is torch's (workers/device/cuda.py): its memory, events and streams. ONNX Runtime is given its
compute stream (user_compute_stream, which makes it the only one of the session) and told not to wait at the
end of a run (disable_synchronize_execution_providers): results are there when the stream has come so far. A
session that does not say it has this very stream is not used so: it would be read before it has written.

Nor is one that takes an input, or gives an output, on the host: of such an input binding makes a copy at
once, in some releases on the legacy default stream, which does not wait for ours: of what lay there before. A
session tells where they are from ONNX Runtime 1.23 on; an older one is not used so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.frameworks.torch_device import release_cached
from fastserve.backends.frameworks.torch_tensors import torch_dtype

if TYPE_CHECKING:
    from fastserve.tensor import TensorSpec

log = logging.getLogger(__name__)
CUDA = "CUDAExecutionProvider"
CUDA_MEMORY = "Cuda"  # ONNX Runtime's name of a device's memory; of the host's it has Cpu and CudaPinned
ALONE = "%s: ONNX Runtime copies by itself, one batch at a time: %s"
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class DevicePlace:
    """The device of a session, as ONNX Runtime names it. `stream` is torch's, None where the host
    computes."""

    kind: str
    number: int
    stream: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the CUDA provider that select the stream."""
        return {} if self.stream is None else {"user_compute_stream": str(self.stream.cuda_stream)}

    def may_run(self, session: Any) -> bool:
        """Return whether the session computes on this stream, and takes and returns tensors of the device."""
        if self.stream is None:
            return True
        told = session.get_provider_options().get(CUDA, {})
        why = ""
        if any(told.get(name) != value for name, value in self.options.items()):
            why = "it does not compute on the stream it was given"
        elif not hasattr(session, "get_input_memory_infos"):
            why = "this release does not tell where it takes its inputs (1.23 does)"
        elif not all(one.name == CUDA_MEMORY for one in _places_of(session)):
            why = "the model takes or gives tensors on the host"
        if why:
            log.info(ALONE, f"cuda:{self.number}", why)
        return not why


def _places_of(session: Any) -> list[Any]:
    """Return the memory of each input and output, by ONNX Runtime's own plan."""
    return [*session.get_input_memory_infos(), *session.get_output_memory_infos()]


def find_device_place(config: Mapping[str, Any]) -> DevicePlace | None:
    """Return the device of an instance whose batches may overlap, None for others. torch is imported here,
    before ONNX Runtime: it brings the libraries of CUDA along."""
    device = str(config.get("device") or "cpu")
    kind, _, number = device.partition(":")
    if kind != "cuda" or int(config.get("batches_in_flight") or 2) == 1:
        return None
    try:
        import torch
    except (ImportError, OSError):  # or its libraries do not load
        log.info(ALONE, device, "there is no PyTorch")
        return None
    if not torch.cuda.is_available() or int(number or 0) >= torch.cuda.device_count():
        log.info(ALONE, device, "the PyTorch that is installed does not see it")
        return None
    torch.cuda.set_device(int(number or 0))
    return DevicePlace("cuda", int(number or 0), torch.cuda.Stream(int(number or 0)))


def may_bind(specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether all tensors are numbers that torch has, in rows of a fixed size: memory for them can be
    taken before a run."""
    import torch

    return all(
        hasattr(torch, spec.dtype.name) and spec.shape is not None and all(axis > 0 for axis in spec.shape)
        for spec in specs.values()
    )


class BoundSession:
    """Runs a session on tensors of a device, into tensors allocated there."""

    def __init__(
        self,
        place: DevicePlace,
        session: Any,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        *,
        batched: bool,
    ) -> None:
        import onnxruntime
        import torch

        self._place, self._session, self._batched = place, session, batched
        self._inputs = {name: np.dtype(spec.dtype.name) for name, spec in inputs.items()}
        self._outputs = [
            (name, np.dtype(spec.dtype.name), torch_dtype(spec.dtype.name), tuple(spec.shape or ()))
            for name, spec in outputs.items()
        ]
        self._torch = torch
        self._device = torch.device(place.kind, place.number)
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(self, inputs: Tensors) -> Tensors:
        """Enqueue a run on the current stream, which is the session's. Raises ONNX Runtime's errors, also for
        outputs of another shape."""
        torch, kind, number = self._torch, self._place.kind, self._place.number
        binding = self._session.io_binding()
        given = {name: tensor.contiguous() for name, tensor in inputs.items()}
        for name, tensor in given.items():
            binding.bind_input(name, kind, number, self._inputs[name], list(tensor.shape), tensor.data_ptr())
        rows = next(iter(given.values())).shape[:1] if self._batched else ()
        results = {}
        for name, dtype, kept, shape in self._outputs:
            made = results[name] = torch.empty((*rows, *shape), dtype=kept, device=self._device)
            binding.bind_output(name, kind, number, dtype, list(made.shape), made.data_ptr())
        self._session.run_with_iobinding(binding, self._options)
        return results

    def release_memory(self) -> None:
        """Empty torch's cache, after the device ran out of memory."""
        if self._place.kind == "cuda":
            release_cached(self._torch)
