"""One HTTP request as framed, and the one reply it gets: whole, or as a stream.

An endpoint is `def f(call)` that arranges for `call.reply` some time later, or `async def f(call)`, which
runs as a task. The first costs no task and no future, so fast paths use it.

    async def show(call):            def fast(call):
        body = await compute()           engine.submit(..., done=lambda body: call.reply(200, body))
        call.reply(200, body)

Reply heads are built once per (status, content type, connection mode) and second. No header that holds a
control character can be written.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from email.utils import formatdate
from http import HTTPStatus
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastserve._ext.fast_path import ACCOUNT
from fastserve._ext.stream_path import StreamPath
from fastserve.errors import DeadlineError, ServeError
from fastserve.net.deadlines import GRACE_NS, UNBOUNDED, CallDeadlines, time_is_up
from fastserve.net.limits import JSON, error_body
from fastserve.util.memory_budget import ALLOWANCE_BYTES, REASON, WORKING_SHARE, Claim, MemoryBudget
from fastserve.util.rate_limited_log import RateLimitedLog
from fastserve.util.tracing import TraceContext, choose_request_id, read_trace_context

if TYPE_CHECKING:
    from fastserve.net.key_usage import KeyUsage

KEEP, CLOSE, KEEP_1_0 = range(3)  # what the reply says about the connection
EVERY_REPLY = b"HTTP/1.1 "  # what each begins with
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODILESS = frozenset((204, 304))
_CONNECTION = (b"", b"Connection: close\r\n", b"Connection: keep-alive\r\n")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus} | {
    405: b"Not Allowed",  # as Triton has it (V2 spec 1)
    413: b"Content Too Large",
    414: b"URI Too Long",
    499: b"Client Closed Request",
}

_CACHED_HEADS = 256
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def check_header(name: bytes, value: bytes) -> None:
    """Raise ValueError for a name or value that would break the framing."""
    if _NAME.fullmatch(name) is None or _CONTROL.search(value) is not None:
        raise ValueError(f"reply header {name!r} holds a character that must not be sent")


def header_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return header lines ready to send. Raises ValueError for a name or value that would break the
    framing."""
    lines = []
    for name, value in headers:
        check_header(name, value)
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines)


class ReplyHeads:
    """Reply heads without their length line, with the date of the last `tick`. One per listener.

    `ok_json` is the head of a plain 200: a fast path puts it before "Content-Length: N"."""

    __slots__ = ("_date", "_heads", "_second", "ok_json")

    def __init__(self) -> None:
        self._heads: dict[tuple[int, bytes, int], bytes] = {}
        self._second = -1
        self._date = b""
        self.ok_json = b""

    def tick(self, unix_s: float) -> None:
        """Set the date, and drop the heads with an older one."""
        if int(unix_s) == self._second:
            return
        self._second = int(unix_s)
        self._date = b"Date: %b\r\n" % formatdate(self._second, usegmt=True).encode()
        self._heads.clear()
        self.ok_json = self.find(200, b"application/json", KEEP)

    def find(self, status: int, content_type: bytes, mode: int) -> bytes:
        """Return the status line and standing headers of a reply; an empty content type sends none."""
        key = (status, content_type, mode)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= _CACHED_HEADS:
                self._heads.clear()
            head = self._heads[key] = self._make(status, content_type, mode)
        return head

    def _make(self, status: int, content_type: bytes, mode: int) -> bytes:
        kind = header_lines([(b"Content-Type", content_type)]) if content_type else b""
        reason = _REASONS.get(status, b"Unknown")
        return b"%b%d %b\r\n%b%b%b" % (EVERY_REPLY, status, reason, kind, self._date, _CONNECTION[mode])


class WriteTurns:
    """Let streamed replies of one connection wait: for replies before them, or for a client that reads."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def wake(self) -> None:
        """Wake all that wait; each looks whether it is its turn."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


CHUNKED = -1
LENGTH = re.compile(rb"0|[1-9][0-9]{0,18}")


class CachedRoute(NamedTuple):
    """A target and its endpoint for every client, as the router found them. Only the router makes one,
    and only this is cached."""

    method: str
    target: str
    endpoint: Endpoint


