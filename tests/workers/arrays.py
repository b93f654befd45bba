"""Tensors of answers as arrays, for assertions."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastserve.tensor import Tensor
from fastserve.workers.arrays import BYTES, NUMPY, unpack_strings


def view_tensor(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A read-only array over a tensor's memory; strings are copied out into an object array of bytes."""
    if tensor.dtype is BYTES:
        return unpack_strings(tensor.data, tensor.shape)
    array: np.ndarray[Any, Any] = np.frombuffer(tensor.data, NUMPY[tensor.dtype.name]).reshape(tensor.shape)
    array.flags.writeable = False
    return array
