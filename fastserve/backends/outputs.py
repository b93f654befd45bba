"""Checks what a model returned against what it declared. Not a converter: one cast is made, no other.

The one cast is float64 to float32: numpy makes float64 out of a plain Python number, and a model that
declares float32 means it. Everything else would hide a mistake, so it is an error that names the
output, what came and what was wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastserve.errors import Kind, Reason, ServeError
from fastserve.tensor import DType, TensorSpec, fits_shape

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

log = logging.getLogger(__name__)
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_OBJECT = np.dtype(object)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type that carries a dtype: bfloat16 as uint16 bits, strings as objects."""
    return np.dtype({"bytes": "object", "bfloat16": "uint16"}.get(dtype.name, dtype.name))


class OutputCheck:
    """Checks the outputs of every batch of one model against their specs. 0.7 us for one good output."""

    def __init__(self, specs: Mapping[str, TensorSpec], *, batched: bool) -> None:
        self._batched = batched
        self._wanted = [(name, numpy_dtype(spec.dtype), spec.shape) for name, spec in specs.items()]

    def __call__(self, inputs: Arrays, outputs: Any) -> Arrays:
        """Return the outputs, cast where that is allowed. Raises ServeError (INTERNAL)."""
        if type(outputs) is not dict and not isinstance(outputs, Mapping):
            raise output_fault(
                f"run must return a dict of arrays by output name, not {type(outputs).__name__}"
            )
        head: tuple[int, ...] = ()
        if self._batched:
            head = next(iter(inputs.values())).shape[:1] if inputs else (1,)
        recast: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in self._wanted:
            array = outputs.get(name)
            # The fast way: exactly what was declared, fixed shape, numbers.
            if (
                type(array) is np.ndarray
                and array.dtype == dtype
                and shape is not None
                and array.shape == head + shape
                and dtype != _OBJECT
            ):
                continue
            recast[name] = self._check(name, array, dtype, shape, head)
        if len(outputs) != len(self._wanted):
            extra = ", ".join(repr(name) for name in outputs if name not in {w[0] for w in self._wanted})
            raise output_fault(f"run returned {extra}, which model.yaml does not declare as an output")
        return {**outputs, **recast} if recast else outputs

    def _check(
        self,
        name: str,
        array: Any,
        dtype: np.dtype[Any],
        shape: tuple[int, ...] | None,
        head: tuple[int, ...],
    ) -> NDArray[Any]:
        if array is None:
            raise output_fault(f"run did not return output {name!r}")
        if isinstance(array, np.generic):  # what numpy makes of arithmetic on an array without axes
            array = np.asarray(array)
        if not isinstance(array, np.ndarray):
            raise output_fault(f"output {name!r} must be a numpy array, not {type(array).__name__}")
        tensor: NDArray[Any] = array if array.dtype == dtype else _cast(name, array, dtype)
        if tensor.shape[: len(head)] != head:
            raise rows_fault(name, tensor.shape, head[0])
        row = tensor.shape[len(head) :]
        if shape is not None and not fits_shape(row, shape):
            raise output_fault(
                f"output {name!r} has rows of shape {list(row)}, model.yaml says {list(shape)}"
            )
        if dtype == _OBJECT and not all(isinstance(item, bytes | str) for item in tensor.flat):
            wrong = next(item for item in tensor.flat if not isinstance(item, bytes | str))
            raise output_fault(f"output {name!r} must hold bytes or str, but holds {type(wrong).__name__}")
        return tensor


def _cast(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if array.dtype == _FLOAT64 and dtype == _FLOAT32:
        return array.astype(_FLOAT32)
    if dtype == _OBJECT and array.dtype.kind in "SU":
        return array.astype(object)
    wanted = "bytes (an object array of bytes or str)" if dtype == _OBJECT else dtype.name
    order = "" if array.dtype.isnative else "big-endian "
    raise output_fault(f"output {name!r} is {order}{array.dtype.name}, model.yaml says {wanted}")


def output_fault(text: str, reason: Reason = Reason.UNSPECIFIED) -> ServeError:
    """Log that a model returned what it does not declare, and return the error for its callers."""
    log.warning("the model's answer is not what it declares: %s", text)
    return ServeError(Kind.INTERNAL, text, reason=reason)


def rows_fault(name: str, shape: Sequence[int], rows: int) -> ServeError:
    """Return the error of an output whose first axis is not the `rows` of its batch."""
    reason = Reason.OUTPUT_ROWS if shape else Reason.SCALAR_OUTPUT
    return output_fault(f"output {name!r} has shape {list(shape)}, but the batch has {rows} rows", reason)
