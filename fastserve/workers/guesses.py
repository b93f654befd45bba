"""Warm-up with made-up inputs, for models that came without samples: zeros, then ones, then random numbers.

A guess may be refused by a sound model: a logarithm has no use for zeros, a convolution none for a picture of
one pixel. So a version fails to load only when no guess tells of a model that could run:

- every axis is known and every input a number, and all guesses failed, none of them as INVALID_ARGUMENT
- or all of them failed as no input can make code fail: a name that is not there, a module that is missing
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastserve.backends.base import explain, kind_of
from fastserve.errors import Kind, ServeError
from fastserve.tensor import TensorSpec
from fastserve.workers.arrays import NUMPY

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
BROKEN = (NameError, AttributeError, ImportError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Guess:
    """What an input might hold. `free` is the length of axes that may have any."""

    number: int
    text: bytes
    free: int = 1
    random: bool = False

    def make(self, spec: TensorSpec, rows: tuple[int, ...]) -> Array:
        """One input; `rows` is (n,) for a model with a batch axis, () without."""
        shape = (*rows, *(self.free if n < 0 else n for n in spec.shape or ()))
        if spec.dtype.name == "bytes":
            return np.full(shape, self.text, object)
        numbers = np.random.default_rng(0).random(shape) if self.random else np.full(shape, self.number)
        return numbers.astype(NUMPY[spec.dtype.name])


GUESSES = (Guess(0, b""), Guess(1, b"1"), Guess(1, b"text", free=8, random=True))


def run_guesses(
    run: Callable[[int, Guess], None], sizes: Sequence[int], inputs: Mapping[str, TensorSpec]
) -> None:
    """Run batches of every size of `sizes`, of the first guess that the model takes. Raises ServeError when
    it takes none and cannot be sound."""
    faults: list[Exception] = []
    for guess in GUESSES:
        try:
            for rows in sizes:
                run(rows, guess)
            return
        except Exception as error:
            faults.append(error)
    words = explain(faults[0])
    if not _cannot_be_sound(faults, inputs):
        log.warning("warm-up with made-up inputs was refused by the model: %s", words)
        return
    text = f"every run of its warm-up failed (zeros, ones, random numbers): {words}"
    raise ServeError(kind_of(faults[0]), text) from faults[0]


def _cannot_be_sound(faults: Sequence[Exception], inputs: Mapping[str, TensorSpec]) -> bool:
    if all(isinstance(fault, BROKEN) for fault in faults):
        return True
    refused = any(isinstance(fault, ServeError) and fault.kind is Kind.INVALID_ARGUMENT for fault in faults)
    known = all(spec.row_bytes is not None and spec.dtype.name != "bytes" for spec in inputs.values())
    return known and not refused
