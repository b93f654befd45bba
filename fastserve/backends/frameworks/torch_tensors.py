"""torch's tensors and devices: conversion from and to numpy arrays, the check of outputs, opening a device.

Nothing here waits for a device: shapes and dtypes are known before a result is. A python model with
`device_tensors: true` is called with tensors too:

    run({"x": tensor}) -> {"y": tensor}      torch.Tensor, on the device, in the order of its current stream

Other libraries take them by DLPack without a copy (cupy.from_dlpack(x), jax.dlpack.from_dlpack(x)), and any
output with `__dlpack__` on the same device is taken back so.

torch's allocator has one bound for a process, and a shared worker has several models with a bound each: the
process may take their sum.

CUDA graphs of one process are captured one at a time, under CAPTURING. A capture forbids unsafe calls to its
own thread alone (`thread_local`), but a thread that synchronises the device or the context while any stream
of it is capturing is refused, and may end that capture (CUDA's guide, "Prohibited and Unhandled Operations").
torch.cuda.graph does so before it begins, ONNX Runtime may when it opens a session, and in a shared worker
these are threads of one context. Runs of a model do not, nor wait.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastserve.backends.batch_io import output_fault, rows_fault
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import TensorSpec, fits_shape
from fastserve.util.memory import gc_paused

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


# Rows of a batch are read-only arrays, so that a second run sees what was sent; a tensor cannot be.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

Tensors: TypeAlias = Mapping[str, Any]  # of torch.Tensor; lists of str where a spec says bytes


def torch_dtype(name: str) -> Any:
    """Return torch's dtype for one of ours; None for strings."""
    import torch

    return None if name == "bytes" else getattr(torch, name)


def dtype_name(dtype: Any) -> str:
    """Return our name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def as_tensor(array: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
    """Return a tensor over the array's memory; strings as a list of str. Raises ServeError
    INVALID_ARGUMENT."""
    import torch

    if spec.dtype.name == "bytes":
        return _texts(array, spec.name)
    tensor = over_memory(array)
    return tensor.view(torch.bfloat16) if spec.dtype.name == "bfloat16" else tensor


def over_memory(array: np.ndarray[Any, Any]) -> Any:
    """Return a CPU tensor over the array's memory."""
    import torch

    return torch.from_numpy(array)


def _texts(array: np.ndarray[Any, Any], name: str) -> list[str]:
    try:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in array.flat]
    except UnicodeDecodeError:
        text = f"input {name!r} holds a string that is not UTF-8"
        raise ServeError(Kind.INVALID_ARGUMENT, text) from None


def as_array(tensor: Any, spec: TensorSpec) -> np.ndarray[Any, Any]:
    """Return the array of a tensor on any device; waits for it."""
    import torch

    if spec.dtype.name == "bytes":
        strings = np.empty(len(tensor), object)
        strings[:] = list(tensor)
        return strings
    host = tensor.detach().cpu()
    if spec.dtype.name == "bfloat16":
        host = host.view(torch.uint16)
    array: np.ndarray[Any, Any] = host.numpy()
    return array