UNREAD = TraceContext("", "", False)  # as the parent of a head whose traceparent nobody has looked for


class RequestHead:
    """One request head. Immutable once read and routed: calls with equal heads share it."""

    __slots__ = (
        "__weakref__", "after_length", "before_length", "bodiless", "body_bytes", "client", "endpoint",
        "expects_continue", "found", "headers", "http_1_0", "identified", "memo", "method", "mode", "parent",
        "raw", "service", "slow", "target", "timeout_ns", "total_bytes", "usage",
    )  # fmt: skip

    endpoint: Endpoint
    service: Any  # http2.stream.StreamService

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.method = ""
        self.target = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.http_1_0 = False
        self.mode = KEEP  # KEEP, CLOSE or KEEP_1_0: what the client asked of the connection
        self.bodiless = False  # HEAD: the reply has no body
        self.body_bytes = 0  # CHUNKED, or the Content-Length
        self.total_bytes = 0  # head and body together; 0 with CHUNKED
        self.before_length = b""  # the head round the digits of its Content-Length, if it has one
        self.after_length = b""
        self.expects_continue = False
        self.identified = False  # it names the request: so does its reply (an X-Request-Id header)
        self.found: CachedRoute | None = None  # what the router remembers once this is answered 200
        self.client = ""  # the subject of the client's certificate, where keys are on (api_keys)
        self.slow = False  # its replies need a second look: it is identified, or its calls are watched
        self.timeout_ns = UNBOUNDED  # how long its calls may take
        self.usage: KeyUsage | None = None  # of its API key
        self.memo: Any = None  # the service's, worked out once for all requests with this head
        self.parent: TraceContext | None = UNREAD  # where requests are traced: the client's span

    def find(self, name: bytes) -> bytes | None:
        """Return the first header of this lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def read_parent(self) -> TraceContext | None:
        """Return the client's span by its traceparent, None without one; worked out once."""
        if self.parent is UNREAD:
            self.parent = read_trace_context(
                self.find(b"traceparent") or b"", self.find(b"tracestate") or b""
            )
        return self.parent

    def repeats(self, name: bytes) -> bool:
        """Return whether there is more than one header of this lower-case name."""
        return sum(key == name for key, _ in self.headers) > 1

    def match(self, data: bytes | bytearray, start: int, most_bytes: int) -> tuple[int, int]:
        """Return where a head at data[start:] ends and its body's length (or CHUNKED), if nothing but
        that length differs from this head; (0, 0) for another head, and in every doubt."""
        if data.startswith(self.raw, start):
            return start + len(self.raw), self.body_bytes
        if not self.before_length or not data.startswith(self.before_length, start):
            return 0, 0
        begin = start + len(self.before_length)
        stop = data.find(b"\r", begin, begin + 20)
        digits = data[begin:stop]
        if stop < 0 or LENGTH.fullmatch(digits) is None or not data.startswith(self.after_length, stop):
            return 0, 0
        length = int(digits)
        return (stop + len(self.after_length), length) if length <= most_bytes else (0, 0)


class CallRouter(Protocol):
    """The part of a router that calls use."""

    def remember(self, head: RequestHead) -> None:
        """Keep the route of a target that was answered 200."""

    def hold_back(self, call: Call, fault: ServeError) -> None:
        """Refuse a call in its dialect's words."""


class CallListener(Protocol):
    """The part of a listener that calls use."""

    @property
    def access_log(self) -> AccessLog | None:
        """Called for each reply that needs a second look."""

    @property
    def budget(self) -> MemoryBudget:
        """The memory budget of the process."""

    @property
    def deadlines(self) -> CallDeadlines:
        """The calls whose time is bounded."""

    @property
    def draining(self) -> bool:
        """Return whether replies close their connections."""

    @property
    def heads(self) -> ReplyHeads:
        """Reply heads of this second."""

    @property
    def names(self) -> bool:
        """Return whether every reply has its request's id."""

    @property
    def plain(self) -> bool:
        """Return whether ordinary replies need no second look."""

    @property
    def router(self) -> CallRouter:
        """The routes of the listener."""

    def count_refusal(self, cause: str) -> None:
        """Count a refusal under `cause`."""


