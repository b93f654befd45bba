"""Batches for models that see requests, not arrays: a list of InferenceRequest in, a response for each out.

Inputs are lent from the slabs the requests came in, and the model's own once it looks at them: what it writes
there reaches no second run of the batch. What it does with one request reaches its caller alone; an exception
of execute() reaches all of the batch.

The lists of requests are the model's: a coroutine or a thread may hold them for as long as it likes, and a
request ends when the last of those who could answer it lets go.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from fastserve._ext.triton_requests import OneReply, SlotRun
from fastserve.backends.cancellation import WatchedReplies
from fastserve.backends.model_errors import count_out_of_memory, end_if_lost, is_out_of_memory, kind_of
from fastserve.backends.triton_api.requests import CLOSED, KINDS, InferenceRequest, InferenceResponse
from fastserve.backends.triton_api.tensor import TritonModelException
from fastserve.backends.triton_api.utils import changes
from fastserve.codec.slab_contents import AnswerNote, write_note
from fastserve.errors import Kind, ServeError
from fastserve.settings.model_options import may_isolate
from fastserve.util.tracing import TraceContext
from fastserve.workers.arena import WINDOW_PARTS, Arena
from fastserve.workers.isolation import counted, isolate, most_runs
from fastserve.workers.request_codec import Packed, RequestCodec
from fastserve.workers.warmup import SyntheticInput

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve._ext.triton_requests import Asked
    from fastserve.backends.base import OnFailure, RequestBackend


log = logging.getLogger(__name__)


class RequestRunner:
    """Runs slots whose leases carry whole requests. It publishes them itself, now or later."""

    def __init__(
        self, arena: Arena, ring: BatchRing, backend: RequestBackend, config: Mapping[str, Any]
    ) -> None:
        self._ring = ring
        self._isolating = may_isolate(config)
        self._codec = RequestCodec(arena, ring, backend)
        self._backend, self._decoupled = backend, backend.decoupled
        self._kept: set[KeptSlab] = set()
        self._watched = WatchedReplies()

    def run(self, slot: int) -> bool:
        """Answers every lease of the slot, or sees to it that they will be. True: it publishes the slot."""
        leases = self._ring.leases(slot)
        if not leases:
            return False
        self._ring.start_run(slot)
        batch = RequestBatch(self._ring, self._codec, slot, len(leases), self._kept)
        changes.gathering = True
        try:
            self._run(batch, leases)
        finally:
            changes.gathering = False
            changes.flush()
        batch.settle()  # holds no request any more: one the model has forgotten has ended
        return True

    def _run(self, batch: RequestBatch, leases: list[tuple[int, int, int, int]]) -> None:
        asked = self._codec.read_all(batch, leases, RequestReply, self._decoupled)
        if asked:
            self._execute(batch.slot, asked)

    def warm_up(self, rows: int, guess: SyntheticInput) -> None:
        """Do nothing: as in Triton, such a model is warmed up by its configuration's samples alone."""

    def _execute(self, slot: int, asked: list[Asked]) -> None:
        requests, replies = [one.request for one in asked], [one.reply for one in asked]
        self._watched.begin(replies)
        try:
            responses = self._backend.execute(requests, self._failing(replies))
            self._ring.end_run(slot)
            if self._decoupled and responses is None:
                return
            responses = _checked(responses, len(asked))
        except Exception as fault:
            error = fault
        else:
            self._codec.answer_all(responses, replies)
            return
        finally:
            self._watched.end()
        try:  # handled here no more: see isolation.py
            self._batch_failed(slot, asked, requests, error)
        finally:
            del error  # its traceback holds this frame

    def _batch_failed(
        self, slot: int, asked: list[Asked], requests: list[InferenceRequest], error: Exception
    ) -> None:
        end_if_lost(error)
        if is_out_of_memory(error):
            count_out_of_memory()
        if len(asked) == 1 or not self._isolating:
            self._fail_all(requests, [one.reply for one in asked], error)
            return
        requests.clear()
        self._isolate(slot, asked, error)
        self._ring.end_run(slot)

    def _isolate(self, slot: int, asked: list[Asked], error: Exception) -> None:
        """Each run sees requests read anew: a model may have written into what it was given."""

        def run(group: Sequence[Asked]) -> None:
            requests = [self._codec.read(one.reply, one.offset, one.nbytes, one.lent) for one in group]
            with counted(self._ring, slot, sum(one.rows for one in group)):
                responses = self._backend.execute(requests, _unexpected)
            self._codec.answer_all(_checked(responses, len(group)), [one.reply for one in group])

        def fail(one: Asked, fault: Exception) -> None:
            self._fail([one.reply], fault)

        def id(one: Asked) -> str:
            return _ids_of([one.request])

        left = [one for one in asked if one.reply.open]  # others had their answer before execute() raised
        if left:
            most = most_runs(len(left), short=is_out_of_memory(error))
            isolate(left, error, run=run, fail=fail, most=most, id=id)

    def _fail_all(
        self, requests: list[InferenceRequest], replies: list[RequestReply], error: Exception
    ) -> None:
        ids = _ids_of(requests)
        extra = {"request_ids": ids} if ids else None
        log.error("the model failed on a batch of %d requests", len(replies), exc_info=error, extra=extra)
        self._fail(replies, error)

    def _failing(self, replies: list[RequestReply]) -> OnFailure:
        """For what a model raises later. Weak: what is held here no longer may be answered or forgotten."""
        if not self._decoupled:
            return _unexpected
        waiting = [ref(reply) for reply in replies]

        def fail(error: BaseException) -> None:
            if is_out_of_memory(error):
                count_out_of_memory()
            self._fail([reply for reply in (look() for look in waiting) if reply is not None], error)

        return fail

    def _fail(self, replies: list[RequestReply], error: BaseException) -> None:
        kind = kind_of(error)
        for reply in replies:
            reply.fail(kind, self._codec.words(error))


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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01

