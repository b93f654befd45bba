"""The front's side of the relay: a scheduler that hands each request to the owner's scheduler.

The request is written into request memory once, the reply is printed where the owner wrote it. A request that
finds no room waits, first in first out, until its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count

from fastserve.engine.batch_queue import queued_too_long
from fastserve.engine.counters import CANCELED, REJECTED, counters_of
from fastserve.engine.engine import Engine, Scheduler
from fastserve.engine.relay.channel import RelayChannel, TicketKind, write_parts
from fastserve.engine.relay.messages import pack_request, unpack_reply
from fastserve.errors import Kind, ServeError, internal
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.util.offload import Offload

TOO_LARGE = "a request of {} bytes of tensors, allowed: up to {} (limits.memory_bytes)"

OWNER_GRACE_S = 1.0
"""The owner ends a request at its deadline; this long after it, the owner is no longer waited for."""


Relayed = tuple[InferResponse, list[int]]
"""A response, the times of its batch, and the runs of a traced request."""


@dataclass(slots=True, eq=False)
class RelayedCall:
    """A request that the owner has, and where it lies. `answer` is cancelled when the client has left."""

    offset: int
    answer: asyncio.Future[Relayed]


class RelayClient:
    """Sends the requests of one front process to the owner."""

    def __init__(self, channel: RelayChannel) -> None:
        self._channel = channel
        self._calls: dict[int, RelayedCall] = {}
        self._numbers = count(1)
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._offload = Offload()

    def open(self) -> None:
        """Read the owner's tickets on the running loop."""
        self._channel.open(self._take)

    async def infer(self, key: int, version: Version, request: InferRequest) -> InferResponse:
        """Run a request on the owner's version `key`; see `Engine.infer`."""
        parts, nbytes = pack_request(key, request)
        offset = await self._reserve(nbytes, version, request.deadline_ns)
        try:
            await self._offload(nbytes, write_parts, self._channel.request_view(offset), parts, nbytes)
        except BaseException:
            self._release(offset)
            raise
        del parts
        number = next(self._numbers)
        call = RelayedCall(offset, asyncio.get_running_loop().create_future())
        self._calls[number] = call
        self._channel.send(TicketKind.REQUEST, number, offset)
        response, times = await self._answer(number, call, request.deadline_ns)
        if request.times is not None:
            request.times.extend(times)
        return response

    async def _answer(self, number: int, call: RelayedCall, deadline_ns: int) -> Relayed:
        late = None
        if deadline_ns:
            left_s = max(deadline_ns - time.monotonic_ns(), 0) / 1e9 + OWNER_GRACE_S
            late = asyncio.get_running_loop().call_later(left_s, self._expire, number, call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if not call.answer.cancelled() and call.answer.exception() is None:
                call.answer.result()[0].release()  # it came in the very turn in which the client left
            self._leave(number)
            raise
        finally:
            if late is not None:
                late.cancel()
            del call  # else an error, this frame in its traceback, and the answer that holds it are a circle

    def _expire(self, number: int, call: RelayedCall) -> None:
        if not call.answer.done():
            call.answer.set_exception(queued_too_long())
            self._leave(number)

    def _leave(self, number: int) -> None:
        if number in self._calls:
            self._channel.send(TicketKind.CANCEL, number)

    # --- the owner's tickets

    def _take(self, kind: TicketKind, number: int, offset: int, still_read: bool) -> None:
        call = self._calls.get(number)
        if call is None:
            raise ValueError(f"a ticket for request {number}, which nobody has sent")
        if not still_read:
            del self._calls[number]
            self._release(call.offset)
        if kind is TicketKind.ANSWER:
            self._deliver(call, offset)

    def _deliver(self, call: RelayedCall, offset: int) -> None:
        release = partial(self._channel.replies.release, offset)
        if call.answer.done():
            release()
            return
        try:
            relayed = unpack_reply(self._channel.reply_view(offset))
        except BaseException as error:
            release()
            call.answer.set_exception(
                error if isinstance(error, ServeError) else internal("the owner's reply cannot be read")
            )
            return
        relayed[0].on_release = release
        call.answer.set_result(relayed)

    # --- request memory

    async def _reserve(self, nbytes: int, version: Version, deadline_ns: int) -> int:
        """Return the offset of so many bytes. Raises ServeError RESOURCE_EXHAUSTED for more than there are,
        and DeadlineError."""
        channel = self._channel
        if nbytes > channel.pool_size:
            text = TOO_LARGE.format(nbytes, channel.pool_size)
            raise ServeError(Kind.RESOURCE_EXHAUSTED, text)
        offset = 0 if self._waiting else channel.reserve_request(nbytes)
        return offset or await self._wait(nbytes, version, deadline_ns)

    async def _wait(self, nbytes: int, version: Version, deadline_ns: int) -> int:
        came: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        place, began_ns = (nbytes, came), time.monotonic_ns()
        self._waiting.append(place)
        left_s = max(deadline_ns - began_ns, 0) / 1e9 if deadline_ns else None
        try:
            await asyncio.wait([came], timeout=left_s)
        except asyncio.CancelledError:
            counters_of(version).end(CANCELED, time.monotonic_ns() - began_ns)
            self._forsake(place)
            raise
        if came.done():
            return came.result()
        self._forsake(place)
        counters_of(version).end(REJECTED, time.monotonic_ns() - began_ns)
        raise queued_too_long()

    def _forsake(self, place: tuple[int, asyncio.Future[int]]) -> None:
        if place[1].done():
            self._release(place[1].result())
        else:
            self._waiting.remove(place)
            self._serve_waiting()

    def _release(self, offset: int) -> None:
        self._channel.requests.release(offset)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            nbytes, came = self._waiting[0]
            offset = self._channel.reserve_request(nbytes)
            if not offset:
                return
            self._waiting.popleft()
            came.set_result(offset)


class RelayScheduler(Scheduler):
    """Scheduler of a version whose requests the owner orders. Every such version answers a request once."""

    def __init__(self, client: RelayClient, key: int) -> None:
        self._client, self._key = client, key
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        self._running += 1
        self._idle.clear()
        try:
            return await self._client.infer(self._key, version, request)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def drain(self) -> None:
        await self._idle.wait()
