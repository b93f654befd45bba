"""One HTTP request as framed, and the one reply it gets.

An endpoint is `def f(call)` that arranges for `call.reply` some time later, or `async def f(call)`,
which the wire runs as a task. The first costs no task and no future, so fast paths use it.

    async def show(call):            def fast(call):
        body = await compute()           engine.submit(..., done=lambda body: call.reply(200, body))
        call.reply(200, body)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from fastserve.tracing import choose_request_id
from fastserve.wire.faults import JSON, error_body
from fastserve.wire.replies import BODILESS, CLOSE, EVERY_REPLY, KEEP, header_lines
from fastserve.wire.stream import Stream

if TYPE_CHECKING:
    from fastserve.wire.connection import Connection
    from fastserve.wire.head import Head
    from fastserve.wire.http2.connection import Http2Connection

log = logging.getLogger(__name__)

_INTERNAL_ERROR = error_body("Internal error")
_CANCELLED = error_body("The request was cancelled")
GONE = 499  # in the access log: the client left before its reply, as nginx writes it
PARTED_BYTES = 65536  # from here on head and body are sent as two pieces instead of being joined


class Call:
    """One request. `body` and `headers` are shared with the wire: read them, never change them.

    `on_gone` is called once if the client leaves before the reply is handed over; for a coroutine
    endpoint it cancels the task unless the endpoint sets it to something else.
    """

    __slots__ = (
        "_connection",
        "_replied",
        "_request_id",
        "_stream",
        "_task",
        "body",
        "gone",
        "head",
        "on_gone",
        "ready",
        "received_ns",
    )

    def __init__(self, connection: Connection, head: Head, body: bytes | bytearray) -> None:
        self._connection = connection
        self.head = head
        self.body = body
        self.received_ns = monotonic_ns()
        self._replied = False
        self.gone = False
        self.on_gone: Callable[[], object] | None = None
        self._stream: Stream | None = None
        self.ready: tuple[bytes, bytes, bool] | None = None  # a reply that waits for its turn

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def target(self) -> str:
        """Path and query as sent, not decoded."""
        return self.head.target

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names in lower case, in the order sent."""
        head = self.head
        if not head.after_length or head.body_bytes == len(self.body):
            return head.headers
        length = b"%d" % len(self.body)  # this call shares the head of one with another length
        return [(name, length if name == b"content-length" else value) for name, value in head.headers]

    @property
    def http_1_0(self) -> bool:
        return self.head.http_1_0

    def header(self, name: bytes) -> bytes:
        """The first header of this lower-case name, or b""."""
        for key, value in self.headers if name == b"content-length" else self.head.headers:
            if key == name:
                return value
        return b""

    @property
    def client(self) -> str:
        """Who the client's certificate says it is, "" without one."""
        return self._connection.client

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id when it is short and plain, else its trace id, else one made here."""
        try:
            return self._request_id
        except AttributeError:
            given, trace = self.header(b"x-request-id"), self.header(b"traceparent")
            self._request_id: str = choose_request_id(given, trace)
            return self._request_id

    def raw_head(self, content_type: bytes = JSON) -> bytes:
        """The head of a 200 reply up to where "Content-Length: N" belongs, for `reply_raw`; b"" when
        something about this reply is special, and only `reply` will do. An empty content type sends none."""
        listener = self._connection.listener
        if not listener.plain or self.head.mode != KEEP:
            return b""
        heads = listener.heads
        return heads.ok_json if content_type is JSON else heads.find(200, content_type, KEEP)

    def reply_raw(self, message: bytes) -> None:
        """Send a complete 200 reply, framed by the caller: `raw_head()`, length, empty line, body."""
        if self._replied:
            self._refuse_second()
            return
        self._replied = True
        if self.head.routed_anew:
            self._connection.listener.router.remember(self.head)
        self._connection.finish(self, message, b"", False)

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

        Raises ValueError when a header would break the framing (the call can still be replied to).
        """
        if self._replied:
            self._refuse_second()
            return
        listener = self._connection.listener
        head = self.head
        mode = CLOSE if close or (listener.draining and self._connection.is_last(self)) else head.mode
        framed = self._frame(status, content_type, headers, len(body), mode)
        if (head.bodiless and not even_to_head) or status in BODILESS:
            body = b""
        self._replied = True
        if status == 200 and head.routed_anew:
            listener.router.remember(head)
        if listener.access_log is not None:
            listener.access_log(self, status, len(body))
        if status == 500 and body is not _INTERNAL_ERROR:  # that one has told more
            self._log_failure(body)
        self._send(framed, body, mode)

    def _frame(
        self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]], nbytes: int, mode: int
    ) -> bytes:
        """The head of a reply as its protocol writes it."""
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

    def stream(self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> Stream:
        """Begin a reply whose length is not known: chunked, or until close for HTTP/1.0.

        It counts as the one reply; it ends with `await stream.close()`.
        """
        if self._replied and not self.gone:
            self._refuse_second()
        listener = self._connection.listener
        closes = self.head.http_1_0 or (listener.draining and self._connection.is_last(self))
        mode = CLOSE if closes else self.head.mode
        lines = listener.heads.find(status, content_type, mode) + header_lines(headers)
        coding = b"" if self.head.http_1_0 else b"Transfer-Encoding: chunked\r\n"
        self._replied = True
        turns = self._connection.turns
        self._stream = Stream(
            self, self._connection, turns, status, b"%b%b\r\n" % (lines, coding), mode == CLOSE
        )
        return self._stream

    def switch(self, message: bytes) -> Http2Connection | None:
        """Answer with 101 and go on in HTTP/2; None when this is not the first call of its connection."""
        if self._connection.served > 1:
            return None
        self._replied = True
        return self._connection.hand_over(message)

    def ahead(self) -> tuple[bytes, int]:
        """Bytes that may be sent before the rest of the reply is known, and with how many of them that rest
        begins, not to be sent twice."""
        begun = self._stream.ahead() if self._stream is not None else None
        return (EVERY_REPLY, len(EVERY_REPLY)) if begun is None else (begun, 0)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine endpoint as a task that this call keeps alive."""
        self._task = asyncio.get_running_loop().create_task(self._conclude(work))
        self._task.add_done_callback(lambda _: work.close())  # one that is cancelled before it began
        self.on_gone = self._task.cancel

    async def _conclude(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self._fail_quietly(503, _CANCELLED)
            raise
        except Exception as error:
            self.fail(error)
        else:
            if not self._replied:
                self.fail(RuntimeError("the endpoint returned without a reply"))
            elif self._stream is not None:
                self._stream.give_up()

    def fail(self, error: BaseException) -> None:
        """An exception escaped the endpoint: it is logged, and the client learns only that."""
        if not self.gone:
            text = "%s %.200s: the endpoint failed"
            log.error(text, self.method, self.target, exc_info=error, extra={"request_id": self.request_id})
        self._fail_quietly(500, _INTERNAL_ERROR)

    def _fail_quietly(self, status: int, body: bytes) -> None:
        if not self._replied:
            self.reply(status, body)
        elif self._stream is not None:
            self._stream.give_up()

    def _log_failure(self, body: bytes) -> None:
        """What a request failed of, under its id: the worker that knows more has no ids."""
        said = " ".join(bytes(body[:1024]).decode(errors="replace").split())
        text = "%s %.200s was answered 500: %s"
        log.warning(text, self.method, self.target, said, extra={"request_id": self.request_id})

    def leave(self) -> None:
        """The client is gone: mark the call and tell its endpoint, once."""
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
