"""Warm-up: the batches that a worker runs before it is ready.

Samples       given in the configuration; one that fails, fails the load synthetic     zeros, then ones, then
random numbers, for models without samples. A sound model may refuse them (a
              logarithm has no use for zeros), so the load fails only when every axis is known, every input is
              a number and no input was accepted or refused as INVALID_ARGUMENT, or when all fail as no input
              can make code fail: an unknown name, a missing module
recorded      requests that the owner has written into memory (engine), each behind its length

An input of a sample is given as nested lists, as "zeros", or as a config.pbtxt has it:
{dims: [4], data: zeros | random | file, file: ...}, where a file holds the raw tensor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastserve._ext.flatten import unpack_bytes
from fastserve.backends.base import Backend
from fastserve.backends.model_errors import explain, kind_of
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.request import RECORDED_LENGTH as LENGTH
from fastserve.settings.confined_file import read_confined
from fastserve.tensor import TensorSpec
from fastserve.workers.arrays import NUMPY, as_read_only

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
            name: as_read_only(_sample_array(spec, sample, f"warmup[{number}].inputs.{name}", batching))
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


log = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]
BROKEN = (NameError, AttributeError, ImportError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class SyntheticInput:
    """A synthetic input. `free` is the length of axes of any length."""

    number: int
    text: bytes
    free: int = 1
    random: bool = False

    def make(self, spec: TensorSpec, rows: tuple[int, ...]) -> Array:
        """Make one input; `rows` is (n,) for a model with a batch axis, () without."""
        shape = (*rows, *(self.free if n < 0 else n for n in spec.shape or ()))
        if spec.dtype.name == "bytes":
            return np.full(shape, self.text, object)
        numbers = np.random.default_rng(0).random(shape) if self.random else np.full(shape, self.number)
        return as_read_only(numbers.astype(NUMPY[spec.dtype.name]))


SYNTHETIC_INPUTS = (
    SyntheticInput(0, b""),
    SyntheticInput(1, b"1"),
    SyntheticInput(1, b"text", free=8, random=True),
)


def run_synthetic(
    run: Callable[[int, SyntheticInput], None], sizes: Sequence[int], inputs: Mapping[str, TensorSpec]
) -> None:
    """Run batches of every size of `sizes`, of the first guess that the model takes. Raises ServeError when
    it takes none and cannot be sound."""
    faults: list[Exception] = []
    for guess in SYNTHETIC_INPUTS:
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


RecordedArrays = dict[str, np.ndarray[Any, Any]]


class RecordedTensor(msgspec.Struct, array_like=True):
    """A recorded tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class RecordedRequest(msgspec.Struct, array_like=True):
    """A recorded request, and its name in an error."""

    origin: str
    times: int
    inputs: dict[str, RecordedTensor]


def run_recorded(backend: Backend, fd: int, max_rows: int) -> None:
    """Run every request as often as it says, in pieces of `max_rows` rows; 0: whole, there is no batch axis.
    Raises ServeError, which names the request that failed."""
    for entry in _read_requests(fd):
        _run_one(backend, entry, max_rows)


def _read_requests(fd: int) -> Iterator[RecordedRequest]:
    """Yield one request at a time, by offsets: all workers of a version have the one descriptor."""
    at, end = 0, os.fstat(fd).st_size
    while at < end:
        (size,) = LENGTH.unpack(os.pread(fd, LENGTH.size, at))
        yield msgspec.msgpack.decode(os.pread(fd, size, at + LENGTH.size), type=RecordedRequest)
        at += LENGTH.size + size


def _run_one(backend: Backend, entry: RecordedRequest, max_rows: int) -> None:
    try:
        for _ in range(entry.times):
            for arrays in _pieces(entry.inputs, max_rows):
                backend.run(arrays)
    except Exception as error:
        raise ServeError(kind_of(error), f"{entry.origin}: {explain(error)}") from error


def _pieces(inputs: Mapping[str, RecordedTensor], max_rows: int) -> Iterator[RecordedArrays]:
    arrays = {name: _read_tensor(column) for name, column in inputs.items()}
    rows = next((len(array) for array in arrays.values()), 0) if max_rows else 0
    if not max_rows:
        yield arrays
    for first in range(0, rows, max_rows or 1):
        yield {name: array[first : first + max_rows] for name, array in arrays.items()}


def _read_tensor(column: RecordedTensor) -> np.ndarray[Any, Any]:
    if column.dtype == "bytes":
        items = unpack_bytes(column.data, int(np.prod(column.shape)))
        return np.array([*items, None], object)[:-1].reshape(column.shape)
    return np.frombuffer(column.data, NUMPY[column.dtype]).reshape(column.shape)
