"""Between the server's dtypes, numpy arrays and torch's tensors; and what a model returned, held to
its specs.

Nothing here waits for a device: shapes and dtypes are known before a result is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastserve.backends.base import WRONG_ROWS
from fastserve.backends.outputs import output_fault
from fastserve.errors import Kind, ServeError
from fastserve.tensor import TensorSpec, fits_shape

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

# Rows of a batch are read-only arrays, so that a second run sees what was sent; a tensor cannot be.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

Tensors: TypeAlias = Mapping[str, Any]  # of torch.Tensor; lists of str where a spec says bytes


def torch_dtype(name: str) -> Any:
    """torch's dtype of ours; None for strings."""
    import torch

    return None if name == "bytes" else getattr(torch, name)


def dtype_name(dtype: Any) -> str:
    """Our name of torch's dtype."""
    return str(dtype).removeprefix("torch.")


def as_tensor(array: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
    """A tensor over the array's memory; strings as a list of str. Raises ServeError INVALID_ARGUMENT."""
    import torch

    if spec.dtype.name == "bytes":
        return _texts(array, spec.name)
    tensor = over_memory(array)
    return tensor.view(torch.bfloat16) if spec.dtype.name == "bfloat16" else tensor


def over_memory(array: np.ndarray[Any, Any]) -> Any:
    """A tensor of the host that lies where the array does."""
    import torch

    return torch.from_numpy(array)


def _texts(array: np.ndarray[Any, Any], name: str) -> list[str]:
    try:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in array.flat]
    except UnicodeDecodeError:
        text = f"input {name!r} holds a string that is not UTF-8"
        raise ServeError(Kind.INVALID_ARGUMENT, text) from None


def as_array(tensor: Any, spec: TensorSpec) -> np.ndarray[Any, Any]:
    """The way back, from whichever device; waits for it."""
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
    """Holds the outputs of every batch of one model to their specs, as `outputs.OutputCheck` does for arrays.

    `mixed`: the model computes in another floating type than it declares, and its outputs are turned back.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], *, batched: bool, mixed: bool) -> None:
        self._batched, self._mixed = batched, mixed
        self._wanted = [(name, torch_dtype(spec.dtype.name), spec) for name, spec in specs.items()]

    def __call__(self, rows: int, outputs: Tensors) -> dict[str, Any]:
        """The outputs, contiguous and cast where that is allowed. Raises ServeError INTERNAL."""
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
            raise output_fault(WRONG_ROWS.format(name=name, shape=list(shape), rows=rows))
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
        """float64 to float32 as for arrays; any floating type where the options have changed it."""
        import torch

        both = given.is_floating_point and wanted.is_floating_point
        return both and (self._mixed or (given, wanted) == (torch.float64, torch.float32))

    def _strings(self, name: str, given: Any, rows: int) -> Any:
        if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
            raise output_fault(f"output {name!r} must be a list of str")
        if self._batched and len(given) != rows:
            raise output_fault(WRONG_ROWS.format(name=name, shape=[len(given)], rows=rows))
        return given


def rows_of(inputs: Arrays | Tensors, *, batched: bool) -> int:
    """Rows of a batch; 1 without a batch axis."""
    return len(next(iter(inputs.values()))) if batched and inputs else 1
