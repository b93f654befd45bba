"""TF Serving's JSON text, plainly: C's % formats, Python's repr, lists and joins.

No claim to speed. Layouts as spec tfserving 3.3 draws them; the digits come from Python and numpy.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Text = Callable[[Any], str]
Named = Sequence[tuple[str, Any]]  # (name, array); arrays of strings are object arrays of bytes


def special(value: float) -> str | None:
    if math.isnan(value):
        return "NaN"
    return None if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def tfs_float(value: np.floating[Any]) -> str:
    """%.6g, else %.9g or %.17g, with '.0' where nothing says that it is no integer."""
    width = np.float64 if value.dtype == np.float64 else np.float32
    text = special(float(value))
    if text is not None:
        return text
    text = f"{float(value):.6g}"
    with np.errstate(over="ignore"):
        if width(text) != value:
            text = f"{float(value):.{17 if width is np.float64 else 9}g}"
    return text if "." in text or "e" in text else text + ".0"


def shortest_float(value: np.floating[Any]) -> str:
    """Python's repr; for narrower floats its layout with the digits that float32 needs."""
    text = special(float(value))
    if text is not None or value.dtype == np.float64:
        return text or repr(float(value))
    exponential = np.format_float_scientific(np.float32(value), unique=True, trim="-")
    power = int(exponential.partition("e")[2])
    if not -4 <= power < 16:
        return exponential
    return np.format_float_positional(np.float32(value), unique=True, trim="0")


def escaped(data: bytes) -> str:
    named = {0x22: '\\"', 0x5C: "\\\\", 8: "\\b", 12: "\\f", 10: "\\n", 13: "\\r", 9: "\\t"}
    return '"' + "".join(named.get(b) or (f"\\u{b:04X}" if b < 32 else chr(b)) for b in data) + '"'


def b64(data: bytes, depth: int | None) -> str:
    text = f'"b64": "{base64.b64encode(data).decode()}"'
    if depth is None:
        return "{" + text + "}"
    return "{\n" + "    " * (depth + 1) + text + "\n" + "    " * depth + "}"


def scalar(value: Any, mode: int, as_bytes: bool, depth: int | None) -> str:
    if isinstance(value, bytes):
        return b64(value, depth) if as_bytes else escaped(value)
    if isinstance(value, np.bool_):
        return "true" if value else "false"
    if isinstance(value, np.floating):
        return shortest_float(value) if mode else tfs_float(value)
    return str(value)


def line(array: Any, mode: int, as_bytes: bool, depth: int | None) -> str:
    """Lists on one line; `depth` containers are open around, None for b64 objects on one line too."""
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        return scalar(array[()] if isinstance(array, np.ndarray) else array, mode, as_bytes, depth)
    inner = None if depth is None else depth + 1
    return "[" + ", ".join(line(item, mode, as_bytes, inner) for item in array) + "]"


def spread(array: Any, mode: int, as_bytes: bool, depth: int) -> str:
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        return scalar(array[()] if isinstance(array, np.ndarray) else array, mode, as_bytes, depth)
    items = [spread(item, mode, as_bytes, depth + 1) for item in array]
    start, end = "\n" + "    " * (depth + 1), "\n" + "    " * depth
    return "[" + ",".join(start + item for item in items) + (end if items else "") + "]"


def key(name: str) -> str:
    return escaped(name.encode()) + ": "


def predictions(outputs: Named, mode: int = 0) -> bytes:
    rows = len(outputs[0][1])
    if len(outputs) == 1:
        ((name, array),) = outputs
        items = [line(row, mode, name.endswith("_bytes"), 2) for row in array]
        body = ", ".join(items)
    else:
        body = ",".join(
            "\n        {"
            + ",".join(
                "\n            " + key(name) + line(array[row], mode, name.endswith("_bytes"), 3)
                for name, array in outputs
            )
            + "\n        }"
            for row in range(rows)
        )
    return ('{\n    "predictions": [' + body + ("\n    " if rows else "") + "]\n}").encode("latin-1")


def columns(outputs: Named, mode: int = 0) -> bytes:
    texts = [
        (name, spread(array, mode, name.endswith("_bytes"), 1 if len(outputs) == 1 else 2))
        for name, array in outputs
    ]
    if len(texts) == 1:
        body = texts[0][1]
    else:
        body = "{" + ",".join("\n        " + key(name) + text for name, text in texts) + "\n    }"
    return ('{\n    "outputs": ' + body + "\n}").encode("latin-1")
