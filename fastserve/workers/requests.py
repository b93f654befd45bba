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
from typing import TYPE_CHECKING, Any
from weakref import ref

from fastserve.backends.base import kind_of
from fastserve.backends.device_faults import end_if_lost, is_out_of_memory
from fastserve.backends.shortage import count_shortage
from fastserve.backends.triton_metrics import changes
from fastserve.backends.triton_python import Failed, TritonPythonBackend
from fastserve.backends.triton_requests import InferenceRequest, InferenceResponse
from fastserve.workers.arena import Arena
from fastserve.workers.guesses import Guess
from fastserve.workers.isolation import counted, isolate, may_isolate, most_runs
from fastserve.workers.replies import Batch, Kept, Reply
from fastserve.workers.request_desk import Desk

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve._ext.triton_requests import Asked

log = logging.getLogger(__name__)


class RequestRunner:
    """Runs slots whose places carry whole requests. It publishes them itself, now or later."""

    def __init__(
        self, arena: Arena, ring: BatchRing, backend: TritonPythonBackend, config: Mapping[str, Any]
    ) -> None:
        self._ring = ring
        self._isolating = may_isolate(config)
        self._desk = Desk(arena, ring, backend)
        self._backend, self._decoupled = backend, backend.decoupled
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
        asked = self._desk.read_all(batch, places, Reply, self._decoupled)
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
        except Exception as fault:
            error = fault
        else:
            self._desk.answer_all(responses, replies)
            return
        try:  # handled here no more: see isolation.py
            self._batch_failed(slot, asked, requests, error)
        finally:
            del error  # its traceback holds this frame

    def _batch_failed(
        self, slot: int, asked: list[Asked], requests: list[InferenceRequest], error: Exception
    ) -> None:
        end_if_lost(error)
        if is_out_of_memory(error):
            count_shortage()
        if len(asked) == 1 or not self._isolating:
            self._fail_all(requests, [one.reply for one in asked], error)
            return
        requests.clear()
        self._isolate(slot, asked, error)
        self._ring.end_run(slot)

    def _isolate(self, slot: int, asked: list[Asked], error: Exception) -> None:
        """Each run sees requests read anew: a model may have written into what it was given."""

        def run(group: Sequence[Asked]) -> None:
            requests = [self._desk.read(one.reply, one.offset, one.nbytes, one.lent) for one in group]
            with counted(self._ring, slot, sum(one.rows for one in group)):
                responses = self._backend.execute(requests, _unexpected)
            self._desk.answer_all(_checked(responses, len(group)), [one.reply for one in group])

        def fail(one: Asked, fault: Exception) -> None:
            self._fail([one.reply], fault)

        def id(one: Asked) -> str:
            return _ids_of([one.request])

        left = [one for one in asked if one.reply.open]  # others had their answer before execute() raised
        if left:
            most = most_runs(len(left), short=is_out_of_memory(error))
            isolate(left, error, run=run, fail=fail, most=most, id=id)

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

        def fail(error: BaseException) -> None:
            if is_out_of_memory(error):
                count_shortage()
            self._fail([reply for reply in (look() for look in waiting) if reply is not None], error)

        return fail

    def _fail(self, replies: list[Reply], error: BaseException) -> None:
        kind = kind_of(error)
        for reply in replies:
            reply.fail(kind, self._desk.words(error))


def _unexpected(error: BaseException) -> None:
    raise AssertionError("only a decoupled model fails later") from error


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
