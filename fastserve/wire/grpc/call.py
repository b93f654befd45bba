"""One call on a stream of HTTP/2: its messages in, its one answer out. Nothing of frames.

    unary request    head, message, end --> begin --> Method.start, or a task of Method.run
    streamed         head --> a task of Method.run, whose request is the call's Inbox

`start` is for fast paths: no task and no future. It takes the call or leaves it without a trace, and answers
some time later with `reply` or `fail`; both do nothing once the client has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from fastserve._ext.grpc_messages import MessageFault, MessageReader, frame_message, message_prefix
from fastserve._ext.hpack import static_block
from fastserve._ext.http2_path import CallPath
from fastserve.apart import APART_BYTES
from fastserve.errors import Kind, ServeError
from fastserve.tracing import choose_request_id
from fastserve.wire.bulk import BULK_BYTES
from fastserve.wire.coding import DEFLATE, GZIP, IDENTITY, pack
from fastserve.wire.grpc.advice import advise
from fastserve.wire.grpc.coding import ACCEPTED, decode
from fastserve.wire.grpc.inbox import Inbox
from fastserve.wire.grpc.metadata import write_message, write_metadata
from fastserve.wire.grpc.method import (
    STATUS_NAMES,
    Metadata,
    check_call,
    shorten,
    tell_error,
    too_large,
)
from fastserve.wire.http2 import Piece, Stream
from fastserve.wire.http2.settings import STREAM_WINDOW
from fastserve.wire.inflate import work_of

if TYPE_CHECKING:
    from fastserve.wire.grpc.calls import Head

log = logging.getLogger(__name__)

_OPENING = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_HEADS = {
    coding: static_block(
        [*_OPENING, *([(b"grpc-encoding", coding)] if coding else []), (b"grpc-accept-encoding", ACCEPTED)]
    )
    for coding in (b"", DEFLATE, GZIP)
}
HEAD = _HEADS[b""]
OK = static_block([(b"grpc-status", b"0")])
Request = Inbox | tuple[bytes, bool]  # messages as they come, or the one, and whether it is compressed
Answer = Callable[[Request], Coroutine[Any, Any, None]]
CUT_OFF = "the connection ended within the call"
PARTED_BYTES = 65536  # from here on a message is not copied to stand behind its prefix


class Call(CallPath):
    """Rpc of HTTP/2's streams, and the exchange that `Method.start` is given.

    `on_gone` is called once if the client leaves, or its time is up, before the answer; with a coroutine it
    cancels the task."""

    patience_ns = 0  # calls of one turn of the loop come together

    head: Head
    stream: Stream
    on_gone: Callable[[], object] | None
    trailing: Metadata
    writable: asyncio.Future[None] | None

    __slots__ = ("_asked", "_inbox", "_message", "_reader", "_request_id")

    # ---- what a method may know

    @property
    def request_id(self) -> str:
        try:
            return self._request_id
        except AttributeError:
            headers = dict(reversed(self.head.headers))
            given, trace = headers.get(b"x-request-id", b""), headers.get(b"traceparent", b"")
            self._request_id: str = choose_request_id(given, trace)
            return self._request_id

    @property
    def metadata(self) -> Metadata:
        return self.head.metadata

    def seconds_left(self) -> float | None:
        return max(0.0, (self.deadline_ns - monotonic_ns()) / 1e9) if self.deadline_ns else None

    def set_trailing(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        write_metadata(metadata)  # raises here, where it was given
        self.trailing = tuple(metadata)

    def compress(self) -> None:
        if not self.begun and self.head.coding != IDENTITY:
            self.coding = self.head.coding

    # ---- what comes

    def listen(self) -> None:
        """The request comes piece by piece."""
        self._reader = MessageReader(self.head.calls.terms.most_bytes)
        self._asked = 0
        self._message: tuple[bytes, bool] | None = None
        self._inbox: Inbox | None = None
        if self.head.method.takes_stream:
            self._inbox = Inbox(self)
            self.run(self._inbox)

    def feed(self, piece: Piece) -> None:
        """Some of it."""
        if self.over:
            return
        try:
            messages = self._reader.feed(piece)
        except MessageFault as fault:
            self.stop(self._explain(fault))
            return
        self._sort(messages)

    def _took(self, nbytes: int) -> None:
        """Some of the message lies where it belongs."""
        if not self.over:
            self._sort(self._reader.placed(nbytes))

    def _sort(self, messages: list[tuple[bytes, bool]]) -> None:
        for message in messages:
            if self._inbox is not None:
                self._inbox.put(*message)
            elif self._message is not None:
                self.fail(ServeError(Kind.INTERNAL, "more than one message for a method that takes one"))
                return
            else:
                self._message = message
        if self._reader.wanted > self._asked:
            self._make_way(self._reader.wanted)

    def _make_way(self, wanted: int) -> None:
        """A large message needs a larger window: nothing is given back before it is whole."""
        self._asked = wanted
        if self._inbox is None:
            self.stream.expect(wanted)
            if wanted >= BULK_BYTES:
                self.stream.place(self._reader, self._took)
        elif wanted > STREAM_WINDOW // 2:  # up to a half of the window may not have been given back yet
            self.stream.expect(wanted + STREAM_WINDOW // 2)

    def taken(self, nbytes: int) -> None:
        """The method has taken a message of its stream; one that has begun behind it asks for room anew."""
        self.stream.done_with(nbytes)
        self._asked = 0
        if self._reader.wanted:
            self._make_way(self._reader.wanted)

    def _explain(self, fault: MessageFault) -> ServeError:
        if fault.size < 0:
            return ServeError(Kind.INTERNAL, "the flag of a message is neither 0 nor 1")
        most = self.head.calls.terms.most_bytes
        sizes = f"({fault.size} vs. {most})"  # in the words of gRPC's own library, which clients may look for
        text = f"Received message larger than max {sizes}: grpc_options.message_bytes"
        return ServeError(Kind.RESOURCE_EXHAUSTED, text)

    def end_input(self) -> None:
        """The client has sent its last byte."""
        if self.over:
            return
        if self._reader.partial:
            self.stop(ServeError(Kind.INTERNAL, "the call ended within a message"))
        elif self._inbox is not None:
            self._inbox.end()
        elif self._message is None:
            self.fail(ServeError(Kind.INTERNAL, "the call ended without its message"))
        else:
            (message, compressed), self._message = self._message, None
            self.begin(message, compressed)

    def cut_off(self) -> None:
        """The client has sent its last byte, and that does not end the call: the messages of a stream that
        have come are answered, a single one ought to have come whole."""
        if self._inbox is not None and not self._reader.partial:
            self._inbox.end()
        else:
            self.stop(ServeError(Kind.CANCELLED, CUT_OFF))

    # ---- the method

    def run(self, request: Request) -> None:
        """As a task."""
        work = self._answer_stream if self.head.method.gives_stream else self._answer_one
        task = asyncio.get_running_loop().create_task(self._conclude(work, request))
        self.on_gone = task.cancel

    async def _conclude(self, work: Answer, request: Request) -> None:
        try:
            await work(request)
        except asyncio.CancelledError:
            self.fail(ServeError(Kind.CANCELLED, "the call was cancelled"))
            raise
        except Exception as error:
            self.fail(error)
        finally:
            self.on_gone = None

    async def _answer_one(self, request: Request) -> None:
        method = self.head.method
        self._check()
        read = await self.read(*request) if isinstance(request, tuple) else request
        reply = method.write(await method.run(read, self))
        if self.coding and len(reply) >= APART_BYTES:
            reply = await self.head.calls.terms.apart(len(reply), pack, reply, self.coding)
            self._finish((reply,), compressed=True)
        else:
            self.reply(reply)

    async def _answer_stream(self, request: Request) -> None:
        method = self.head.method
        self._check()
        read = await self.read(*request) if isinstance(request, tuple) else request
        async with aclosing(method.run(read, self)) as pieces:
            async for piece in pieces:
                await self._send(method.write(piece))
        if not self.over:
            self._end(OK if not self.trailing else self._status(0, ""))
            self.settle(0)

    def _check(self) -> None:
        check_call(self.head.method, self.head.calls.terms.opening, self)

    async def read(self, message: bytes, compressed: bool) -> Any:
        """A message for the method. Raises ServeError."""
        method, terms = self.head.method, self.head.calls.terms
        if compressed:
            work = min(work_of(message, terms.limits), terms.most_bytes)
            message = await terms.apart(work, decode, message, self.head.encoding, terms.limits)
        if len(message) < APART_BYTES:
            return method.read(message)
        return await terms.apart(len(message), method.read, message)

    # ---- the answer

    def _reply_in_parts(self, message: bytes | Sequence[bytes]) -> None:
        """An answer that is not plain and small, or cannot go at once."""
        parts = (message,) if isinstance(message, bytes) else message
        if self.coding:
            parts = (pack(b"".join(parts), self.coding),)
        self._finish(parts, compressed=bool(self.coding))

    def _finish(self, parts: Sequence[bytes], *, compressed: bool) -> None:
        size = sum(map(len, parts))
        if self.over:
            return
        if size > self.head.calls.terms.most_bytes:
            self.fail(too_large(size, self.head.calls.terms.most_bytes))
            return
        self.sent_bytes = size
        trailers = OK if not self.trailing else self._status(0, "")
        if size < PARTED_BYTES:
            message = parts[0] if len(parts) == 1 else b"".join(parts)
            self.stream.reply(_HEADS[self.coding], frame_message(message, compressed), trailers)
        else:
            self._send_parts(parts, size, compressed)
            self.stream.finish(trailers)
        self.settle(0)

    def _send_parts(self, parts: Sequence[bytes], size: int, compressed: bool) -> None:
        if not self.begun:
            self.begun = True
            self.stream.send_head(_HEADS[self.coding])
        if size < PARTED_BYTES:
            self.stream.send_data(frame_message(b"".join(parts), compressed))
            return
        self.stream.send_data(message_prefix(size, compressed))
        for part in parts:
            self.stream.send_data(part)

    async def _send(self, message: bytes) -> None:
        """One of several messages; returns when the client takes more."""
        terms = self.head.calls.terms
        if self.coding:
            message = await terms.apart(len(message), pack, message, self.coding)
        if len(message) > terms.most_bytes:
            raise too_large(len(message), terms.most_bytes)
        if self.over:
            return
        self.sent_bytes += len(message)
        self._send_parts((message,), len(message), bool(self.coding))
        while self.stream.full and not self.over:
            self.writable = asyncio.get_running_loop().create_future()
            await self.writable

    def wake(self) -> None:
        """The client takes more, or nobody waits."""
        waiting, self.writable = self.writable, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the call with the status of a ServeError; what else it is, is logged, and not told."""
        if self.over:
            return
        told = tell_error(self.head.method, self, error)
        text = shorten(told.message)
        self.trailing += advise(told, text)
        self._end(self._status(told.kind.value, text))
        self.settle(told.kind.value)

    def refuse(self, fault: ServeError) -> None:
        self.fail(fault)

    def _status(self, code: int, text: str) -> bytes:
        fields = [(b"grpc-status", b"%d" % code)]
        if text:
            fields.append((b"grpc-message", write_message(text)))
        return static_block([*fields, *write_metadata(self.trailing)])

    def _end(self, trailers: bytes) -> None:
        """What comes after the last message; alone, it is head and trailers at once."""
        if self.begun:
            self.stream.finish(trailers)
        elif trailers is OK:
            self.stream.reply(HEAD, b"", trailers)
        else:
            self.stream.reply(HEAD + trailers, b"")

    def stop(self, error: ServeError) -> None:
        """End it from outside: a method that runs is told, as if the client had left."""
        stopped = self.on_gone
        self.fail(error)
        _stop(stopped)

    def expire(self) -> None:
        """The client's time is up."""
        self.stop(ServeError(Kind.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def leave(self) -> None:
        """The client is gone."""
        stopped = self.on_gone
        if not self.over:
            self.settle(Kind.CANCELLED.value)
            _stop(stopped)

    def _end_settling(self, code: int) -> None:
        """Its end is told, or somebody waits for the client."""
        tell = self.head.calls.terms.access_log
        if tell is not None:
            facts = self.sent_bytes, self.received_ns, self.request_id, self.stream.connection.client
            tell(self.head.path, STATUS_NAMES[code], *facts)
        if self.writable is not None:
            self.wake()


def _stop(on_gone: Callable[[], object] | None) -> None:
    if on_gone is not None:
        try:
            on_gone()
        except Exception:
            log.exception("on_gone failed")
