"""Tensors of Triton's Python API: a name and an array. What every request needs of them is compiled
(`_ext.triton_requests`).

A model may write into what it is given (`x /= 255`). Tensors that arrive lie in memory that is read again, by
a second run of the batch or by another model, so they are lent: the first look makes a copy of the model's
own. A tensor that is only passed on is never copied. Private pages over the shared memory were measured in
its place: they cost as much as the copy where nobody writes, and 5 times as much where somebody does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastserve._ext.triton_requests import KINDS, SlabTensor
from fastserve.backends import dlpack
from fastserve.backends.triton_types import BY_NUMPY, STRING

Array = NDArray[Any]
_OBJECT = np.dtype(object)
_DEVICE_CPU = (1, 0)


class TritonModelException(Exception):
    """What the API raises when a model uses it wrongly."""


KINDS.update(BY_NUMPY)


class Tensor(SlabTensor):
    """One tensor. Its array is the model's to write into; strings are arrays of bytes.

    Made of a name and an array; raises TritonModelException when it is none, or has no Triton type."""

    __slots__ = ()

    @classmethod
    def made_of(cls, name: str, array: Array, kind: int, lent: bool = False) -> Tensor:
        """One whose array is of Triton type `kind`, as is known; a `lent` one is copied at the first look."""
        tensor = cls.__new__(cls)
        tensor._hold(name, array, kind, lent)
        return tensor

    def is_cpu(self) -> bool:
        """Whether its memory is the host's."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory. Raises TritonModelException for strings."""
        if self._kind == STRING:
            raise TritonModelException("DLPack does not support string tensors")
        return dlpack.lend(self._own(), self._kind)

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
        return f"<Tensor {self._name!r} {self._kind} {self.shape()}>"

    def _adapt(self, name: str, given: Any) -> tuple[Array, int]:
        return _adapt(name, given)

    def _refuse(self) -> None:
        raise TritonModelException(f"tensor '{self._name}' is BF16, which numpy cannot hold; use to_dlpack()")


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
