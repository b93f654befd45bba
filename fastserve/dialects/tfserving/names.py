"""TensorFlow's names for element types: the words of its error texts and the DT_* names of its metadata."""

from __future__ import annotations

from fastserve.tensor import DTYPES

_OWN_WORDS = {"float32": "float", "float64": "double", "float16": "half", "bytes": "string"}

TF_WORD: dict[int, str] = {dtype.code: _OWN_WORDS.get(name, name) for name, dtype in DTYPES.items()}
"""DType.code -> the word of an error text, such as `float` or `string`."""

TF_NAME: dict[int, str] = {code: "DT_" + word.upper() for code, word in TF_WORD.items()}
"""DType.code -> the enum's name, such as `DT_FLOAT`."""


def shape_text(shape: tuple[int, ...]) -> str:
    """`[2,3]`, and `[]` for a scalar: how TensorFlow prints a shape."""
    return "[" + ",".join("?" if size < 0 else str(size) for size in shape) + "]"
