"""Recorded requests, which every worker of a version runs before it is ready: also one that comes back later.

The owner writes them into memory once (engine/recorded.py), each behind its length, and hands the descriptor
to each worker. Who has recorded them, and in what form, is not known here: they are tensors by the model's
own names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from fastserve._ext.flatten import unpack_bytes
from fastserve.backends.base import Backend, explain, kind_of
from fastserve.errors import ServeError
from fastserve.request import RECORDED_LENGTH as LENGTH
from fastserve.workers.arrays import NUMPY

Arrays = dict[str, np.ndarray[Any, Any]]


class Column(msgspec.Struct, array_like=True):
    """A tensor as it travels."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Entry(msgspec.Struct, array_like=True):
    """One request, and what it is called in an error."""

    origin: str
    times: int
    inputs: dict[str, Column]


def run_recorded(backend: Backend, fd: int, max_rows: int) -> None:
    """Run every request as often as it says, in pieces of `max_rows` rows; 0: whole, there is no batch axis.
    Raises ServeError, which names the request that failed."""
    for entry in _read(fd):
        _run(backend, entry, max_rows)


def _read(fd: int) -> Iterator[Entry]:
    """One at a time. By offsets: all workers of a version have the one descriptor."""
    at, end = 0, os.fstat(fd).st_size
    while at < end:
        (size,) = LENGTH.unpack(os.pread(fd, LENGTH.size, at))
        yield msgspec.msgpack.decode(os.pread(fd, size, at + LENGTH.size), type=Entry)
        at += LENGTH.size + size


def _run(backend: Backend, entry: Entry, max_rows: int) -> None:
    try:
        for _ in range(entry.times):
            for arrays in _pieces(entry.inputs, max_rows):
                backend.run(arrays)
    except Exception as error:
        raise ServeError(kind_of(error), f"{entry.origin}: {explain(error)}") from error


def _pieces(inputs: Mapping[str, Column], max_rows: int) -> Iterator[Arrays]:
    arrays = {name: _array(column) for name, column in inputs.items()}
    rows = next((len(array) for array in arrays.values()), 0) if max_rows else 0
    if not max_rows:
        yield arrays
    for first in range(0, rows, max_rows or 1):
        yield {name: array[first : first + max_rows] for name, array in arrays.items()}


def _array(column: Column) -> np.ndarray[Any, Any]:
    if column.dtype == "bytes":
        items = unpack_bytes(column.data, int(np.prod(column.shape)))
        return np.array([*items, None], object)[:-1].reshape(column.shape)
    return np.frombuffer(column.data, NUMPY[column.dtype]).reshape(column.shape)
