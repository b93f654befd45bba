"""The way back of one request of a batch: in one answer, or in parts, from any thread.

    Batch   a slot this worker runs; published when execute() is over and every reply has ended
    Reply   one place of it. One answer: an output slab on the place. Parts: a slab and a message each
    Kept    an input slab that the model still looks at when its batch is done

A batch stays RUNNING while parts of its answers are still to come, so that the death of this worker ends
them and a caller who leaves is seen in the row table; meanwhile the worker takes other batches. Every
batch counts one for execute() and one for each reply that has not ended.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastserve._ext.triton_requests import OneReply, SlotRun
from fastserve.backends.triton_requests import CLOSED, KINDS, InferenceResponse
from fastserve.backends.triton_tensor import TritonModelException
from fastserve.codec.notes import AnswerNote, write_note
from fastserve.errors import Kind, ServeError
from fastserve.workers.request_desk import Desk, Packed

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

log = logging.getLogger(__name__)

# Parts a reader may be behind before its model waits.
WINDOW_PARTS = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01
TEXT_MAX = 4000
# How long a part waits for memory while its reader has nothing left to read.
ROOM_S = 30.0
SILENT = "the model gave no response to this request"
UNENDED = "the model let go of this request without a final response: its answer may not be whole"
NO_ROOM = "a response of {} bytes found no room (max_queue_bytes)"
TWICE = "Unable to send response. Non-decoupled model cannot send more than one response."

Found = TypeVar("Found")


class Kept:
    """An input slab held for arrays that outlive their batch; returned with the last of them."""

    def __init__(self, ring: BatchRing, offset: int, arrays: Sequence[Any], home: set[Kept]) -> None:
        self._ring, self._offset, self._home = ring, offset, home
        self._refs = [weakref.ref(array, self._gone) for array in arrays]
        self._left = len(self._refs)
        home.add(self)

    def _gone(self, _: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._ring.return_lease(self._offset)
            self._home.discard(self)


class Batch(SlotRun):
    """A slot that runs here."""

    def __init__(self, ring: BatchRing, desk: Desk, slot: int, places: int, kept: set[Kept]) -> None:
        super().__init__(ring, desk, slot, places)
        self._kept = kept

    def _keep(self, row: int, arrays: list[Any]) -> None:
        offset = self.ring.keep_inputs(self.slot, row)
        if offset:
            Kept(self.ring, offset, arrays, self._kept)


class Reply(OneReply):
    """See triton_requests.Reply. `wanted` are the outputs that go back."""

    __slots__ = ()

    def fail(self, kind: Kind, text: str) -> None:
        """An error instead of whatever is still to come."""
        if not self.hold():
            return
        packed: Packed = [], error_note(kind, text)
        try:
            if self.decoupled:
                self._post(packed, final=True)
            elif not self._sent:
                self._place(kind.value, packed)
        finally:
            self.end()
            self.let_go()

    @property
    def open(self) -> bool:
        """Whether this request has had no answer yet."""
        return not self.ended and not self._sent

    def cancelled(self) -> bool:
        """Whether nobody waits for this request any more."""
        return not self.ended and not self._batch.ring.waits(self._batch.slot, self._row)

    def _abandon(self) -> None:
        """The model has let go of it."""
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
        self._place(Kind.INTERNAL.value, ([], error_note(Kind.INTERNAL, SILENT)))

    def _twice(self) -> None:
        raise TritonModelException(TWICE)

    def _closed(self) -> None:
        raise TritonModelException(CLOSED)

    # --- one answer ---

    def _packed(self, response: InferenceResponse) -> tuple[int, Packed]:
        error = response._error
        if error is None:
            return 0, self._batch.desk.pack(response, self.wanted)
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
            found = self._wait(Room(self, packed).look)
            if found is None:
                return  # the caller left while there was no room
            offset, size = found
        if self._wait(lambda: ring.send_part(slot, row, offset, size, final)):
            self._sent += 1
        elif offset:
            ring.return_lease(offset)

    def _wait(self, ready: Callable[[], Found]) -> Found | None:
        """What `ready` says once that is something; None when the caller has left."""
        ring, slot, row = self._batch.ring, self._batch.slot, self._row
        pause = FIRST_PAUSE_S
        while ring.waits(slot, row):
            found = ready()
            if found:
                return found
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return None


class Room:
    """Looks for a slab for one part. Its reader's own unread parts may take the memory it needs; once they
    are read there is no use in waiting much longer."""

    def __init__(self, reply: Reply, packed: Packed) -> None:
        self._reply, self._packed = reply, packed
        self._until = 0.0

    def look(self) -> tuple[int, int] | None:
        """(offset, bytes), None for no room yet. Raises ServeError RESOURCE_EXHAUSTED once it is hopeless."""
        reply = self._reply
        offset, size = reply._batch.desk.put(*self._packed)
        if offset:
            return offset, size
        now = time.monotonic()
        if reply._batch.ring.parts_read(reply._batch.slot, reply._row) < reply._sent or not self._until:
            self._until = now + ROOM_S
        elif now > self._until:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM.format(size))
        return None


def error_note(kind: Kind, text: str) -> bytes:
    """An error as it travels: a model's text may hold what UTF-8 cannot."""
    plain = text[:TEXT_MAX].encode("utf-8", "backslashreplace").decode()
    return write_note(AnswerNote(kind=kind.value, message=plain))
