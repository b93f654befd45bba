"""The request codec: slabs to requests of Triton's Python API, and responses to slabs. The part that every
request needs is compiled (`_ext.triton_requests`); rare cases are here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve._ext.flatten import pack_bytes
from fastserve._ext.slab_tensors import MAX_RANK
from fastserve._ext.triton_requests import OneReply, RequestCodecBase, WholeRequest
from fastserve.backends.model_errors import explain
from fastserve.backends.triton_api.requests import InferenceRequest, InferenceResponse
from fastserve.backends.triton_api.tensor import BY_NUMBER, STRING, Tensor, TritonModelException
from fastserve.codec.slab_contents import AnswerNote, read_request_note, write_note
from fastserve.errors import Kind
from fastserve.tensor import DTYPES
from fastserve.workers.arena import Arena
from fastserve.workers.arrays import open_slab_codec, unpack_strings

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve._ext.slab_tensors import Entry
    from fastserve.backends.base import RequestBackend
    from fastserve.workers.requests import RequestReply

log = logging.getLogger(__name__)

FAILED = "Failed to process the request(s) for model '{}', message: {}"
UNREADABLE = "the inputs cannot be read as the tensors they claim to be"
# Triton's number of a type <-> our dtype code.
CODES = {number: DTYPES[row.dtype].code for number, row in BY_NUMBER.items()}
KINDS = {code: number for number, code in CODES.items()}
STRINGS = DTYPES["bytes"].code
Array = np.ndarray[Any, Any]
Packed = tuple[list["Entry"], bytes]  # outputs, their note


class RequestCodec(RequestCodecBase):
    """The request codec of one model."""

    def __init__(self, arena: Arena, ring: BatchRing, backend: RequestBackend) -> None:
        config = backend.config
        self._backend, self.traces = backend, arena.traces
        self._slabs = open_slab_codec(arena, ring)
        self.put = self._slabs.put
        self._batching, self._outputs = backend.batching, list(backend.outputs)
        self._declared = [entry["name"] for entry in config.get("output") or ()]
        states = (config.get("sequence_batching") or {}).get("state") or ()
        # Outputs a caller may do without; a scheduler gets its own in any case.
        self._optional = frozenset(self._declared).difference(state["output_name"] for state in states)
        self._numbers = {name: number for number, name in enumerate(self._outputs)}
        self._shapes = read_reshapes(config, "output")
        numpy_types = (None, *(np.dtype(BY_NUMBER[number].numpy) for number in sorted(BY_NUMBER)))
        super().__init__(
            arena.memory,
            worker=ring.worker,
            types=(InferenceRequest, Tensor),
            tables=(numpy_types, by_number(KINDS), by_number(CODES)),
            model=(backend.name, backend.version),
            names=(list(backend.inputs), self._declared),
            numbers=self._numbers,
            optional=self._optional,
            odd_in=read_reshapes(config, "input"),
            odd_out=self._shapes,
        )

    # --- in ---

    def read_strings(self, data: memoryview, shape: tuple[int, ...]) -> Array:
        """Copy strings out of the slab. Raises ValueError when their lengths lie."""
        return unpack_strings(data, shape)

    def read_note(self, said: bytes, request: WholeRequest, reply: OneReply) -> list[str]:
        """Read a request's fields besides tensors; returns the names of inputs that the model does not
        declare."""
        note = read_request_note(said)
        request._request_id = note.request_id
        request._correlation_id = note.sequence_id
        request._flags = note.flags
        request._timeout_us = note.timeout_us
        request._priority = note.priority
        request._parameters = note.parameters
        reply.wanted = note.outputs or self._declared
        return note.extra

    def fit(self, array: Array, shapes: tuple[list[int], list[int]], lent: list[Any]) -> Array:
        """Reshape an input whose model sees another shape than clients do."""
        lent.append(array)
        return reshape(array, *shapes, batching=self._batching)

    def unreadable(self, reply: RequestReply) -> None:
        """Refuse a request whose tensors cannot be read."""
        reply.fail(Kind.INVALID_ARGUMENT, UNREADABLE)

    # --- out ---

    def answered_twice(self) -> None:
        log.error("execute returned a response to a request that it had answered: it is lost")

    def unwritable(self, reply: RequestReply, error: Exception) -> None:
        reply.fail(Kind.INTERNAL, self.words(error))

    def words(self, error: BaseException) -> str:
        """The error text for an exception of the model."""
        return FAILED.format(self._backend.instance_name, explain(error) + self._backend.where(error))

    def pack(self, response: InferenceResponse, wanted: list[str]) -> Packed:
        """Return a response as slab entries and a note. Raises TritonModelException for a tensor that cannot
        travel."""
        entries: list[Entry] = []
        extra: list[str] = []
        for output in response._tensors:
            name = output.name()
            if wanted is not self._declared and name in self._optional and name not in wanted:
                continue
            number = self._numbers.get(name)
            if number is None and self._outputs:
                continue  # nobody can ask for what the configuration does not name: dropped, as there
            if number is None:
                number = len(self._outputs) + len(extra)
                extra.append(name)
            entries.append(self._entry(number, name, output.raw, output.triton_dtype()))
        parameters = response.plain_parameters
        if not parameters and not extra:
            return entries, b""
        return entries, write_note(AnswerNote(parameters=parameters, extra=extra))

    def _entry(self, number: int, name: str, array: Array, kind: int) -> Entry:
        try:
            if name in self._shapes:
                dims, shape = self._shapes[name]
                array = reshape(array, shape, dims, batching=self._batching)
            return to_entry(number, array, kind)
        except (TypeError, ValueError) as error:
            raise TritonModelException(f"output '{name}': {error}") from None


def by_number(table: Mapping[int, int]) -> tuple[int, ...]:
    """A table of small numbers, 0 where there is none."""
    return tuple(table.get(number, 0) for number in range(max(table) + 1))


def to_entry(number: int, array: Array, kind: int) -> Entry:
    """An array of Triton type `kind` as it goes into a slab. Raises ValueError for too many axes."""
    if array.ndim > MAX_RANK:
        raise ValueError(f"a tensor has at most {MAX_RANK} axes, not {array.ndim}")
    if kind == STRING:
        items = [item if isinstance(item, bytes | str) else str(item) for item in array.reshape(-1).tolist()]
        return number, STRINGS, array.shape, pack_bytes(items)
    return number, CODES[kind], None, array if is_plain(array) else np.ascontiguousarray(array)


def is_plain(array: Array) -> bool:
    """Whether the array can be copied as it lies."""
    return array.flags.c_contiguous and array.ndim <= MAX_RANK


def read_reshapes(config: Mapping[str, Any], side: str) -> dict[str, tuple[list[int], list[int]]]:
    """(dims, shape) of the tensors whose model sees another shape than clients do."""
    return {
        entry["name"]: (_lengths(entry["dims"]), _lengths(entry["reshape"].get("shape") or ()))
        for entry in config.get(side) or ()
        if entry.get("reshape") is not None
    }


def _lengths(dims: Sequence[Any]) -> list[int]:
    return [int(n) for n in dims]  # a 64-bit number may be text in JSON


def reshape(array: Array, old: list[int], new: list[int], *, batching: bool) -> Array:
    """The array, whose rows have shape `old`, with rows of shape `new`; a free axis keeps its length.

    Raises ValueError when the sizes do not fit.
    """
    lead = array.shape[: int(batching)]
    free = [have for have, want in zip(array.shape[len(lead) :], old, strict=False) if want < 0]
    if len(free) == sum(n < 0 for n in new):
        lengths = iter(free)
        exact = [next(lengths) if n < 0 else n for n in new]
        if prod(exact) * prod(lead) == array.size:
            new = exact
    reshaped: Array = array.reshape(*lead, *new)
    return reshaped
