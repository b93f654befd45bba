"""Tensors of Triton's Python API: a name and an array, their element types, and DLPack capsules both ways.

The hot part is compiled (`_ext.triton_requests`). A model may write into its tensors (`x /= 255`). Tensors of
a request lie in memory that is read again, by a second run of the batch or by another model, so the first
access copies them for the model. A tensor that is only passed on is never copied. Private pages over the
shared memory were measured instead: they cost as much as the copy where nobody writes, and 5 times as much
where somebody does.

numpy's own DLPack exchange neither exports read-only memory (a request's input is that) nor knows bfloat16;
both are ordinary here. A bfloat16 array is a uint16 array of its bits with the Triton type beside it.

    capsule = lend(array, BF16)          the array lives until the consumer is done with the capsule
    array, kind = borrow(capsule)        a view; the producer's memory lives until the array goes
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastserve._ext.triton_requests import KINDS, SlabTensor


class TritonType(NamedTuple):
    """One element type. `numpy` is uint16 for BF16, which numpy lacks, and object for strings."""

    number: int
    config_name: str  # in config.pbtxt
    name: str  # in the protocol
    numpy: Any
    dtype: str  # in fastserve.tensor.DTYPES


TRITON_TYPES = (
    TritonType(1, "TYPE_BOOL", "BOOL", np.bool_, "bool"),
    TritonType(2, "TYPE_UINT8", "UINT8", np.uint8, "uint8"),
    TritonType(3, "TYPE_UINT16", "UINT16", np.uint16, "uint16"),
    TritonType(4, "TYPE_UINT32", "UINT32", np.uint32, "uint32"),
    TritonType(5, "TYPE_UINT64", "UINT64", np.uint64, "uint64"),
    TritonType(6, "TYPE_INT8", "INT8", np.int8, "int8"),
    TritonType(7, "TYPE_INT16", "INT16", np.int16, "int16"),
    TritonType(8, "TYPE_INT32", "INT32", np.int32, "int32"),
    TritonType(9, "TYPE_INT64", "INT64", np.int64, "int64"),
    TritonType(10, "TYPE_FP16", "FP16", np.float16, "float16"),
    TritonType(11, "TYPE_FP32", "FP32", np.float32, "float32"),
    TritonType(12, "TYPE_FP64", "FP64", np.float64, "float64"),
    TritonType(13, "TYPE_STRING", "BYTES", np.object_, "bytes"),
    TritonType(14, "TYPE_BF16", "BF16", np.uint16, "bfloat16"),
)

BOOL, STRING, BF16 = 1, 13, 14
BY_NUMBER = {row.number: row for row in TRITON_TYPES}
BY_CONFIG_NAME = {row.config_name: row for row in TRITON_TYPES}
BY_DTYPE = {row.dtype: row for row in TRITON_TYPES}
BY_NUMPY = {np.dtype(row.numpy): row.number for row in TRITON_TYPES if row.number != BF16}
_CPU, _CUDA_HOST = 1, 3
_CODE_BOOL, _CODE_BFLOAT = 6, 4
_CODES = {"i": 0, "u": 1, "f": 2}
_NAME = b"dltensor"
_USED = b"used_dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("queues", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_api = ctypes.pythonapi
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", _api)
)

_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))

_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))

# For a capsule that is being destroyed: no Python reference to it may be made.
_dying_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_lent: dict[int, tuple[Any, ...]] = {}  # by address: what must outlive a capsule


def _give_back(managed: Any) -> None:
    _lent.pop(ctypes.addressof(managed.contents), None)


def _destroy(capsule: int) -> None:
    if _dying_valid(capsule, _NAME):  # nobody took it
        owner = _owners.pop(capsule, None)
        _lent.pop(owner or 0, None)
    else:
        _owners.pop(capsule, None)


_give_back_c, _destroy_c = _Deleter(_give_back), _Destructor(_destroy)
_owners: dict[int, int] = {}  # capsule -> address of its struct


def lend(array: NDArray[Any], kind: int) -> Any:
    """Return a capsule over the array's memory, which stays alive with it. Raises TypeError for strings."""
    if array.dtype.kind not in "iufb":
        raise TypeError("DLPack does not support string tensors")
    code = _CODE_BFLOAT if kind == BF16 else _CODE_BOOL if kind == BOOL else _CODES[array.dtype.kind]
    rank = array.ndim
    shape = (ctypes.c_int64 * max(rank, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(rank, 1))(*(step // array.itemsize for step in array.strides))
    managed = _Managed()
    managed.tensor = _Tensor(
        array.__array_interface__["data"][0], _CPU, 0, rank, code, array.itemsize * 8, 1, shape, strides, 0
    )
    managed.deleter = _give_back_c
    address = ctypes.addressof(managed)
    _lent[address] = (managed, array, shape, strides)
    capsule = _new(address, _NAME, _destroy_c)
    _owners[id(capsule)] = address
    return capsule


def borrow(capsule: Any) -> tuple[NDArray[Any], int]:
    """Return the capsule's memory as an array, and its Triton type; the capsule is used up.

    Raises ValueError for a capsule already used, TypeError for other devices and element types.
    """
    if not _valid(capsule, _NAME):
        raise ValueError("not a DLPack capsule, or one that was used already")
    managed = ctypes.cast(_pointer(capsule, _NAME), ctypes.POINTER(_Managed))
    told = managed.contents.tensor
    if told.device_type not in (_CPU, _CUDA_HOST):
        raise TypeError("this worker takes DLPack tensors in CPU memory only")
    dtype, kind = _dtype_of(told)
    shape = tuple(told.shape[i] for i in range(told.rank))
    strides = tuple(told.strides[i] * dtype.itemsize for i in range(told.rank)) if told.strides else None
    reach = 1 + sum((n - 1) * (s // dtype.itemsize) for n, s in zip(shape, strides or (), strict=False))
    items = reach if strides else int(np.prod(shape, dtype=np.int64))
    address = ctypes.addressof(managed.contents)
    _rename(capsule, _USED)
    if 0 in shape or not told.data:
        _release(address)
        return np.empty(shape if 0 in shape else (0,), dtype), kind
    memory: Any = (ctypes.c_ubyte * (items * dtype.itemsize)).from_address(told.data + told.byte_offset)
    weakref.finalize(memory, _release, address)
    return np.ndarray(shape, dtype, memory, 0, strides), kind


def _dtype_of(told: _Tensor) -> tuple[np.dtype[Any], int]:
    if told.queues == 1 and told.code == _CODE_BFLOAT and told.bits == 16:
        return np.dtype(np.uint16), BF16
    if told.queues == 1 and told.code == _CODE_BOOL and told.bits == 8:
        return np.dtype(bool), BOOL
    letter = next((k for k, code in _CODES.items() if code == told.code), "")
    name = f"{letter}{told.bits // 8}"
    if told.queues != 1 or name not in _BY_NAME:
        raise TypeError(f"DLPack element type {told.code} of {told.bits} bits is not one of Triton's")
    return np.dtype(name), _BY_NAME[name]


_BY_NAME = {np.dtype(t.numpy).str[1:]: t.number for t in TRITON_TYPES if t.number not in (BF16, BOOL)}


def _release(address: int) -> None:
    managed = ctypes.cast(address, ctypes.POINTER(_Managed))
    if managed.contents.deleter:
        managed.contents.deleter(managed)


Array = NDArray[Any]
_OBJECT = np.dtype(object)
_DEVICE_CPU = (1, 0)


class TritonModelException(Exception):
    """The API was used wrongly."""


KINDS.update(BY_NUMPY)


class Tensor(SlabTensor):
    """One tensor. Its array is the model's to write into; strings are arrays of bytes.

    Made of a name and an array; raises TritonModelException when it is none, or has no Triton type.
    """

    __slots__ = ()

    @classmethod
    def made_of(cls, name: str, array: Array, kind: int, lent: bool = False) -> Tensor:
        """Make a tensor of an array whose Triton type `kind` is known; a `lent` array is copied at the first
        access."""
        tensor = cls.__new__(cls)
        tensor._hold(name, array, kind, lent)
        return tensor

    def is_cpu(self) -> bool:
        """Return True: its memory is the host's."""
        return True

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over the same memory. Raises TritonModelException for strings."""
        if self._kind == STRING:
            raise TritonModelException("DLPack does not support string tensors")
        return lend(self._own(), self._kind)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE_CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Make a tensor over the memory of a DLPack capsule, or of an object that can make one.

        Raises TritonModelException when it is neither, or lies on another device.
        """
        make = getattr(tensor, "__dlpack__", None)
        if make is not None:
            device = tuple(tensor.__dlpack_device__())
            if device[0] != _DEVICE_CPU[0]:
                raise TritonModelException(f"tensor '{name}' is on a device this worker does not have")
        try:
            array, kind = borrow(tensor if make is None else make())
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
    """Convert any array to one of a Triton type, and return that type's number too."""
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
