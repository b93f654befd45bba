"""Batches for models that see requests, not arrays: a list of InferenceRequest in, a response for each out.

Inputs are lent from the slabs the requests came in, and the model's own once it looks at them: what it writes
there reaches no second run of the batch. What it does with one request reaches its caller alone; an exception
of execute() reaches all of the batch.

The lists of requests are the model's: a coroutine or a thread may hold them for as long as it likes, and a
request ends when the last of those who could answer it lets go.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from fastserve._ext.flatten import pack_bytes
from fastserve._ext.slab_tensors import MAX_RANK
from fastserve.backends.base import explain, kind_of
from fastserve.backends.device_faults import end_if_lost
from fastserve.backends.triton_metrics import changes
from fastserve.backends.triton_python import Failed, TritonPythonBackend
from fastserve.backends.triton_requests import InferenceRequest, InferenceResponse, incoming
from fastserve.backends.triton_tensor import Tensor as TritonTensor
from fastserve.backends.triton_tensor import TritonModelException
from fastserve.backends.triton_types import BY_NUMBER, STRING
from fastserve.codec.notes import AnswerNote, read_request_note, write_note
from fastserve.errors import Kind
from fastserve.tensor import DTYPES
from fastserve.workers.arena import Arena
from fastserve.workers.arrays import open_desk, read_array
from fastserve.workers.guesses import Guess
from fastserve.workers.isolation import isolate, may_isolate
from fastserve.workers.replies import Batch, Kept, Packed, Reply

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve._ext.slab_tensors import Entry

log = logging.getLogger(__name__)

FAILED = "Failed to process the request(s) for model '{}', message: {}"
UNREADABLE = "the inputs cannot be read as the tensors they claim to be"
# Triton's number of a type <-> our dtype code.
CODES = {number: DTYPES[row.dtype].code for number, row in BY_NUMBER.items()}
KINDS = {code: number for number, code in CODES.items()}
STRINGS = DTYPES["bytes"].code
Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class Asked:
    """One request of a batch. `views` are the arrays over its input slab, of every time it was read."""

    request: InferenceRequest
    reply: Reply
    rows: int
    offset: int
    nbytes: int
    views: list[Array]


class RequestRunner:
    """Runs slots whose places carry whole requests. It publishes them itself, now or later."""

    def __init__(
        self, arena: Arena, ring: BatchRing, backend: TritonPythonBackend, config: Mapping[str, Any]
    ) -> None:
        self._ring = ring
        self._isolating = may_isolate(config)
        self._desk = open_desk(arena, ring)
        self._backend = backend
        self._batching, self._decoupled = backend.batching, backend.decoupled
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
        batch = Batch(self._ring, self._desk, slot, len(places), self._kept)
        changes.gathering = True
        try:
            self._run(batch, places)
        finally:
            changes.gathering = False
            changes.flush()
        batch.settle()  # holds no request any more: one the model has forgotten has ended
        return True

    def _run(self, batch: Batch, places: list[tuple[int, int, int, int]]) -> None:
        asked = self._read_all(batch, places)
        if asked:
            self._execute(batch.slot, asked)

    def warm_up(self, rows: int, guess: Guess) -> None:
        """Nothing: Triton runs a model on what its configuration says, and on nothing else."""

    def _execute(self, slot: int, asked: list[Asked]) -> None:
        requests, replies = [one.request for one in asked], [one.reply for one in asked]
        try:
            responses = self._backend.execute(requests, self._failing(replies))
            self._ring.end_run(slot)
            if self._decoupled and responses is None:
                return
            responses = _checked(responses, len(asked))
        except Exception as error:
            end_if_lost(error)
            if len(asked) == 1 or not self._isolating:
                self._fail_all(requests, replies, error)
                return
            requests.clear()
            self._isolate(slot, asked, error)
            self._ring.end_run(slot)
            return
        self._answer(responses, replies)

    def _isolate(self, slot: int, asked: list[Asked], error: Exception) -> None:
        """Each run sees requests read anew: a model may have written into what it was given."""

        def run(group: Sequence[Asked]) -> None:
            requests = [self._read(one.reply, one.offset, one.nbytes, one.views) for one in group]
            responses = self._backend.execute(requests, _unexpected)
            self._answer(_checked(responses, len(group)), [one.reply for one in group])

        def fail(one: Asked, fault: Exception) -> None:
            self._fail([one.reply], fault)

        def id(one: Asked) -> str:
            return _ids_of([one.request])

        left = [one for one in asked if one.reply.open]  # others had their answer before execute() raised
        if left:
            isolate(self._ring, slot, left, error, rows=lambda one: one.rows, run=run, fail=fail, id=id)

    def _fail_all(self, requests: list[InferenceRequest], replies: list[Reply], error: Exception) -> None:
        ids = _ids_of(requests)
        extra = {"request_ids": ids} if ids else None
        log.error("the model failed on a batch of %d requests", len(replies), exc_info=error, extra=extra)
        self._fail(replies, error)

    def _failing(self, replies: list[Reply]) -> Failed:
        """For what a model raises later. Weak: what is held here no longer may be answered or forgotten."""
        if not self._decoupled:
            return _unexpected
        waiting = [ref(reply) for reply in replies]
        return lambda error: self._fail([r for r in (look() for look in waiting) if r is not None], error)

    def _answer(self, responses: Sequence[InferenceResponse | None], replies: list[Reply]) -> None:
        for reply, response in zip(replies, responses, strict=True):
            if response is None:
                continue
            if reply.ended:
                log.error("execute returned a response to a request that it had answered: it is lost")
                continue
            try:
                reply.send(response, True)
            # A text or a parameter that cannot travel is its own caller's fault alone.
            except Exception as error:
                reply.fail(Kind.INTERNAL, self._words(error))

    def _fail(self, replies: list[Reply], error: BaseException) -> None:
        kind = kind_of(error)
        for reply in replies:
            reply.fail(kind, self._words(error))

    def _words(self, error: BaseException) -> str:
        return FAILED.format(self._backend.instance_name, explain(error) + self._backend.where(error))

    # --- requests in ---

    def _read_all(self, batch: Batch, places: list[tuple[int, int, int, int]]) -> list[Asked]:
        asked = []
        for row, rows, offset, nbytes in places:
            reply = Reply(batch, row, self._pack, decoupled=self._decoupled)
            views: list[Array] = []
            try:
                request = self._read(reply, offset, nbytes, views)
            except (ValueError, LookupError):  # strings whose lengths lie, say
                reply.fail(Kind.INVALID_ARGUMENT, UNREADABLE)
                continue
            batch.views.append((row, views))
            asked.append(Asked(request, reply, rows, offset, nbytes, views))
        return asked

    def _read(self, reply: Reply, offset: int, nbytes: int, views: list[Array]) -> InferenceRequest:
        entries, said = self._desk.arrays(offset, nbytes)
        note = read_request_note(said) if said else None  # nearly every request has nothing to say
        names = self._inputs if note is None else self._inputs + note.extra
        inputs: dict[str, TritonTensor] = {}
        for number, code, shape, data in entries:
            name = names[number]
            array = read_array(code, shape, data)
            if array is data:
                views.append(array)
            if name in self._input_shapes:
                array = reshape(array, *self._input_shapes[name], batching=self._batching)
            inputs[name] = TritonTensor.made_of(name, array, KINDS[code], code != STRINGS)
        reply.wanted = (note and note.outputs) or self._declared
        return incoming(self._model, inputs, reply.wanted, note, reply)

    # --- responses out ---

    def _pack(self, response: InferenceResponse, wanted: list[str]) -> Packed:
        """Raises TritonModelException for a tensor that cannot travel."""
        entries: list[Entry] = []
        extra: list[str] = []
        for output in response._tensors:
            name, array, kind = output._name, output._array, output._kind
            if wanted is not self._declared and name in self._optional and name not in wanted:
                continue
            number = self._numbers.get(name)
            if number is None and self._outputs:
                continue  # nobody can ask for what the configuration does not name: dropped, as there
            if number is None:
                number = len(self._outputs) + len(extra)
                extra.append(name)
            if kind != STRING and name not in self._output_shapes and is_plain(array):
                entries.append((number, CODES[kind], None, array))
            else:
                entries.append(self._entry(number, name, array, kind))
        parameters = response._parameters
        if not parameters and not extra:
            return entries, b""
        return entries, write_note(AnswerNote(parameters=parameters, extra=extra))

    def _entry(self, number: int, name: str, array: Array, kind: int) -> Entry:
        try:
            if name in self._output_shapes:
                dims, shape = self._output_shapes[name]
                array = reshape(array, shape, dims, batching=self._batching)
            return to_entry(number, array, kind)
        except (TypeError, ValueError) as error:
            raise TritonModelException(f"output '{name}': {error}") from None


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


def _unexpected(error: BaseException) -> None:
    raise AssertionError("only a decoupled model fails later") from error


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


def _ids_of(requests: Sequence[InferenceRequest]) -> str:
    """The ids that clients gave their requests; the model may have put anything into the list."""
    ids = [request.request_id() for request in requests if isinstance(request, InferenceRequest)]
    return " ".join(filter(None, ids))
