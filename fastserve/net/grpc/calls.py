"""gRPC calls on HTTP/2 streams: from a head to its method, messages in, one answer out. Nothing of frames.

    bytes --few at a time--> messages --the method's `read`--> the method, while the loop's turn lasts

Messages that a method has not taken fill the client's window.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from time import monotonic_ns
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from fastserve._ext.fast_path import ACCOUNT
from fastserve._ext.grpc_messages import (
    PREFIX_BYTES,
    MessageFault,
    MessageReader,
    frame_message,
    message_prefix,
)
from fastserve._ext.hpack import static_block
from fastserve._ext.http2_path import CallPath, CallsPath, HeadPath
from fastserve.errors import Kind, Reason, ServeError, detach, malformed_call
from fastserve.net.access_control import Scope
from fastserve.net.api_keys import ApiKey, ApiKeyGate, Compartment
from fastserve.net.compression import DEFLATE, GZIP, IDENTITY, inflate_offloaded, pack
from fastserve.net.deadlines import GRACE_NS, UNBOUNDED, CallDeadlines, bound_timeout, read_timeout_headers
from fastserve.net.fair_queue import TimeShare
from fastserve.net.grpc.metadata import (
    ACCEPTED,
    advise,
    choose_encoding,
    decode_message,
    read_metadata,
    read_timeout,
    write_message,
    write_metadata,
)
from fastserve.net.grpc.method import (
    STATUS_NAMES,
    Metadata,
    Method,
    RpcTerms,
    check_call,
    shorten,
    tell_error,
    too_large,
)
from fastserve.net.http1.large_bodies import BULK_BYTES, ArrivedBody, offer
from fastserve.net.http2.stream import STREAM_WINDOW, Http2Stream, Piece, StreamState
from fastserve.net.key_usage import KeyShare, KeyUsage
from fastserve.net.limits import Verdict, WireFault, slowness
from fastserve.net.request import RequestHead as HttpHead
from fastserve.net.traffic_split import TrafficSplit
from fastserve.util.memory_budget import ALLOWANCE_BYTES, REASON, WORKING_SHARE, Claim
from fastserve.util.offload import OFFLOAD_BYTES
from fastserve.util.tracing import TraceContext, choose_request_id

LATE = "Deadline Exceeded"  # as gRPC's own servers say it
MOST_READ = 64
"""Messages that are objects before the method takes them."""
Held = tuple[int, Claim]  # bytes that came, and what reading them has taken


class Inbox:
    """Iterate over the messages of a streamed request, as the method's `read` returns them.

    A message may have no bytes but its prefix, so a window is up to 200,000 messages. Bytes are kept as
    bytes until the method is about to take a message. A message counts against the memory budget until
    the next one is asked for; a method with many messages under way keeps it longer: `held =
    inbox.take_over()`, and after the answer `inbox.give_back(held)`."""

    __slots__ = ("_call", "_claims", "_end", "_last", "_messages", "_reader", "_rest", "_share", "_waiting")

    def __init__(self, call: GrpcCall, reader: MessageReader) -> None:
        self._call, self._reader = call, reader
        self._share = call.head.calls.share
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._rest = bytearray()  # what comes after them
        self._end: ServeError | None = None  # of a message that is not whole when no more will come
        self._waiting: asyncio.Future[None] | None = None
        self._last: Held | None = None  # of the message that was taken last
        self._claims: set[Claim] = set()

    def add(self, piece: Piece) -> None:
        """Append bytes of the request."""
        used = 0 if self._rest else self._read(piece)
        if used < len(piece):
            self._rest += memoryview(piece)[used:]
        self._wake()

    def _read(self, data: Piece | bytearray) -> int:
        """Parse the next messages of `data`; return how many bytes they are."""
        try:
            self._messages += self._reader.feed(data, MOST_READ - len(self._messages))
        except MessageFault as fault:
            self._call.stop(self._call.explain(fault))
            return len(data)
        self._call.enlarge_window()
        return self._reader.used

    def end(self, within: ServeError) -> None:
        """End the request; `within` is the error where that is in the middle of a message."""
        self._end = within
        if not self._rest and self._reader.partial:
            self._call.stop(within)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def __aiter__(self) -> Inbox:
        return self

    def take_over(self) -> Held | None:
        """Return the memory of the last message, which the caller gives back."""
        held, self._last = self._last, None
        return held

    def give_back(self, held: Held) -> None:
        """Give back the memory of a message that was taken over."""
        nbytes, claim = held
        self._call.stream.connection.release_bytes(self._call.stream, nbytes)
        claim.release()
        self._claims.discard(claim)

    def close(self) -> None:
        """Release all claims: the method has ended."""
        for claim in self._claims:
            claim.release()
        self._claims.clear()

    async def __anext__(self) -> Any:
        if self._last is not None:
            self.give_back(self._last)
            self._last = None
        if self._share.spent():
            await self._share.turn()
        while not self._messages:
            if self._rest:
                del self._rest[: self._read(self._rest)]
            elif self._end is None:
                await self._more()
            elif not self._reader.partial:
                raise StopAsyncIteration
            else:
                self._call.stop(self._end)
                await self._more()  # the call is over, and this is cancelled
        message, compressed = self._messages.popleft()
        nbytes = PREFIX_BYTES + len(message)
        claim = Claim(self._call.stream.connection.listener.budget)
        if compressed or nbytes > ALLOWANCE_BYTES:
            self._claims.add(claim)
        self._last = nbytes, claim
        self._call.taken(nbytes)
        return await self._call.read(message, compressed, claim)

    async def _more(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting


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
WITHIN = "the call ended within a message"
REQUEST_ID = "x-request-id"
PARTED_BYTES = 65536  # from here on a message is not copied to stand behind its prefix


class GrpcCall(CallPath):
    """One call on an HTTP/2 stream: an Rpc for its method, and the exchange that `Method.start` gets.

        unary request    head, message, end --> begin --> Method.start, or a task of Method.run
        streamed         head --> a task of Method.run, whose request is the call's Inbox

    `start` serves fast paths without a task or a future: it takes the call, or returns False and leaves
    no trace. `on_gone` is called once if the client leaves, or its deadline passes, before the answer; of
    a coroutine it cancels the task."""

    head: CallHead
    stream: Http2Stream
    on_gone: Callable[[], object] | None
    trailing: Metadata
    writable: asyncio.Future[None] | None

    __slots__ = ("_asked", "_claim", "_inbox", "_message", "_reader", "_request_id", "_share")

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
    def parent(self) -> TraceContext | None:
        """Return the client's span by its traceparent; None without one."""
        http = self.head.http
        return None if http is None else http.read_parent()

    def follow_trace(self, trace_id: str) -> None:
        """Name a traced call by its trace, unless the client has named it."""
        if self.head.http is None or not self.head.http.identified:
            self._request_id = trace_id

    @property
    def address(self) -> str:
        """Return the client's address: HOST:PORT, "unix" of a socket file."""
        return self.stream.connection.address

    @property
    def claim(self) -> Claim:
        """Memory for work on this call, beside its messages; released when the method has ended."""
        try:
            return self._claim
        except AttributeError:
            self._claim: Claim = Claim(self.stream.connection.listener.budget)
            return self._claim

    @property
    def metadata(self) -> Metadata:
        return self.head.metadata

    def seconds_left(self) -> float | None:
        left_ns = self.deadline_ns - GRACE_NS - monotonic_ns()
        return max(0.0, left_ns / 1e9) if self.deadline_ns else None

    def set_trailing(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        write_metadata(metadata)  # raises here, where it was given
        named = tuple(pair for pair in self.trailing if pair[0] == REQUEST_ID)
        self.trailing = (*named, *metadata)

    def name_request(self) -> None:
        """Send the call's id to the client as a trailer."""
        if all(name != REQUEST_ID for name, _ in self.trailing):
            self.trailing = ((REQUEST_ID, self.request_id), *self.trailing)

    def compress(self) -> None:
        if not self.begun and self.head.coding != IDENTITY:
            self.coding = self.head.coding

    # ---- what comes

    def listen(self) -> None:
        """Prepare for a request that comes in pieces."""
        self._reader = MessageReader(self.head.most_bytes)
        self._asked = 0
        self._message: tuple[bytes, bool] | None = None
        self._inbox: Inbox | None = None
        if self.head.method.takes_stream:
            self._inbox = Inbox(self, self._reader)
            self.run(self._inbox)

    def feed(self, piece: Piece) -> None:
        """Take a piece of the request."""
        if self.over:
            return
        if self._inbox is not None:
            self._inbox.add(piece)
            return
        try:
            messages = self._reader.feed(piece, 2)
        except MessageFault as fault:
            self.stop(self.explain(fault))
            return
        self._sort(messages)

    def _took(self, nbytes: int) -> None:
        """Count bytes of the message that were read into their place."""
        if not self.over:
            self._sort(self._reader.placed(nbytes))

    def _sort(self, messages: list[tuple[bytes, bool]]) -> None:
        for message in messages:
            if self._message is not None:
                self.fail(malformed_call("more than one message for a method that takes one"))
                return
            self._message = message
        self.enlarge_window()

    def enlarge_window(self) -> None:
        """Enlarge the stream's window for a large message: nothing is given back before the message is
        whole."""
        wanted = self._reader.wanted
        if wanted <= self._asked:
            return
        self._asked = wanted
        if self._inbox is None:
            self.stream.expect(wanted)
            if wanted >= BULK_BYTES:
                self.stream.place(self._reader, self._took)
                if self.head.take is not None:
                    self.stream.offer_rest(self)
        elif wanted > STREAM_WINDOW // 2:  # up to a half of the window may not have been given back yet
            self.stream.expect(wanted + STREAM_WINDOW // 2)

    # ---- fastserve.net.http2.stream.BodyTaker

    def missing(self) -> int:
        """Return how many bytes of the message are to come; 0 when the method may not take it."""
        idle = self.over or self._message is not None or not self.head.calls.opening.done
        return 0 if idle else self._reader.missing

    def received(self) -> bytes:
        """Return the bytes of the message that are here."""
        return self._reader.begun()

    def take_arrived(self, body: ArrivedBody) -> bool:
        """Offer the method a message whose rest waits in the socket; return whether the method took it."""
        assert self.head.take is not None
        taken = offer(self.head.take, self, body)
        if taken:
            del self._reader  # and with it room for the message
        return taken

    def taken(self, nbytes: int) -> None:
        """Give back the window of a message that the method has taken; a message behind it asks anew."""
        self.stream.done_with(nbytes)
        self._asked = 0
        self.enlarge_window()

    def explain(self, fault: MessageFault) -> ServeError:
        if fault.size < 0:
            return malformed_call("the flag of a message is neither 0 nor 1")
        most, terms = self.head.most_bytes, self.head.calls.terms
        sizes = f"({fault.size} vs. {most})"  # in the words of gRPC's own library, which clients may look for
        limit = "grpc_options.message_bytes" if most == terms.most_bytes else f"of {self.head.path}"
        text = f"Received message larger than max {sizes}: {limit}"
        return ServeError(Kind.RESOURCE_EXHAUSTED, text)

    def end_input(self) -> None:
        """Handle the end of the request."""
        if self.over:
            return
        if self._inbox is not None:
            self._inbox.end(malformed_call(WITHIN))
        elif self._reader.partial:
            self.stop(malformed_call(WITHIN))
        elif self._message is None:
            self.fail(malformed_call("the call ended without its message"))
        else:
            (message, compressed), self._message = self._message, None
            self.begin(message, compressed)

    def no_room(self, fault: ServeError) -> None:
        """End the call: there is no memory for the rest of its request."""
        if not self.over:
            self.stream.connection.listener.count_refusal(REASON)
            self.stop(fault)

    def cut_off(self) -> None:
        """Handle a FIN within the request: messages of a stream that have come are answered; a single
        message had to come whole."""
        if self._inbox is not None:
            self._inbox.end(ServeError(Kind.CANCELLED, CUT_OFF))
        else:
            self.stop(ServeError(Kind.CANCELLED, CUT_OFF))

    # ---- the method

    def run(self, request: Request) -> None:
        """Run the method as a task."""
        work = self._answer_stream if self.head.method.gives_stream else self._answer_one
        task = asyncio.get_running_loop().create_task(self._conclude(work, request))
        self.on_gone = task.cancel

    async def _conclude(self, work: Answer, request: Request) -> None:
        calls, method = self.head.calls, self.head.method
        if self.head.usage is not None:
            ACCOUNT.set(self.head.usage)
        if calls.gate is not None and (method.takes_stream or method.gives_stream):
            calls.streaming[self] = self.head.models
        try:
            try:
                await work(request)
            except asyncio.CancelledError:
                self.fail(ServeError(Kind.CANCELLED, "the call was cancelled"))
                raise
            except Exception as error:
                self.fail(error)
        except Exception as error:  # not even the failure could be sent
            self.stream.connection.callback_failed(error)
        finally:
            self.on_gone = None
            calls.streaming.pop(self, None)
            claim = getattr(self, "_claim", None)
            if claim is not None:
                claim.release()
            if isinstance(request, Inbox):
                request.close()

    async def _answer_one(self, request: Request) -> None:
        method = self.head.method
        self._check()
        read = await self.read(*request, self.claim) if isinstance(request, tuple) else request
        reply = method.write(await method.run(read, self))
        if self.coding and len(reply) >= OFFLOAD_BYTES:
            reply = await self.head.calls.terms.offload(len(reply), pack, reply, self.coding)
            self._finish((reply,), compressed=True)
        else:
            self.reply(reply)

    async def _answer_stream(self, request: Request) -> None:
        method = self.head.method
        self._check()
        read = await self.read(*request, self.claim) if isinstance(request, tuple) else request
        async with aclosing(method.run(read, self)) as pieces:
            async for piece in pieces:
                await self._send(method.write(piece))
        if not self.over:
            self._end(OK if not self.trailing else self._status(0, ""))
            self.settle(0)

    def _check(self) -> None:
        check_call(self.head.method, self.head.calls.terms.opening, self)

    async def read(self, message: bytes, compressed: bool, claim: Claim) -> Any:
        """Return a message as the method's `read` gives it; `claim` gets the memory of reading it. Raises
        ServeError."""
        method, terms = self.head.method, self.head.calls.terms
        if compressed:
            most = self.head.most_bytes
            limits = terms.limits
            if most < limits.inflated_bytes:
                limits = msgspec.structs.replace(limits, inflated_bytes=most)
            inflated = decode_message, message, self.head.encoding, limits
            message = await inflate_offloaded(claim, terms.offload, len(message), limits, *inflated)
        elif len(message) > ALLOWANCE_BYTES:
            await claim.reserve(WORKING_SHARE * len(message))
        if len(message) < OFFLOAD_BYTES:
            return method.read(message)
        return await terms.offload(len(message), method.read, message)

    # ---- the answer

    def _reply_in_parts(self, message: bytes | Sequence[bytes]) -> None:
        """Send an answer that is large, compressed or has trailers, or cannot go at once."""
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
        """Send one of several messages; return when the client takes more."""
        terms = self.head.calls.terms
        if self.coding:
            message = await terms.offload(len(message), pack, message, self.coding)
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
        """Wake the method that waits for the client to take more."""
        waiting, self.writable = self.writable, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the call with the status of a ServeError. Any other error is logged, and the client gets
        INTERNAL. Once the deadline has passed, the status is its: on a late loop the engine notices it before
        `expire`."""
        if self.over:
            return
        told = tell_error(self.head.method, self, error)
        if self.deadline_ns and monotonic_ns() >= self.deadline_ns:
            told = ServeError(Kind.DEADLINE_EXCEEDED, LATE)
        text = shorten(told.message)
        self.trailing += advise(told, text)
        self.name_request()
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
        """Send the trailers; without a message before them they are head and trailers at once."""
        if self.begun:
            self.stream.finish(trailers)
        elif trailers is OK:
            self.stream.reply(HEAD, b"", trailers)
        else:
            self.stream.reply(HEAD + trailers, b"")

    def stop(self, error: ServeError) -> None:
        """End the call from outside, and cancel its method as if the client had left."""
        stopped = self.on_gone
        self.fail(error)
        _stop(stopped)

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        self.stop(ServeError(Kind.DEADLINE_EXCEEDED, LATE))

    def leave(self) -> None:
        """Handle a client that has gone."""
        stopped = self.on_gone
        if not self.over:
            self.settle(Kind.CANCELLED.value)
            _stop(stopped)

    def hold_share(self, share: KeyShare) -> None:
        """Count as under way until the call has ended."""
        self._share: KeyShare = share
        self.head.shared, self.head.count = True, None

    def _end_settling(self, code: int) -> None:
        """Write the access log, give back what the call has of its key's limits, and wake a method that waits
        for the client."""
        count = self.head.count
        if count is None or code:
            self._tell_end(code)
        else:
            count()
        if self.writable is not None:
            self.wake()

    def _tell_end(self, code: int) -> None:
        head, gate = self.head, self.head.calls.gate
        if gate is not None:
            gate.count_rpc(head.usage, code)
            share: KeyShare | None = getattr(self, "_share", None)
            if share is not None:
                del self._share
                share.running.add(-1)
            if head.scope is Scope.ADMIN and gate.audit is not None:
                gate.audit("" if head.usage is None else head.usage.name, head.path, STATUS_NAMES[code])
        tell = head.calls.terms.access_log
        if tell is not None:
            facts = self.sent_bytes, self.received_ns, self.request_id
            peer = self.stream.connection
            tell(self.head.path, STATUS_NAMES[code], *facts, peer.client, peer.address)


def _stop(on_gone: Callable[[], object] | None) -> None:
    if on_gone is not None:
        try:
            on_gone()
        except Exception:
            log.exception("on_gone failed")


# Refusals of a limit, by the status they would have over plain HTTP.
_KINDS = {413: Kind.RESOURCE_EXHAUSTED, 414: Kind.RESOURCE_EXHAUSTED, 431: Kind.RESOURCE_EXHAUSTED}
ENCODINGS = frozenset(one.strip() for one in ACCEPTED.split(b","))


MethodsOf = Callable[[Compartment], Sequence[Method]]
SplitMethods = Callable[[TrafficSplit, Compartment | None], Sequence[Method]]
OTHER_MODELS = "the models of this API key have changed"


class GrpcCalls(CallsPath):
    """Find the methods of all calls on a listener: gRPC as a service of HTTP/2's streams.

    While `split` is active, calls that infer have the methods of `split_methods`, which draw."""

    __slots__ = (
        "_changes", "_methods", "_methods_of", "_narrowed", "_split_methods", "_splitting", "gate", "share",
        "split", "streaming", "terms",
    )  # fmt: skip

    def __init__(
        self,
        methods: Mapping[str, Method],
        terms: RpcTerms,
        most_at_once: int,
        gate: ApiKeyGate | None = None,
        methods_of: MethodsOf | None = None,
        split: TrafficSplit | None = None,
        split_methods: SplitMethods | None = None,
    ) -> None:
        super().__init__((HEAD, OK, StreamState.CLOSED, GrpcCall))
        self.terms, self._methods, self._methods_of = terms, methods, methods_of
        self._narrowed: WeakKeyDictionary[Compartment, Mapping[str, Method]] = WeakKeyDictionary()
        # Calls of several messages, with the models of their keys; empty where API keys are off.
        self.streaming: dict[GrpcCall, tuple[str, ...]] = {}
        self.deadlines, self.opening = CallDeadlines(), terms.opening
        self.share = TimeShare()
        self.most_bytes = terms.most_bytes
        self.logged = terms.access_log is not None or gate is not None
        self.plain_bytes = min(PARTED_BYTES - 1, terms.most_bytes)
        self.most_at_once = most_at_once
        self.split, self._split_methods = split, split_methods
        self._splitting: WeakKeyDictionary[TrafficSplit, Mapping[str, Method]] = WeakKeyDictionary()
        self._changes = 0  # of what is split: with the gate's epoch they are this one's
        self.epoch, self.gate = 0, gate
        if gate is not None:
            gate.follow(self)
        if split is not None:
            split.on_change.append(self._split_changed)

    def _split_changed(self) -> None:
        """Look for every head's method again."""
        self._changes += 1
        self.epoch += 1

    def begin_epoch(self, epoch: int) -> None:
        """Look at every head's key again, and end the streams whose key holds no more."""
        self.epoch = epoch + self._changes
        for call, models in list(self.streaming.items()):
            call.head.admit()
            if call.head.key_fault is not None:
                call.stop(call.head.key_fault)
            elif call.head.models != models:
                call.stop(ServeError(Kind.PERMISSION_DENIED, OTHER_MODELS, reason=Reason.API_KEY))

    def find_method(self, path: str, key: ApiKey | None) -> Method | None:
        """Return the method that a key leads to; None where there is none of that path. Raises ServeError."""
        whole = self._methods.get(path)
        compartment = None if self.gate is None else self.gate.compartment_of(key)
        if whole is None:
            return None
        split = self.split if compartment is None else compartment.split
        if split is not None and split.active and whole.scope is Scope.INFER:
            return self._find_splitting(split, compartment).get(path, whole)
        if compartment is None:
            return whole
        assert self._methods_of is not None
        found = self._narrowed.get(compartment)
        if found is None:
            methods = self._methods_of(compartment)
            found = self._narrowed[compartment] = {method.path: method for method in methods}
        return found.get(path, whole)  # health and reflection are the server's

    def _find_splitting(self, split: TrafficSplit, compartment: Compartment | None) -> Mapping[str, Method]:
        found = self._splitting.get(split)
        if found is None:
            assert self._split_methods is not None
            methods = self._split_methods(split, compartment)
            found = self._splitting[split] = {method.path: method for method in methods}
        return found

    def close(self) -> None:
        """Forget the deadlines of calls, and the keys: the listener is closed."""
        self.deadlines.close()
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.leave(self)
        split, self.split = self.split, None
        if split is not None:
            split.on_change.remove(self._split_changed)

    def find(self, head: HttpHead) -> CallHead | None:
        """Return the head of a gRPC request, known by its content type; None for other requests."""
        if head.method != "POST" or not is_grpc(head.find(b"content-type") or b""):
            return None
        found = CallHead(self, head, self._methods.get(head.target))
        found.http = head
        found.admit()
        return found

    def refuse(self, fields: Sequence[tuple[bytes, bytes]], fault: WireFault) -> CallHead | None:
        """Return a head that fails with the fault, for clients of gRPC."""
        if not any(name == b"content-type" and is_grpc(value) for name, value in fields):
            return None
        head = HttpHead(b"")
        head.target = next((value.decode("latin-1") for name, value in fields if name == b":path"), "")
        refused = CallHead(self, head, None)
        kind = _KINDS.get(fault.status)
        refused.fault = malformed_call(str(fault)) if kind is None else ServeError(kind, str(fault))
        return refused

    def begin(self, call: GrpcCall) -> bool:
        """Begin a call; return False where it may not run and is answered."""
        self.running += 1
        head = call.head
        if call.deadline_ns:
            self.deadlines.add(call, call.deadline_ns)
            call.deadline_ns += GRACE_NS  # from here on it is the engine's
        if head.names:
            call.name_request()
        if head.epoch != self.epoch:
            head.admit()
        fault = head.key_fault or head.fault or self._take(call)
        if fault is not None:
            call.fail(fault)
        elif self.most_at_once and self.running > self.most_at_once:
            most = f"over the limit of {self.most_at_once} (setting grpc_options.concurrent_calls)"
            call.fail(ServeError(Kind.RESOURCE_EXHAUSTED, f"Calls at the same time {most}"))
        return not call.over

    def _take(self, call: GrpcCall) -> ServeError | None:
        """Take room for a call under the limits of its key; return the fault where there is none."""
        usage = call.head.usage
        if usage is None or not usage.limited:
            return None
        try:
            share = usage.take()
        except ServeError as fault:
            return fault
        if usage.counts_running:
            call.hold_share(share)
        return None


def is_grpc(content_type: bytes) -> bool:
    """Return whether a content type is gRPC's, with any name for its messages. gRPC-Web is another
    protocol."""
    return content_type.startswith(b"application/grpc") and content_type[16:17] in (b"", b"+", b";")


async def _unreachable(request: Any, rpc: Any) -> Any:
    raise AssertionError("a method that is not there does not run")


class CallHead(HeadPath):
    """Hold the headers of a call, and serve its streams. Calls with equal headers share one head."""

    __slots__ = (
        "_metadata", "coding", "encoding", "fault", "headers", "http", "key_fault", "method",
        "models", "most_bytes", "names", "path", "scope", "shared", "take",
    )  # fmt: skip

    def __init__(self, calls: GrpcCalls, head: HttpHead, method: Method | None) -> None:
        self.calls = calls
        self.path = head.target
        self.headers = head.headers
        self._use(method or Method(head.target, bytes, _unreachable, bytes, scope=Scope.INFER))
        self.most_bytes = self.method.limit(calls.terms.most_bytes)
        # Without words, as servers on gRPC's C++ library say it.
        self.fault = None if method is not None else ServeError(Kind.UNIMPLEMENTED, "")
        self.timeout_ns = UNBOUNDED
        self.encoding = head.find(b"grpc-encoding") or IDENTITY
        self.coding = choose_encoding(head.find(b"grpc-accept-encoding") or b"")
        self._metadata: Metadata | None = None
        self.takes_stream = self.method.takes_stream
        try:
            self._read(head)
        except ServeError as fault:
            self.fault = self.fault or detach(fault)  # heads are kept for all connections
        self.names = head.identified or calls.terms.access_log is not None  # calls tell their id
        self.scope = None if method is None else method.scope
        self.http: HttpHead | None = None  # with the key; None where there is nothing to be let in to
        self.key_fault: ServeError | None = None
        self.models: tuple[str, ...] = ()  # of its key
        self.usage: KeyUsage | None = None  # of its key
        self.shared = False  # calls of it have held places, which they may still give back
        self.epoch = 0
        self.ordinary = self.fault is None and self.timeout_ns < 0 and not self.names

    def _use(self, method: Method) -> None:
        self.method = method
        admin = method.scope is Scope.ADMIN  # whose callers are looked at
        below = method.start_below is not None and any(name == b"traceparent" for name, _ in self.headers)
        start = method.start_below if below else method.start
        self.start = None if admin else start  # the short way, once the server has opened
        self.take = None if admin else method.take

    def admit(self) -> None:
        """Look whether the API key allows such calls in this epoch, and which method they have."""
        gate = self.calls.gate
        if gate is not None and self.http is not None:
            self.key_fault = None
            try:
                key = gate.admit(self.http, self.scope)
                method = self.calls.find_method(self.path, key)
            except ServeError as fault:
                self.key_fault, key = detach(fault), gate.identify(self.http)
                self.usage = None if key is None else key.usage
            else:
                self.models, self.usage = ((), None) if key is None else (key.models, key.usage)
                if method is not None:
                    self._use(method)
        elif self.calls.split is not None and self.http is not None:
            method = self.calls.find_method(self.path, None)
            if method is not None:
                self._use(method)
        self.epoch = self.calls.epoch
        usage = self.usage
        if self.shared or usage is None or usage.counts_running or self.scope is Scope.ADMIN:
            self.count = None
        elif self.calls.terms.access_log is None:
            self.count = usage.requests.add
        fine = self.fault is None and self.key_fault is None and not (usage and usage.limited)
        self.ordinary = fine and self.timeout_ns < 0 and not self.names

    def _read(self, head: HttpHead) -> None:
        timeout, timeout_ns = head.find(b"grpc-timeout"), read_timeout_headers(head.headers)
        if timeout is not None:
            theirs_ns = read_timeout(timeout)
            timeout_ns = theirs_ns if timeout_ns < 0 else min(timeout_ns, theirs_ns)
        if self.method.scope is Scope.INFER and not self.takes_stream:
            timeout_ns = bound_timeout(timeout_ns, self.calls.terms.limits)
        self.timeout_ns = timeout_ns
        if timeout_ns == 0:
            raise ServeError(Kind.DEADLINE_EXCEEDED, LATE)
        if self.encoding not in ENCODINGS:
            shown = self.encoding[:32].decode("latin-1")
            text = f"grpc-encoding: given {shown!r}, allowed: {ACCEPTED.decode()}"
            raise ServeError(Kind.UNIMPLEMENTED, text)

    @property
    def metadata(self) -> Metadata:
        """Return the metadata, decoded on first use. Raises ServeError."""
        if self._metadata is None:
            self._metadata = read_metadata(self.headers)
        return self._metadata

    # ---- fastserve.net.http2.stream.StreamService; `answer` is the base's

    def begin(self, stream: Http2Stream) -> None:
        call = stream.context = GrpcCall(self, stream)
        if self.calls.begin(call):
            call.listen()

    def data(self, stream: Http2Stream, piece: Piece) -> None:
        if stream.context is not None:
            stream.context.feed(piece)

    def end(self, stream: Http2Stream) -> None:
        if stream.context is not None:
            stream.context.end_input()

    def gone(self, stream: Http2Stream) -> None:
        if stream.context is not None:
            stream.context.leave()

    def writable(self, stream: Http2Stream) -> None:
        if stream.context is not None:
            stream.context.wake()

    def too_slow(self, stream: Http2Stream) -> None:
        """End a unary call whose message comes too slowly; messages of a stream may be slow."""
        call = stream.context
        if call is not None and not self.method.takes_stream:
            told = slowness(Verdict.SLOW_BODY, self.calls.terms.limits)
            call.stop(ServeError(Kind.DEADLINE_EXCEEDED, str(told)))

    def no_room(self, stream: Http2Stream, fault: ServeError) -> None:
        if stream.context is not None:
            stream.context.no_room(fault)

    def cut_off(self, stream: Http2Stream) -> None:
        if stream.context is not None:
            stream.context.cut_off()
