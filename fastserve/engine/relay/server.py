"""The owner's side of the relay: runs the requests of one other front process on the owner's schedulers.

A request's tensors are views of the front's memory; the scheduler copies them where its worker reads them.
The response is copied into reply memory at once and its place in the arena released: a front that has
stopped, or whose clients read slowly, holds nothing that other fronts wait for. Where reply memory is full
the response waits ROOM_LIMIT_S, and then the request fails.

A request that failed or was cancelled may still be on its way into a batch, where its rows stay, unused. Its
memory is given back when no batch reads it (BorrowedInputs).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from fastserve._ext.fast_path import ACCOUNT
from fastserve.engine.batch_queue import version_gone
from fastserve.engine.engine import Engine
from fastserve.engine.relay.channel import RelayChannel, TicketKind, write_parts
from fastserve.engine.relay.messages import Packed, pack_error, pack_response, unpack_request
from fastserve.errors import Kind, ServeError, internal
from fastserve.repository.version import Version
from fastserve.request import BorrowedInputs, InferRequest, InferResponse
from fastserve.util.model_demand import Want, await_again
from fastserve.util.offload import Offload
from fastserve.util.spans import RequestSpan, enter_span
from fastserve.util.tracing import TraceContext

log = logging.getLogger(__name__)

ROOM_LOOK_S = 0.005  # the front releases reply memory without a word
ROOM_LIMIT_S = 2.0

NO_ROOM = "no room for {} bytes of outputs on their way to the front process (limits.memory_bytes)"

FindVersion = Callable[[int], "Version | None"]


class RelayServer:
    """Answers one front process. Everything runs on the event loop's thread."""

    def __init__(self, channel: RelayChannel, engine: Engine, find: FindVersion, want: Want) -> None:
        self._channel, self._engine, self._find, self._want = channel, engine, find, want
        self._running: dict[int, asyncio.Task[None]] = {}
        self._unread: set[int] = set()  # requests that have ended, and that a batch still reads
        self._offload = Offload()

    def open(self) -> None:
        """Read the front's tickets on the running loop."""
        self._channel.open(self._take)

    def close(self) -> None:
        """Cancel what runs for the front, which is gone, and drop its memory."""
        self._channel.close()
        for task in self._running.values():
            task.cancel()

    @property
    def running(self) -> int:
        """Number of requests under way, and of those whose memory may still be read."""
        return len(self._running) + len(self._unread)

    def _take(self, kind: TicketKind, number: int, offset: int, _: bool) -> None:
        if kind is TicketKind.REQUEST:
            task = self._running[number] = asyncio.ensure_future(self._run(number, offset))
            task.add_done_callback(lambda task: self._settle(number, task))
        elif number in self._running:
            self._running[number].cancel()

    async def _run(self, number: int, offset: int) -> None:
        """Run a request, and answer it whatever happens."""
        borrowed = BorrowedInputs()
        try:
            try:
                await self._respond(number, offset, borrowed)
            except ServeError as fault:
                await self._fail(number, fault, borrowed)
            except Exception:  # a client of the front would wait for ever
                log.exception("a relayed request failed")
                await self._fail(number, internal("the request failed"), borrowed)
        except asyncio.CancelledError:
            self._end(number, borrowed)
        finally:
            if not borrowed.readers:
                borrowed.drop()

    def _settle(self, number: int, task: asyncio.Task[None]) -> None:
        del self._running[number]
        if task.cancelled():  # before its first step
            self._channel.send(TicketKind.END, number)

    async def _respond(self, number: int, offset: int, borrowed: BorrowedInputs) -> None:
        key, request, trace = unpack_request(self._channel.request_view(offset), self._engine.find_account)
        ACCOUNT.set(request.account)  # also of an ensemble's steps
        request.borrowed, borrowed.tensors = borrowed, tuple(request.inputs.values())
        version = self._find(key)
        if version is None:
            raise version_gone()
        # A step of an ensemble may have been unloaded a moment ago.
        response = await await_again(self._want, lambda: self._infer(version, request, trace))
        try:
            await self._reply(number, pack_response(response, request.times), ROOM_LIMIT_S)
        finally:
            response.release()

    async def _infer(
        self, version: Version, request: InferRequest, trace: TraceContext | None
    ) -> InferResponse:
        """Run a request; what there is to tell of a traced one goes to the exporter from here, however it
        ends."""
        send = self._engine.send_span
        if trace is None or send is None:
            return await self._engine.infer(version, request)
        span = RequestSpan(trace, "", None, time.monotonic_ns())
        enter_span(span)  # this task is the request's own
        try:
            return await self._engine.infer(version, request)
        finally:
            span.end(0)
            send(span)

    async def _fail(self, number: int, error: ServeError, borrowed: BorrowedInputs) -> None:
        await self._reply(number, pack_error(error), None, still_read=borrowed.readers > 0)
        if borrowed.readers:
            self._end(number, borrowed)

    async def _reply(
        self, number: int, packed: Packed, limit_s: float | None, *, still_read: bool = False
    ) -> None:
        parts, nbytes = packed
        offset = await self._reserve(nbytes, limit_s)
        try:
            await self._offload(nbytes, write_parts, self._channel.reply_view(offset), parts, nbytes)
        except BaseException:
            self._channel.replies.release(offset)
            raise
        self._channel.send(TicketKind.ANSWER, number, offset, flag=still_read)

    async def _reserve(self, nbytes: int, limit_s: float | None) -> int:
        """Return the offset of reply memory as soon as there is some. Raises ServeError
        RESOURCE_EXHAUSTED."""
        offset = self._channel.reserve_reply(nbytes)
        until = time.monotonic() + (limit_s or 0)
        while not offset:
            late = limit_s is not None and time.monotonic() >= until
            if late or nbytes > self._channel.pool_size:
                raise ServeError(Kind.RESOURCE_EXHAUSTED, NO_ROOM.format(nbytes))
            await asyncio.sleep(ROOM_LOOK_S)
            offset = self._channel.reserve_reply(nbytes)
        return offset

    def _end(self, number: int, borrowed: BorrowedInputs) -> None:
        """Send END once no batch reads the request."""
        if borrowed.readers:
            self._unread.add(number)
            borrowed.on_unread = partial(self._send_end, number, borrowed)
        else:
            self._send_end(number, borrowed)

    def _send_end(self, number: int, borrowed: BorrowedInputs) -> None:
        borrowed.drop()
        self._unread.discard(number)
        self._channel.send(TicketKind.END, number)