class CallConnection(Protocol):
    """The part of a connection that its calls use."""

    turns: WriteTurns

    @property
    def address(self) -> str:
        """HOST:PORT of the client."""

    @property
    def client(self) -> str:
        """The subject of the client's certificate."""

    @property
    def listener(self) -> CallListener:
        """The listener of this connection."""

    def abort(self) -> None:
        """Cut the connection."""

    def callback_failed(self, error: Exception) -> None:
        """Report an exception, and end the connection."""

    def finish(self, call: Call, message: bytes, body: bytes, closes: bool) -> None:
        """Send the reply of `call`, now or when its turn comes."""

    def is_last(self, call: Call) -> bool:
        """Return whether nothing has come behind this call."""


class ReplyStream(StreamPath):
    """A reply in pieces: chunked for HTTP/1.1, until close for HTTP/1.0. Made by Call.stream.

    `write` returns when the socket's buffer is below its high water mark: a client that stops reading
    stops its writer, and limits.write_stall_s ends both. A stream that is dropped without close() cuts
    the connection off, so that the client can tell a whole reply from a broken one. `sent_bytes` are
    those of the body."""

    __slots__ = ("_closes", "_status", "_turns")

    def __init__(
        self,
        call: Call,
        connection: CallConnection,
        turns: WriteTurns,
        status: int,
        head: bytes,
        closes: bool,
    ) -> None:
        super().__init__(call, connection, head, not call.head.http_1_0, call.head.bodiless)
        self._turns = turns
        self._status = status
        self._closes = closes

    def ahead(self) -> bytes | None:
        """Return bytes that may precede the next piece without changing the reply: a chunk's size may
        begin with a zero (RFC 9112 7.1). None while nothing is sent."""
        if self._head:
            return None
        return b"0" if self._chunked and not self._silent else b""

    async def write(self, data: bytes) -> None:
        """Send one piece. Raises ConnectionResetError when the client has gone, RuntimeError when closed."""
        if self._closed:
            raise RuntimeError("the stream is closed")
        await self._wait_turn()
        self.send(data)

    async def wait(self) -> None:
        """Wait until `ready`. Raises ConnectionResetError when the client has gone."""
        await self._wait_turn()

    async def close(self) -> None:
        """End the reply. Does nothing the second time or when the client has gone."""
        if self._closed:
            return
        self._closed = True
        if self._call.gone:
            return
        try:
            await self._wait_turn()
        except ConnectionResetError:
            return
        self._log()
        self._send_end()

    def give_up(self) -> None:
        """Cut the reply off: the endpoint has ended without close()."""
        if not self._closed and not self._call.gone:
            self._closed = True
            self._log()
            self._cut()

    def leave(self) -> None:
        """Write the access log: the client is gone."""
        if not self._closed:
            self._log()

    async def _wait_turn(self) -> None:
        while not self._call.gone and not self._may_send():
            await self._turns.wait()
        if self._call.gone:
            raise ConnectionResetError("the client has gone")

    def _log(self) -> None:
        access_log = self._connection.listener.access_log
        if access_log is not None:
            access_log(self._call, self._status, self.sent_bytes)

    # ---- how HTTP/1.1 does it; its pieces are StreamPath's

    def _send_end(self) -> None:
        end = b"0\r\n\r\n" if self._chunked and not self._silent else b""
        head, self._head = self._head, b""
        self._connection.finish(self._call, head + end, b"", self._closes)

    def _cut(self) -> None:
        self._connection.abort()


log = logging.getLogger(__name__)
_limited_log = RateLimitedLog(log)
_INTERNAL_ERROR = error_body("Internal error")
_CANCELLED = error_body("The request was cancelled")
Headers = Sequence[tuple[bytes, bytes]]
GONE = 499  # in the access log: the client left before its reply, as nginx writes it
PARTED_BYTES = 65536  # from here on head and body are sent as two pieces instead of being joined


