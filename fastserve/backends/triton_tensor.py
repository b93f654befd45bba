"""Tensors of Triton's Python API: a name and an array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastserve.backends import dlpack
from fastserve.backends.triton_types import BF16, BY_NUMPY, STRING

Array = NDArray[Any]
_OBJECT = np.dtype(object)
_DEVICE_CPU = (1, 0)


class TritonModelException(Exception):
    """What the API raises when a model uses it wrongly."""


class Tensor:
    """One tensor. Those of a request are read-only views of shared memory, strings arrays of bytes."""

    __slots__ = ("_array", "_kind", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        """Raises TritonModelException when the array is none, or has no Triton type."""
        number = BY_NUMPY.get(numpy_array.dtype) if type(numpy_array) is np.ndarray else None
        if number is None:
            numpy_array, number = _adapt(name, numpy_array)
        self._name, self._array, self._kind = name, numpy_array, number

    @classmethod
    def made_of(cls, name: str, array: Array, kind: int) -> Tensor:
        """One whose array is known to be of Triton type `kind`."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._array, tensor._kind = name, array, kind
        return tensor

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def as_numpy(self) -> Array:
        """The array, without a copy. Raises TritonModelException for BF16, which numpy has not."""
        if self._kind == BF16:
            raise TritonModelException(
                f"tensor '{self._name}' is BF16, which numpy cannot hold; use to_dlpack()"
            )
        return self._array

    def triton_dtype(self) -> int:
        """The number of its datatype."""
        return self._kind

    def shape(self) -> list[int]:
        """Its full shape."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Whether its memory is the host's."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory. Raises TritonModelException for strings."""
        if self._kind == STRING:
            raise TritonModelException("DLPack does not support string tensors")
        return dlpack.lend(self._array, self._kind)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE_CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of a DLPack capsule, or of an object that can make one.

        Raises TritonModelException when it is neither, or lies on another device.
        """
        make = getattr(tensor, "__dlpack__", None)
        if make is not None:
            device = tuple(tensor.__dlpack_device__())
            if device[0] != _DEVICE_CPU[0]:
                raise TritonModelException(f"tensor '{name}' is on a device this worker does not have")
        try:
            array, kind = dlpack.borrow(tensor if make is None else make())
        except (TypeError, ValueError, BufferError) as error:
            raise TritonModelException(f"tensor '{name}': {error}") from None
        return Tensor.made_of(name, array, kind)

    def __repr__(self) -> str:
        return f"<Tensor {self._name!r} {self._kind} {list(self._array.shape)}>"

    @property
    def raw(self) -> Array:
        """The array whatever its type: BF16 as its bits in uint16."""
        return self._array


def _adapt(name: str, given: Any) -> tuple[Array, int]:
    """What is not simply an array of a Triton type, made into one, and the number of that type."""
    if not isinstance(given, np.ndarray | np.generic):
        kind = type(given).__name__
        raise TritonModelException(f"tensor '{name}' must be made of a numpy array, not {kind}")
    array = np.asarray(given)
    if array.dtype.kind in "SU":
        array = array.astype(_OBJECT)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    number = BY_NUMPY.get(array.dtype)
    if number is None:
        raise TritonModelException(f"tensor '{name}': numpy's {array.dtype} is no Triton datatype")
    return array, number