TEXT_MAX = 4000
# How long a part waits for memory while its reader has nothing left to read.
ROOM_S = 30.0
SILENT = "the model gave no response to this request"
UNENDED = "the model let go of this request without a final response: its answer may not be whole"
NO_ROOM_FOR_PART = "a response of {} bytes found no room (max_queue_bytes)"
TWICE = "Unable to send response. Non-decoupled model cannot send more than one response."
Found = TypeVar("Found")


class KeptSlab:
    """An input slab held for arrays that outlive their batch; returned with the last of them."""

    def __init__(self, ring: BatchRing, offset: int, arrays: Sequence[Any], home: set[KeptSlab]) -> None:
        self._ring, self._offset, self._home = ring, offset, home
        self._refs = [weakref.ref(array, self._gone) for array in arrays]
        self._left = len(self._refs)
        home.add(self)

    def _gone(self, _: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._ring.free_slab(self._offset)
            self._home.discard(self)


class RequestBatch(SlotRun):
    """A slot that this worker runs."""

    def __init__(
        self, ring: BatchRing, codec: RequestCodec, slot: int, leases: int, kept: set[KeptSlab]
    ) -> None:
        super().__init__(ring, codec, slot, leases)
        self._kept = kept

    def _keep(self, row: int, arrays: list[Any]) -> None:
        offset = self.ring.keep_inputs(self.slot, row)
        if offset:
            KeptSlab(self.ring, offset, arrays, self._kept)


class RequestReply(OneReply):
    """See triton_requests.Reply. `wanted` are the outputs that go back."""

    __slots__ = ()

    def fail(self, kind: Kind, text: str) -> None:
        """Answer with an error instead of further responses."""
        if not self.hold():
            return
        packed: Packed = [], error_note(kind, text)
        try:
            if self.decoupled:
                self._post(packed, final=True)
            elif not self._sent:
                self._answer_slab(kind.value, packed)
        finally:
            self.end()
            self.let_go()

    @property
    def open(self) -> bool:
        """Whether this request has had no answer yet."""
        return not self.ended and not self._sent

    def cancelled(self) -> bool:
        """Whether the caller has left."""
        return not self.ended and not self._batch.ring.waits(self._batch.slot, self._row)

    def trace_context(self) -> TraceContext | None:
        """Return what spans of the model are to have as their parent; None for a request that is not
        traced, or has had its answer."""
        if self.ended:
            return None
        batch = self._batch
        notes = batch.codec.traces.read(batch.slot, batch.ring.seq(batch.slot))
        return next((note.context for note in notes if note.first_row == self._row), None)

    def _abandon(self) -> None:
        """End a request that the model has let go of."""
        try:
            if self.decoupled:
                self.fail(Kind.INTERNAL, UNENDED if self._sent else SILENT)
            elif self._sent:
                self.end()
            else:
                self.fail(Kind.INTERNAL, SILENT)
        except Exception:  # a destructor's exception would go nowhere
            log.exception("a request the model has forgotten could not be ended")

    def _silent(self) -> None:
        self._answer_slab(Kind.INTERNAL.value, ([], error_note(Kind.INTERNAL, SILENT)))

    def _twice(self) -> None:
        raise TritonModelException(TWICE)

    def _closed(self) -> None:
        raise TritonModelException(CLOSED)

    # --- one answer ---

    def _packed(self, response: InferenceResponse) -> tuple[int, Packed]:
        error = response._error
        if error is None:
            return 0, self._batch.codec.pack(response, self.wanted)
        code = error.code()
        kind = KINDS[code] if 0 <= code < len(KINDS) else Kind.INTERNAL
        return kind.value, ([], error_note(kind, error.message()))

    # --- parts ---

    def _send_part(self, response: InferenceResponse | None, final: bool) -> None:
        if response is None:
            self._post(None, final)
            return
        try:
            self._post(self._packed(response)[1], final)
        except ServeError as error:
            raise TritonModelException(error.message) from None

    def _post(self, packed: Packed | None, final: bool) -> None:
        ring, slot, row = self._batch.ring, self._batch.slot, self._row
        self._wait(lambda: self._sent - ring.parts_read(slot, row) < WINDOW_PARTS)
        offset = size = 0
        if packed is not None:
            found = self._wait(PartSpace(self, packed).look)
            if found is None:
                return  # the caller left while there was no room
            offset, size = found
        if self._wait(lambda: ring.send_part(slot, row, offset, size, final)):
            self._sent += 1
        elif offset:
            ring.free_slab(offset)

    def _wait(self, ready: Callable[[], Found]) -> Found | None:
        """Return the first true result of `ready`, polled; None when the caller has left."""
        ring, slot, row = self._batch.ring, self._batch.slot, self._row
        pause = FIRST_PAUSE_S
        while ring.waits(slot, row):
            found = ready()
            if found:
                return found
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return None


class PartSpace:
    """Looks for a slab for one part. Its reader's own unread parts may take the memory it needs; once they
    are read there is no use in waiting much longer."""

    def __init__(self, reply: RequestReply, packed: Packed) -> None:
        self._reply, self._packed = reply, packed
        self._until = 0.0

    def look(self) -> tuple[int, int] | None:
        """(offset, bytes), None for no room yet. Raises ServeError RESOURCE_EXHAUSTED once it is hopeless."""
        reply = self._reply
        offset, size = reply._batch.codec.put(*self._packed)
        if offset:
            return offset, size
        now = time.monotonic()
        if reply._batch.ring.parts_read(reply._batch.slot, reply._row) < reply._sent or not self._until:
            self._until = now + ROOM_S
        elif now > self._until:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM_FOR_PART.format(size))
        return None


def error_note(kind: Kind, text: str) -> bytes:
    """Encode an error as a note; characters that UTF-8 has not are escaped."""
    plain = text[:TEXT_MAX].encode("utf-8", "backslashreplace").decode()
    return write_note(AnswerNote(kind=kind.value, message=plain))