class Call:
    """One HTTP request, and the one reply it gets. Never change `body` and `headers`.

    `on_gone` is called once if the client leaves before the reply is handed over; for a coroutine
    endpoint it cancels the task unless the endpoint sets it."""

    __slots__ = (
        "_claim", "_connection", "_open", "_replied", "_request_id", "_status", "_stream", "_task",
        "_watchers", "body", "deadline_ns", "gone", "head", "on_gone", "ready", "received_ns",
    )  # fmt: skip

    def __init__(self, connection: CallConnection, head: RequestHead, body: bytes | bytearray) -> None:
        self._connection = connection
        self.head = head
        self.body = body
        self.received_ns = received_ns = monotonic_ns()
        timeout_ns = head.timeout_ns
        # Until when the endpoint may work, as time.monotonic_ns counts; 0: for ever.
        self.deadline_ns = received_ns + timeout_ns + GRACE_NS if timeout_ns >= 0 else 0
        self._replied = False
        self.gone = False
        self.on_gone: Callable[[], object] | None = None
        self._stream: ReplyStream | None = None
        self._watchers: Sequence[Callable[[int], object]]  # set by the first one
        self.ready: tuple[bytes, bytes, bool] | None = None  # a reply that waits for its turn

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def target(self) -> str:
        """Return path and query as sent, not decoded."""
        return self.head.target

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers in the order sent, names in lower case."""
        head = self.head
        if not head.after_length or head.body_bytes == len(self.body):
            return head.headers
        length = b"%d" % len(self.body)  # this call shares the head of one with another length
        return [(name, length if name == b"content-length" else value) for name, value in head.headers]

    @property
    def http_1_0(self) -> bool:
        return self.head.http_1_0

    def header(self, name: bytes) -> bytes:
        """Return the first header of this lower-case name, or b""."""
        for key, value in self.headers if name == b"content-length" else self.head.headers:
            if key == name:
                return value
        return b""

    @property
    def client(self) -> str:
        """Return the subject of the client's certificate, "" without one."""
        return self._connection.client

    @property
    def address(self) -> str:
        """Return the client's address: HOST:PORT, "unix" of a socket file."""
        return self._connection.address

    @property
    def request_id(self) -> str:
        """Return the client's X-Request-Id when it is short and plain, else its trace id, else a new id."""
        try:
            return self._request_id
        except AttributeError:
            given, trace = self.header(b"x-request-id"), self.header(b"traceparent")
            self._request_id: str = choose_request_id(given, trace)
            return self._request_id

    def follow_trace(self, trace_id: str) -> None:
        """Name a traced request by its trace, unless the client has named it."""
        if not self.head.identified:
            self._request_id = trace_id

    @property
    def status(self) -> int:
        """Return the status of the reply, once it was begun."""
        return getattr(self, "_status", 200)

    @property
    def claim(self) -> Claim:
        """Memory for work on this call, beside its body; a coroutine endpoint has it until its end."""
        try:
            return self._claim
        except AttributeError:
            self._claim: Claim = Claim(self._connection.listener.budget)
            return self._claim

    def watch(self, ended: Callable[[int], object]) -> None:
        """Have `ended` called once with the status when this call is answered, or its client gone (GONE). For
        calls whose head is `slow`."""
        self._watchers = [*self.unwatch(), ended]

    def unwatch(self) -> Sequence[Callable[[int], object]]:
        """Return the watchers, which are not called any more."""
        watchers: Sequence[Callable[[int], object]] = getattr(self, "_watchers", ())
        self._watchers = ()
        return watchers

    def raw_head(self, content_type: bytes = JSON) -> bytes:
        """Return the head of a 200 reply up to where "Content-Length: N" belongs, for `reply_raw`. b""
        when this reply needs `reply`. An empty content type sends none."""
        listener = self._connection.listener
        if not listener.plain or self.head.mode != KEEP or self.head.slow:
            return b""
        heads = listener.heads
        return heads.ok_json if content_type is JSON else heads.find(200, content_type, KEEP)

    def reply_raw(self, message: bytes) -> None:
        """Send a complete 200 reply, framed by the caller: `raw_head()`, length, empty line, body."""
        if self._replied:
            self._refuse_second()
            return
        self._replied = True
        if self.head.found is not None:
            self._connection.listener.router.remember(self.head)
        try:
            self._connection.finish(self, message, b"", False)
        except Exception as error:  # some of it may be out: there is no other reply
            self._connection.callback_failed(error)

    def reply(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
        close: bool = False,
        even_to_head: bool = False,
    ) -> None:
        """Send the reply. Exactly once; after the client has gone it does nothing.

        `even_to_head` sends the body to a HEAD too, against RFC 9110: the connection has to `close` then.
        Raises ValueError when a header would break the framing (the call can still be replied to)."""
        if self._replied:
            self._refuse_second()
            return
        listener = self._connection.listener
        head = self.head
        mode = CLOSE if close or (listener.draining and self._connection.is_last(self)) else head.mode
        framed = self._frame(status, content_type, self._named(status, headers), len(body), mode)
        if (head.bodiless and not even_to_head) or status in BODILESS:
            body = b""
        self._replied = True
        self._status: int = status
        if head.timeout_ns >= 0:
            listener.deadlines.remove(self)
        if status == 200 and head.found is not None:
            listener.router.remember(head)
        if listener.access_log is not None:
            listener.access_log(self, status, len(body))
        if status == 500 and body is not _INTERNAL_ERROR:  # that one is logged already
            self._log_failure(body)
        try:
            self._send(framed, body, mode)
        except Exception as error:  # some of it may be out: there is no other reply
            self._connection.callback_failed(error)

    def _named(self, status: int, headers: Headers) -> Headers:
        """Add X-Request-Id where the client named its request, to errors, and with an access log; other
        replies get no id. Add what is left of the limits of its key."""
        usage = self.head.usage
        if usage is not None and usage.limited and status != 429:
            headers = (*headers, *usage.describe_room())
        if self.head.identified or status >= 400 or self._connection.listener.names:
            return (*headers, (b"X-Request-Id", self.request_id.encode()))
        return headers

    def _frame(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]], nbytes: int, mode: int
    ) -> bytes:
        """Return the head of a reply."""
        message = self._connection.listener.heads.find(status, content_type, mode)
        if headers:
            message += header_lines(headers)
        length = b"" if status in BODILESS else b"Content-Length: %d\r\n" % nbytes
        return b"%b%b\r\n" % (message, length)

    def _send(self, framed: bytes, body: bytes, mode: int) -> None:
        if len(body) < PARTED_BYTES:
            self._connection.finish(self, framed + body, b"", mode == CLOSE)
        else:
            self._connection.finish(self, framed, body, mode == CLOSE)

    def stream(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> ReplyStream:
        """Begin a reply whose length is not known: chunked, or until close for HTTP/1.0.

        It counts as the one reply; it ends with `await stream.close()`.
        """
        if self._replied and not self.gone:
            self._refuse_second()
        listener = self._connection.listener
        closes = self.head.http_1_0 or (listener.draining and self._connection.is_last(self))
        mode = CLOSE if closes else self.head.mode
        lines = listener.heads.find(status, content_type, mode) + header_lines(self._named(status, headers))
        coding = b"" if self.head.http_1_0 else b"Transfer-Encoding: chunked\r\n"
        self._begin_stream(status)
        turns = self._connection.turns
        self._stream = ReplyStream(
            self, self._connection, turns, status, b"%b%b\r\n" % (lines, coding), mode == CLOSE
        )
        return self._stream

    def _begin_stream(self, status: int) -> None:
        """From here on the endpoint keeps the deadline: it alone knows how a stream tells of an error."""
        self._replied, self._status = True, status
        if self.head.timeout_ns >= 0:
            self._connection.listener.deadlines.remove(self)

    def ahead(self) -> tuple[bytes, int]:
        """Return bytes that may be sent before the reply, and how many bytes of the reply they are."""
        begun = self._stream.ahead() if self._stream is not None else None
        return (EVERY_REPLY, len(EVERY_REPLY)) if begun is None else (begun, 0)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine endpoint as a task that this call keeps alive."""
        self._task = asyncio.get_running_loop().create_task(self._conclude(work))
        self._task.add_done_callback(lambda _: work.close())  # one that is cancelled before it began
        self.on_gone = self._task.cancel

    def leave_open(self) -> None:
        """Allow the coroutine of the endpoint to end without a reply, which comes later."""
        self._open: bool = True

    async def _conclude(self, work: Coroutine[Any, Any, None]) -> None:
        if self.head.usage is not None:
            ACCOUNT.set(self.head.usage)
        try:
            try:
                if len(self.body) <= ALLOWANCE_BYTES or await self._has_room():
                    await work
            except asyncio.CancelledError:
                self._fail_quietly(503, _CANCELLED)
                raise
            except Exception as error:
                self.fail(error)
            else:
                if not self._replied and not getattr(self, "_open", False):
                    self.fail(RuntimeError("the endpoint returned without a reply"))
                elif self._stream is not None:
                    self._stream.give_up()
        except Exception as error:  # not even the failure could be sent
            self._connection.callback_failed(error)
        finally:
            del self._task  # a task that is cancelled keeps its traceback, whose frames have this call
            claim = getattr(self, "_claim", None)
            if claim is not None:
                claim.release()

    async def _has_room(self) -> bool:
        """Wait for the memory to read a large body; return False when there is none, and the call is
        answered."""
        try:
            await self.claim.reserve(WORKING_SHARE * len(self.body))
        except ServeError as fault:
            self._connection.listener.count_refusal(REASON)
            self._connection.listener.router.hold_back(self, fault)
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Log an exception of the endpoint, and answer with the generic internal error."""
        held = None if self.gone else _limited_log.few(self.target.partition("?")[0])
        if held is not None:
            text, more = "%s %.200s: the endpoint failed%s", {"request_id": self.request_id}
            log.error(text, self.method, self.target, held, exc_info=error, extra=more)
        self._fail_quietly(500, _INTERNAL_ERROR)

    def _fail_quietly(self, status: int, body: bytes) -> None:
        if not self._replied:
            self.reply(status, body)
        elif self._stream is not None:
            self._stream.give_up()

    def _log_failure(self, body: bytes) -> None:
        """Log the text of a 500 under the request's id: the worker, which logs more, has no ids."""
        held = _limited_log.few(self.target.partition("?")[0])
        if held is None:
            return
        said = " ".join(bytes(body[:1024]).decode(errors="replace").split())
        text = "%s %.200s was answered 500: %s%s"
        log.warning(text, self.method, self.target, said, held, extra={"request_id": self.request_id})

    def bind(self) -> None:
        """Have the call expire at its deadline, unless it is answered already."""
        if not self._replied and not self.gone:
            due_ns = self.received_ns + self.head.timeout_ns
            self._connection.listener.deadlines.add(self, due_ns)

    def expire(self) -> None:
        """Answer: the time of the call is up. To the endpoint it is as if the client had left."""
        stopped, self.on_gone = self.on_gone, None
        self._connection.listener.router.hold_back(self, time_is_up(self.head.timeout_ns))
        self.gone = True  # for the endpoint, whose reply nobody waits for
        if stopped is not None:
            stopped()

    def cause_of(self, fault: ServeError) -> ServeError:
        """Return why the call has failed, given the error of its work: of its time where that is up. On a
        late loop the engine, which has the same deadline, notices it before `expire`."""
        timeout_ns = self.head.timeout_ns
        if timeout_ns < 0 or not isinstance(fault, DeadlineError):
            return fault
        return time_is_up(timeout_ns) if monotonic_ns() >= self.received_ns + timeout_ns else fault

    def leave(self) -> None:
        """Mark the call: its client is gone; tell the endpoint, once."""
        if self.head.timeout_ns >= 0:
            self._connection.listener.deadlines.remove(self)
        access_log = self._connection.listener.access_log
        if self._stream is not None:
            self._stream.leave()
        elif access_log is not None and not self._replied:
            access_log(self, GONE, 0)
        self.gone = True
        stopped, self.on_gone = self.on_gone, None
        unfinished = not self._replied or self._stream is not None
        self._replied = True
        if stopped is not None and unfinished:
            try:
                stopped()
            except Exception:
                log.exception("on_gone failed")

    def _refuse_second(self) -> None:
        if not self.gone:
            raise RuntimeError("a call is replied to exactly once")


Endpoint = Callable[[Call], Coroutine[Any, Any, None] | None]
AccessLog = Callable[[Call, int, int], None]  # (call, status, body bytes; -1 for a stream)
