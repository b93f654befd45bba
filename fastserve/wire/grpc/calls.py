"""gRPC as a service of HTTP/2's streams: which method a head is for, and what it says. Equal ones are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastserve._ext.http2_path import CallsPath, HeadPath
from fastserve.errors import Kind, ServeError
from fastserve.wire.coding import IDENTITY
from fastserve.wire.faults import WireFault
from fastserve.wire.grpc.call import HEAD, OK, PARTED_BYTES, Call
from fastserve.wire.grpc.coding import ACCEPTED, choose
from fastserve.wire.grpc.deadlines import Deadlines
from fastserve.wire.grpc.metadata import read_metadata, read_timeout
from fastserve.wire.grpc.method import Metadata, Method, Terms
from fastserve.wire.head import Head as HttpHead
from fastserve.wire.http2 import Piece, Stream
from fastserve.wire.http2.states import State
from fastserve.wire.pace import Verdict, slowness
from fastserve.wire.scope import Scope

# What is over a limit, by the status it would have over plain HTTP.
_KINDS = {413: Kind.RESOURCE_EXHAUSTED, 414: Kind.RESOURCE_EXHAUSTED, 431: Kind.RESOURCE_EXHAUSTED}
ENCODINGS = frozenset(one.strip() for one in ACCEPTED.split(b","))


class Calls(CallsPath):
    """All calls of one listener."""

    __slots__ = ("_methods", "terms")

    def __init__(self, methods: Mapping[str, Method], terms: Terms, most_at_once: int) -> None:
        super().__init__((HEAD, OK, State.CLOSED, Call))
        self.terms, self._methods = terms, methods
        self.deadlines, self.opening = Deadlines(), terms.opening
        self.most_bytes, self.logged = terms.most_bytes, terms.access_log is not None
        self.plain_bytes = min(PARTED_BYTES - 1, terms.most_bytes)
        self.most_at_once = most_at_once

    def find(self, head: HttpHead) -> Head | None:
        """Whoever says that it is gRPC is answered as such."""
        if head.method != "POST" or not is_grpc(head.find(b"content-type") or b""):
            return None
        return Head(self, head, self._methods.get(head.target))

    def refuse(self, fields: Sequence[tuple[bytes, bytes]], fault: WireFault) -> Head | None:
        """Clients of gRPC are told in its words."""
        if not any(name == b"content-type" and is_grpc(value) for name, value in fields):
            return None
        head = HttpHead(b"")
        head.target = next((value.decode("latin-1") for name, value in fields if name == b":path"), "")
        refused = Head(self, head, None)
        refused.fault = ServeError(_KINDS.get(fault.status, Kind.INTERNAL), str(fault))
        return refused

    def begin(self, call: Call) -> bool:
        """Whether it may; a call that may not is answered."""
        self.running += 1
        head = call.head
        if call.deadline_ns:
            self.deadlines.add(call)
        if head.fault is not None:
            call.fail(head.fault)
        elif self.most_at_once and self.running > self.most_at_once:
            most = f"over the limit of {self.most_at_once} (setting grpc_options.concurrent_calls)"
            call.fail(ServeError(Kind.RESOURCE_EXHAUSTED, f"Calls at the same time {most}"))
        return not call.over


def is_grpc(content_type: bytes) -> bool:
    """With or without a name for what the messages are; gRPC-Web is another protocol."""
    return content_type.startswith(b"application/grpc") and content_type[16:17] in (b"", b"+", b";")


async def _unreachable(request: Any, rpc: Any) -> Any:
    raise AssertionError("a method that is not there does not run")


class Head(HeadPath):
    """What the headers of a call say; calls with equal ones share it. The service of their streams."""

    __slots__ = ("_metadata", "coding", "encoding", "fault", "headers", "method", "path")

    def __init__(self, calls: Calls, head: HttpHead, method: Method | None) -> None:
        self.calls = calls
        self.path = head.target
        self.headers = head.headers
        self.method = method or Method(head.target, bytes, _unreachable, bytes)
        # Without words, as servers on gRPC's C++ library say it.
        self.fault = None if method is not None else ServeError(Kind.UNIMPLEMENTED, "")
        self.timeout_ns = -1
        self.encoding = head.find(b"grpc-encoding") or IDENTITY
        self.coding = choose(head.find(b"grpc-accept-encoding") or b"")
        self._metadata: Metadata | None = None
        admin = self.method.scope is Scope.ADMIN  # whose callers are looked at
        self.start = None if admin else self.method.start  # the short way, once the server has opened
        self.takes_stream = self.method.takes_stream
        try:
            self._read(head)
        except ServeError as fault:
            self.fault = self.fault or fault
        self.ordinary = self.fault is None and self.timeout_ns < 0

    def _read(self, head: HttpHead) -> None:
        timeout = head.find(b"grpc-timeout")
        if timeout is not None:
            self.timeout_ns = read_timeout(timeout)
        if self.encoding not in ENCODINGS:
            shown = self.encoding[:32].decode("latin-1")
            text = f"grpc-encoding: given {shown!r}, allowed: {ACCEPTED.decode()}"
            raise ServeError(Kind.UNIMPLEMENTED, text)

    @property
    def metadata(self) -> Metadata:
        """Decoded when it is asked for. Raises ServeError."""
        if self._metadata is None:
            self._metadata = read_metadata(self.headers)
        return self._metadata

    # ---- fastserve.wire.http2.stream.Service; `answer` is the base's

    def begin(self, stream: Stream) -> None:
        call = stream.context = Call(self, stream)
        if self.calls.begin(call):
            call.listen()

    def data(self, stream: Stream, piece: Piece) -> None:
        if stream.context is not None:
            stream.context.feed(piece)

    def end(self, stream: Stream) -> None:
        if stream.context is not None:
            stream.context.end_input()

    def gone(self, stream: Stream) -> None:
        if stream.context is not None:
            stream.context.leave()

    def writable(self, stream: Stream) -> None:
        if stream.context is not None:
            stream.context.wake()

    def too_slow(self, stream: Stream) -> None:
        """A message that a method waits for; the messages of a stream may come when they come."""
        call = stream.context
        if call is not None and not self.method.takes_stream:
            told = slowness(Verdict.SLOW_BODY, self.calls.terms.limits)
            call.stop(ServeError(Kind.DEADLINE_EXCEEDED, str(told)))

    def cut_off(self, stream: Stream) -> None:
        if stream.context is not None:
            stream.context.cut_off()
