"""The element types of Triton's Python API: one table from its numbers and names to numpy and to ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class TritonType(NamedTuple):
    """One row of the table. `numpy` is uint16 for BF16, which numpy has not, and object for strings."""

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
