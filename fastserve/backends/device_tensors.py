"""Tensors of a device for models that are not PyTorch's: a python model that says `device_tensors: true`.

    run({"x": tensor}) -> {"y": tensor}      torch.Tensor, on the device, in the order of its current stream

Others take them by DLPack without a copy (cupy.from_dlpack(x), jax.dlpack.from_dlpack(x)), and what they
return is taken so: anything with __dlpack__ on the same device is an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastserve.backends.device_claims import bound_memory, unbound_memory
from fastserve.backends.outputs import output_fault
from fastserve.backends.torch import device_of, import_torch, open_device
from fastserve.backends.torch_tensors import TensorCheck, Tensors, as_array, as_tensor, rows_of
from fastserve.errors import ConfigError
from fastserve.tensor import TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


class DeviceTensors:
    """Calls a model with tensors of the instance's device, and holds what it returns to its declaration."""

    def __init__(
        self, config: Mapping[str, Any], inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
    ) -> None:
        """Raises ConfigError for a device that is not there, and for strings."""
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
        """With tensors that are on the device. Raises ServeError INTERNAL for wrong outputs."""
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
        """The model is gone."""
        unbound_memory(self._torch, self._device, self._bound)

    def run_arrays(self, call: Callable[[Any], Any], inputs: Arrays) -> Arrays:
        """With rows of the host, carried there and back."""
        tensors = {
            name: as_tensor(array, self._inputs[name]).to(self._device, copy=True)
            for name, array in inputs.items()
        }
        return {name: as_array(one, self._outputs[name]) for name, one in self.run(call, tensors).items()}

    def _taken(self, name: str, given: Any) -> Any:
        """A tensor of what another library made of the device's memory."""
        torch = self._torch
        found = given
        if not isinstance(given, torch.Tensor) and hasattr(given, "__dlpack__"):
            found = torch.from_dlpack(given)
        if isinstance(found, torch.Tensor) and found.device != self._device:
            raise output_fault(
                f"output {name!r} is on {found.device}, this worker computes on {self._device}"
            )
        return found
