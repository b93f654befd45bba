"""DLPack capsules of CPU memory, both ways, for element types numpy's own exchange leaves out.

numpy neither lends read-only memory (a request's input is that) nor knows bfloat16; both are ordinary
here. A bfloat16 array is a uint16 array of its bits with the Triton type beside it.

    capsule = lend(array, BF16)          the array lives until the consumer is done with the capsule
    array, kind = borrow(capsule)        a view; the producer's memory lives until the array goes
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.triton_types import BF16, BOOL, TRITON_TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
# The same two on a capsule that is being destroyed, which no Python reference may be made of.
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
    """A capsule over the array's memory, which stays alive with it. Raises TypeError for strings."""
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
    """The capsule's memory as an array and its Triton type; the capsule is used up.

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
