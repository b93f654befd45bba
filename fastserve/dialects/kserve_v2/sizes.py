"""`--http-max-input-size` (spec 3.3): of the JSON of a request, of each tensor in it, and of a body that is
nothing but a tensor. Tensors that follow the JSON as bytes are bounded by `limits.body_bytes` alone.
"""

from __future__ import annotations

from fastserve.dialects.kserve_v2.body import InferBody
from fastserve.dialects.kserve_v2.errors import invalid

_HINT = "Use --http-max-input-size to increase the limit."
_GROWTH = 4  # `0,` is an FP64


def check_json(nbytes: int, most: int) -> None:
    """Raises ServeError for too much JSON."""
    if nbytes > most:
        raise invalid(
            f"request JSON size of {nbytes} bytes exceeds the maximum allowed input size of {most} bytes. "
            f"{_HINT}"
        )


def check_tensors(body: InferBody, json_bytes: int, most: int) -> None:
    """Raises ServeError for a JSON tensor that is too large as the model takes it."""
    if json_bytes * _GROWTH <= most:
        return
    for part in body.inputs:
        nbytes = memoryview(part.data).nbytes
        if part.is_json and nbytes > most:
            raise invalid(
                f"JSON input '{part.name}' has a byte_size ({nbytes} bytes) that exceeds the maximum allowed "
                f"value of {most} bytes. {_HINT}"
            )


def check_raw(nbytes: int, most: int) -> None:
    """Raises ServeError for a raw body that is too large."""
    if nbytes > most:
        raise invalid(
            f"Raw input has a byte_size ({nbytes} bytes) that exceeds the maximum allowed value of "
            f"{most} bytes. {_HINT}"
        )


def inflated_too_large(most: int) -> str:
    """What is said of a body that grew too large when decompressed."""
    return f"Decompressed data size exceeds the maximum allowed value of {most} bytes. {_HINT}"
