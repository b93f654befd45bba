"""Batches for models that see requests, not arrays: a list of InferenceRequest in, a response for each out.

Inputs are read-only views of the slabs the requests came in; strings are copied out. What the model does
with one request reaches its caller alone; an exception of execute() reaches all of the batch.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import explain, kind_of
from fastserve.backends.triton_python import TritonPythonBackend
from fastserve.backends.triton_requests import InferenceRequest, InferenceResponse, incoming
from fastserve.backends.triton_tensor import Tensor as TritonTensor
from fastserve.backends.triton_tensor import TritonModelException
from fastserve.backends.triton_types import BY_DTYPE, BY_NUMBER, STRING
from fastserve.codec.notes import AnswerNote, read_request_note, write_note
from fastserve.codec.slab_tensors import MAX_RANK, read_note, read_tensors
from fastserve.errors import Kind
from fastserve.tensor import DTYPES, Tensor
from fastserve.workers.arrays import as_tensor, view_tensor
from fastserve.workers.replies import Batch, Kept, Packed, Reply, Views

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

log = logging.getLogger(__name__)

FAILED = "Failed to process the request(s) for model instance '{}', message: {}"
UNREADABLE = "the inputs cannot be read as the tensors they claim to be"
_OURS = {number: DTYPES[row.dtype] for number, row in BY_NUMBER.items()}
Array = np.ndarray[Any, Any]


class RequestRunner:
    """Runs slots whose places carry whole requests. It publishes them itself, now or later."""

    def __init__(self, ring: BatchRing, backend: TritonPythonBackend) -> None:
        self._ring = ring
        self._backend = backend
        self._batching = backend.batching
        self._inputs = list(backend.inputs)
        self._outputs = list(backend.outputs)
        self._declared = [entry["name"] for entry in backend.config.get("output") or ()]
        states = (backend.config.get("sequence_batching") or {}).get("state") or ()
        # Outputs a caller may do without; a scheduler gets its own in any case.
        self._optional = set(self._declared).difference(state["output_name"] for state in states)
        self._numbers = {name: number for number, name in enumerate(self._outputs)}
        self._input_shapes = read_reshapes(backend.config, "input")
        self._output_shapes = read_reshapes(backend.config, "output")
        self._model = backend.name, backend.version
        self._kept: set[Kept] = set()

    def run(self, slot: int) -> bool:
        """Answers every place of the slot, or sees to it that they will be. True: it publishes the slot."""
        places = self._ring.places(slot)
        if not places:
            return False
        self._ring.start_run(slot)
        batch = Batch(self._ring, slot, len(places), self._kept)
        requests, replies = self._read_all(batch, places)
        if requests:
            self._execute(slot, requests, replies)
        requests.clear()
        replies.clear()
        batch.settle()
        return True

    def warm_up(self, rows: int) -> None:
        """Nothing: Triton runs a model on what its configuration says, and on nothing else."""

    def _execute(self, slot: int, requests: list[InferenceRequest], replies: list[Reply]) -> None:
        # Weak: what this thread holds no longer, the model may have answered or forgotten.
        waiting = [weakref.ref(reply) for reply in replies]
        try:
            responses = self._backend.execute(requests, lambda error: self._fail(waiting, error))
            self._ring.end_run(slot)
            if self._backend.decoupled and responses is None:
                return
            self._answer(_checked(responses, len(requests)), replies)
        except Exception as error:
            log.exception("the model failed on a batch of %d requests", len(requests))
            self._fail(waiting, error)

    def _answer(self, responses: Sequence[InferenceResponse | None], replies: list[Reply]) -> None:
        for reply, response in zip(replies, responses, strict=True):
            if response is None or reply.ended:
                continue
            try:
                reply.send(response, True)
            except TritonModelException as error:
                reply.fail(Kind.INTERNAL, self._words(error))

    def _fail(self, waiting: list[weakref.ref[Reply]], error: BaseException) -> None:
        kind = kind_of(error)
        for reply in (ref() for ref in waiting):
            if reply is not None:
                reply.fail(kind, self._words(error))

    def _words(self, error: BaseException) -> str:
        return FAILED.format(self._backend.instance_name, explain(error))

    # --- requests in ---

    def _read_all(
        self, batch: Batch, places: list[tuple[int, int, int, int]]
    ) -> tuple[list[InferenceRequest], list[Reply]]:
        requests, replies = [], []
        for row, _, offset, nbytes in places:
            reply = Reply(batch, row, self._pack, decoupled=self._backend.decoupled)
            try:
                request, views = self._read(reply, offset, nbytes)
            except (ValueError, LookupError):  # strings whose lengths lie, say
                reply.fail(Kind.INVALID_ARGUMENT, UNREADABLE)
                continue
            batch.views.append((row, views))
            requests.append(request)
            replies.append(reply)
        return requests, replies

    def _read(self, reply: Reply, offset: int, nbytes: int) -> tuple[InferenceRequest, Views]:
        slab = self._ring.slab(offset, nbytes)
        note = read_request_note(read_note(slab))
        inputs: dict[str, TritonTensor] = {}
        views: Views = []
        for number, tensor in read_tensors(slab):
            declared = number < len(self._inputs)
            name = self._inputs[number] if declared else note.extra[number - len(self._inputs)]
            array, kind = view_tensor(tensor), BY_DTYPE[tensor.dtype.name].number
            if name in self._input_shapes:
                array = reshape(array, *self._input_shapes[name], batching=self._batching)
            if kind != STRING:
                views.append(weakref.ref(root_of(array)))
            inputs[name] = TritonTensor.made_of(name, array, kind)
        reply.wanted = note.outputs or self._declared
        return incoming(self._model, inputs, reply.wanted, note, reply), views

    # --- responses out ---

    def _pack(self, response: InferenceResponse, wanted: list[str]) -> Packed:
        """Raises TritonModelException for a tensor that cannot travel."""
        numbered: list[tuple[int, Tensor]] = []
        extra: list[str] = []
        for output in response.output_tensors():
            name = output.name()
            if name in self._optional and name not in wanted:
                continue
            number = self._numbers.get(name)
            if number is None:
                number = len(self._outputs) + len(extra)
                extra.append(name)
            numbered.append((number, self._tensor(name, output)))
        note = AnswerNote(parameters=response.plain_parameters, extra=extra)
        return numbered, write_note(note)

    def _tensor(self, name: str, output: TritonTensor) -> Tensor:
        array = output.raw
        try:
            if name in self._output_shapes:
                dims, shape = self._output_shapes[name]
                array = reshape(array, shape, dims, batching=self._batching)
            return to_tensor(array, output.triton_dtype())
        except (TypeError, ValueError) as error:
            raise TritonModelException(f"output '{name}': {error}") from None


def to_tensor(array: Array, kind: int) -> Tensor:
    """An array of Triton type `kind` as ours. Raises ValueError for too many axes."""
    if array.ndim > MAX_RANK:
        raise ValueError(f"a tensor has at most {MAX_RANK} axes, not {array.ndim}")
    if kind == STRING and not all(isinstance(item, bytes | str) for item in array.flat):
        items = [item if isinstance(item, bytes | str) else str(item) for item in array.flat]
        plain = np.empty(len(items), object)
        plain[:] = items
        array = plain.reshape(array.shape)
    return as_tensor(array, _OURS[kind])


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


def _checked(responses: Any, wanted: int) -> Sequence[InferenceResponse | None]:
    if responses is None:
        responses = [None] * wanted
    if not isinstance(responses, list | tuple):
        raise TypeError(f"execute must return a list of responses, not {type(responses).__name__}")
    if len(responses) != wanted:
        raise ValueError(f"execute returned {len(responses)} responses for {wanted} requests")
    for response in responses:
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"execute returned {type(response).__name__}, not InferenceResponse")
    return responses


def root_of(array: Array) -> Array:
    """What every view of the array keeps alive."""
    return array.base if isinstance(array.base, np.ndarray) else array