class TensorCheck:
    """Checks the output tensors of every batch of one model against their specs, as `outputs.OutputCheck`
    does for arrays.

    `mixed`: the model computes in another floating type than it declares, and its outputs are converted back.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], *, batched: bool, mixed: bool) -> None:
        self._batched, self._mixed = batched, mixed
        self._wanted = [(name, torch_dtype(spec.dtype.name), spec) for name, spec in specs.items()]

    def __call__(self, rows: int, outputs: Tensors) -> dict[str, Any]:
        """Return the outputs, contiguous and cast where that is allowed. Raises ServeError INTERNAL."""
        return {
            name: self._strings(name, outputs[name], rows)
            if dtype is None
            else self._tensor(name, outputs[name], dtype, spec, rows)
            for name, dtype, spec in self._wanted
        }

    def _tensor(self, name: str, given: Any, dtype: Any, spec: TensorSpec, rows: int) -> Any:
        import torch

        if not isinstance(given, torch.Tensor):
            raise output_fault(f"output {name!r} must be a tensor, not {type(given).__name__}")
        if given.layout is not torch.strided or given.is_quantized:
            raise output_fault(f"output {name!r} is sparse or quantized: return it as an ordinary tensor")
        shape = tuple(given.shape)
        if self._batched and shape[:1] != (rows,):
            raise rows_fault(name, shape, rows)
        row = shape[self._batched :]
        if spec.shape is not None and not fits_shape(row, spec.shape):
            raise output_fault(
                f"output {name!r} has rows of shape {list(row)}, declared is {list(spec.shape)}"
            )
        if given.dtype is not dtype:
            if not self._may_cast(given.dtype, dtype):
                raise output_fault(
                    f"output {name!r} is {dtype_name(given.dtype)}, declared is {spec.dtype.name}"
                )
            given = given.to(dtype)
        return given.detach().contiguous()

    def _may_cast(self, given: Any, wanted: Any) -> bool:
        """Return whether a cast is allowed: float64 to float32 as for arrays; any floating type where the
        options changed it."""
        import torch

        both = given.is_floating_point and wanted.is_floating_point
        return both and (self._mixed or (given, wanted) == (torch.float64, torch.float32))

    def _strings(self, name: str, given: Any, rows: int) -> Any:
        if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
            raise output_fault(f"output {name!r} must be a list of str")
        if self._batched and len(given) != rows:
            raise rows_fault(name, [len(given)], rows)
        return given


def rows_of(inputs: Arrays | Tensors, *, batched: bool) -> int:
    """Return the rows of a batch; 1 without a batch axis."""
    return len(next(iter(inputs.values()))) if batched and inputs else 1


class DeviceTensors:
    """Calls a model with tensors of the instance's device, and checks what it returns."""

    def __init__(
        self, config: Mapping[str, Any], inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
    ) -> None:
        """Open the device. Raises ConfigError for a device that does not exist, and for strings."""
        for name, spec in (*inputs.items(), *outputs.items()):
            if spec.dtype.name == "bytes":
                raise ConfigError(f"device_tensors: {name!r} holds strings, which no device does")
        torch = self._torch = import_torch()
        self._device = open_device(torch, device_of(config))
        self._bound = int(config.get("device_memory_bytes") or 0)
        bound_memory(torch, self._device, self._bound)
        self._inputs, self._outputs = inputs, outputs
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._check = TensorCheck(outputs, batched=self._batched, mixed=False)

    def run(self, call: Callable[[Any], Any], inputs: Tensors) -> Tensors:
        """Run a batch of tensors of the device. Raises ServeError INTERNAL for wrong outputs."""
        with self._torch.inference_mode():
            returned = call(dict(inputs))
            if not isinstance(returned, Mapping):
                raise output_fault(
                    f"run must return a dict of tensors by name, not {type(returned).__name__}"
                )
            missing = [name for name in self._outputs if name not in returned]
            if missing:
                raise output_fault(f"run did not return output {missing[0]!r}")
            extra = [name for name in returned if name not in self._outputs]
            if extra:
                raise output_fault(
                    f"run returned {extra[0]!r}, which model.yaml does not declare as an output"
                )
            tensors = {name: self._taken(name, one) for name, one in returned.items()}
            return self._check(rows_of(inputs, batched=self._batched), tensors)

    def close(self) -> None:
        """Withdraw the model's claim on device memory."""
        unbound_memory(self._torch, self._device, self._bound)

    def run_arrays(self, call: Callable[[Any], Any], inputs: Arrays) -> Arrays:
        """Run a batch of host arrays, copied to the device and back."""
        tensors = {
            name: as_tensor(array, self._inputs[name]).to(self._device, copy=True)
            for name, array in inputs.items()
        }
        return {name: as_array(one, self._outputs[name]) for name, one in self.run(call, tensors).items()}

    def _taken(self, name: str, given: Any) -> Any:
        """Return a tensor over what another library made of the device's memory."""
        torch = self._torch
        found = given
        if not isinstance(given, torch.Tensor) and hasattr(given, "__dlpack__"):
            found = torch.from_dlpack(given)
        if isinstance(found, torch.Tensor) and found.device != self._device:
            raise output_fault(
                f"output {name!r} is on {found.device}, this worker computes on {self._device}"
            )
        return found


def import_torch() -> Any:
    """Import torch. Raises ServeError saying what to install."""
    try:
        with gc_paused():
            import torch
    except ImportError as error:
        raise ServeError(Kind.FAILED_PRECONDITION, find_backend("torch").missing_text) from error
    return torch


def release_cached(torch: Any) -> None:
    """Return torch's cached memory to the device where allowed: not while a thread of this process captures a
    graph. An error of the device is left for the next run to raise."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def device_of(config: Mapping[str, Any]) -> str:
    """Return torch's name of an instance's device. Raises ConfigError."""
    name = str(config.get("device") or "cpu")
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return "cpu"
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}")
    return f"cuda:{int(number or 0)}"


def open_device(torch: Any, name: str) -> Any:
    """Return the device, made current for this thread. Raises ConfigError when it does not exist."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "was built without CUDA" if not torch.version.cuda else "sees no GPU"
        raise ConfigError(f"device {name!r}: this PyTorch {torch.__version__} {why}")
    number, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"device {name!r}: there are {count} GPUs, counted from 0")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


_claims: dict[int, list[int]] = {}  # by device: a claim for each model there, 0 for one without a bound
_turn = threading.Lock()


def bound_memory(torch: Any, device: Any, nbytes: int) -> None:
    """Bound what this process allocates on the device to the sum of its models' claims (`device_memory_mb`);
    there is no bound while one of them claims nothing."""
    with _turn:
        if device.type == "cuda":
            _claims.setdefault(device.index, []).append(nbytes)
            _hold(torch, device)


def unbound_memory(torch: Any, device: Any, nbytes: int) -> None:
    """Withdraw a claim; nothing happens for one that was not made."""
    with _turn:
        if device is not None and device.type == "cuda" and nbytes in _claims.get(device.index, ()):
            _claims[device.index].remove(nbytes)
            _hold(torch, device)


def _hold(torch: Any, device: Any) -> None:
    claims = _claims[device.index]
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(sum(claims) / total, 1.0) if claims and all(claims) else 1.0
    torch.cuda.set_per_process_memory_fraction(share, device)


CAPTURING = threading.Lock()
