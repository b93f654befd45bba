"""The fast path of Infer and StreamInfer: raw_input entries, copied once, straight into the batch.

    message --its header is known--> memory reserved for its inputs ... worker ... --outputs--> response

The same as hot.py for HTTP, and the same headers are known. `start` returns None, having left no trace, for
what needs another look; the general path finds the right words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from fastserve._ext.proto_wire_v1 import V1InferMessage
from fastserve.dialects.triton_v1.answers import Answer
from fastserve.dialects.triton_v1.header import RequestHeader
from fastserve.dialects.triton_v1.hot import NO_ROOMS, Held, hold_rooms, is_there, write_note
from fastserve.dialects.triton_v1.known import Known
from fastserve.dialects.triton_v1.lookup import LATEST
from fastserve.dialects.triton_v1.service import Served, Service, as_v1
from fastserve.engine import BatchQueue, Pending, fast_queue_of
from fastserve.errors import ServeError

Write = Callable[[Answer], bytes]


class HotRpc:
    """The fast path of all versions, for messages. `write` makes the response; it may raise ServeError."""

    def __init__(self, service: Service, write: Write) -> None:
        self._service = service
        self._write = write

    def start(self, message: V1InferMessage, header: RequestHeader) -> Running | None:
        """Take the request, or return None: nothing has happened then."""
        number = message.model_version
        version = self._service.catalog.available(message.model_name, None if number == LATEST else number)
        queue = None if version is None else fast_queue_of(version)
        if version is None or queue is None:
            return None
        served = self._service.serve(version)
        known = served.know(queue, header)
        if known is None or not _has_entries(message, known.entries) or not is_there(self._service, known):
            return None
        running = Running(self._service, served, queue, known, header.id, self._write)
        return running if running.begin(message, write_note(queue, header)) else None


def _has_entries(message: V1InferMessage, entries: tuple[int, ...]) -> bool:
    """Whether the first raw_input entries have these sizes; others are nobody's."""
    if message.raw_count < len(entries):
        return False
    return all(message.raw(index)[1] == nbytes for index, nbytes in enumerate(entries))


class Running:
    """One request under way."""

    __slots__ = (
        "_held",
        "_known",
        "_number",
        "_pending",
        "_queue",
        "_response",
        "_served",
        "_service",
        "_since_ns",
        "_write",
    )  # fmt: skip

    def __init__(
        self, service: Service, served: Served, queue: BatchQueue, known: Known, number: int, write: Write
    ) -> None:
        self._service = service
        self._served = served
        self._queue = queue
        self._known = known
        self._number = number
        self._write = write
        self._since_ns = monotonic_ns()
        self._held: Held | None = None
        self._response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def begin(self, message: V1InferMessage, note: bytes) -> bool:
        """Copy the inputs into the batch; False when there is no room for them, or a region is not there."""
        known = self._known
        rows = known.header.batch_size
        reserved = known.layout_in.reserve(rows, note) if note else known.layout_in.reserve(rows)
        if reserved is None:
            return False
        place, memory, (offset, _) = reserved
        try:
            for target, source in zip(memory, known.sources, strict=True):
                if source.place is None:
                    message.copy_raw(source.entry, target)
                else:
                    self._service.shared.read_into(source.place, target)
            self._held = hold_rooms(self._service, known)
        except BaseException as error:
            known.layout_in.abandon(reserved, rows)
            if isinstance(error, ServeError):
                return False  # the general path says what is wrong
            raise
        if offset:
            known.layout_in.settle(reserved)
        self._pending = self._queue.submit(place, rows, self._answer, 0)
        return True

    async def wait(self) -> bytes:
        """The response; once. Raises ServeError, in this API's words."""
        try:
            return await self._response
        except asyncio.CancelledError:
            self._pending()
            raise
        except ServeError as fault:
            self._service.count_failure(self._served, self._known.header.batch_size, self._since_ns, fault)
            raise as_v1(fault) from None
        finally:
            del self._response  # with it the circle of an error, this frame and the future
            if self._held is not None:
                self._held[1].close()

    def _answer(self, pending: Pending, error: ServeError | None) -> None:
        response = self._response
        if error is not None:
            if not response.done():
                response.set_exception(error)
            return
        try:
            if response.done():  # cancelled in the very turn the answer came
                return
            rooms = NO_ROOMS if self._held is None else self._held[0]
            known, answers = self._known, self._served.answers
            response.set_result(self._write(known.read(answers, self._queue, pending, self._number, rooms)))
        except ServeError as fault:
            response.set_exception(fault)
            return
        finally:
            del response  # it may hold a fault, whose traceback holds this frame
            self._queue.release(pending)
        self._service.count_success(self._served, self._known.header.batch_size, self._since_ns)
