"""Warm-up samples of model.yaml: batches a version must run before it becomes available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastserve.backends.base import Backend
from fastserve.errors import ConfigError
from fastserve.tensor import TensorSpec
from fastserve.workers.arrays import NUMPY


def run_samples(backend: Backend, samples: Sequence[Mapping[str, Any]], *, batching: bool) -> None:
    """Run every sample `count` times. Raises ConfigError for a sample that is no input of the model,
    and whatever the backend raises: a failing sample fails the load."""
    for number, sample in enumerate(samples):
        arrays = {
            name: _sample_array(spec, sample, f"warmup[{number}].inputs.{name}", batching)
            for name, spec in backend.inputs.items()
        }
        for _ in range(int(sample.get("count", 1))):
            backend.run(arrays)


def _sample_array(
    spec: TensorSpec, sample: Mapping[str, Any], where: str, batching: bool
) -> np.ndarray[Any, Any]:
    value = sample["inputs"].get(spec.name, "zeros")
    dtype = NUMPY[spec.dtype.name]
    if isinstance(value, str) and value == "zeros":
        lead = (int(sample.get("rows", 1)),) if batching else ()
        fill: Any = b"" if spec.dtype.name == "bytes" else 0
        return np.full((*lead, *(abs(n) for n in spec.shape or ())), fill, dtype)
    try:
        if spec.dtype.name == "bytes":
            value = _encoded(value)
        return np.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: not a tensor of {spec.dtype.name}: {error}") from None


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    return value.encode() if isinstance(value, str) else value
