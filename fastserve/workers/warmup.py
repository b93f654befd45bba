"""Warm-up samples: batches a version must run before it becomes available.

An input of a sample is given as nested lists, as "zeros", or as a config.pbtxt has it:
{dims: [4], data: zeros | random | file, file: ...}, where a file holds the raw tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fastserve._ext.flatten import unpack_bytes
from fastserve.backends.base import Backend
from fastserve.config.confined import read_confined
from fastserve.errors import ConfigError
from fastserve.tensor import TensorSpec
from fastserve.workers.arrays import NUMPY

STRING_BYTES = 256 << 20  # of a file of strings; others have as many as their dims say


def run_samples(backend: Backend, samples: Sequence[Mapping[str, Any]], *, batching: bool) -> None:
    """Run every sample `count` times. Raises ConfigError for a sample that is no input of the model,
    and whatever the backend raises: a failing sample fails the load."""
    for number, sample in enumerate(samples):
        given = sample["inputs"]
        whole = any(isinstance(value, Mapping) for value in given.values())  # leaves out what is optional
        for name in given if whole else ():
            if name not in backend.inputs:
                raise ConfigError(f"model_warmup[{number}].inputs.{name}: the model has no such input")
        arrays = {
            name: _sample_array(spec, sample, f"warmup[{number}].inputs.{name}", batching)
            for name, spec in backend.inputs.items()
            if name in given or not whole
        }
        for _ in range(int(sample.get("count", 1))):
            backend.run(arrays)


def _sample_array(
    spec: TensorSpec, sample: Mapping[str, Any], where: str, batching: bool
) -> np.ndarray[Any, Any]:
    value = sample["inputs"].get(spec.name, "zeros")
    dtype = NUMPY[spec.dtype.name]
    lead = (int(sample.get("rows", 1)),) if batching else ()
    if isinstance(value, Mapping):
        return _described_array(spec, value, (*lead, *value["dims"]), where)
    if isinstance(value, str) and value == "zeros":
        return _zeros(spec, (*lead, *(abs(n) for n in spec.shape or ())))
    try:
        if spec.dtype.name == "bytes":
            value = _encoded(value)
        return np.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: not a tensor of {spec.dtype.name}: {error}") from None


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.full(shape, b"" if spec.dtype.name == "bytes" else 0, NUMPY[spec.dtype.name])


def _described_array(
    spec: TensorSpec, value: Mapping[str, Any], shape: tuple[int, ...], where: str
) -> np.ndarray[Any, Any]:
    count = prod(shape)
    if value["data"] == "zeros":
        return _zeros(spec, shape)
    if value["data"] == "random":
        raw = np.random.default_rng(0).integers(0, 256, count * spec.dtype.item_bytes, np.uint8)
        if spec.dtype.name == "bool":
            raw &= 1
        if spec.dtype.name == "bytes":
            return np.array([b"%d" % n for n in range(count)] + [None], object)[:-1].reshape(shape)
        return raw.view(NUMPY[spec.dtype.name]).reshape(shape)
    file = Path(value["file"])  # MODEL/warmup/NAME
    most = count * spec.dtype.item_bytes or STRING_BYTES
    try:
        data = read_confined(file.parent.parent, f"{file.parent.name}/{file.name}", most)
    except ConfigError as fault:
        raise ConfigError(f"{where}: {fault}") from None
    if spec.dtype.name == "bytes":
        return np.array([*unpack_bytes(data, count), None], object)[:-1].reshape(shape)
    if len(data) != count * spec.dtype.item_bytes:
        wanted = count * spec.dtype.item_bytes
        raise ConfigError(f"{where}: {file.name} has {len(data)} bytes, not {wanted}")
    return np.frombuffer(data, NUMPY[spec.dtype.name]).reshape(shape)


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    return value.encode() if isinstance(value, str) else value
