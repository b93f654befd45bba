"""One RPC as a dialect declares it, and the facts of a call that it may use. Knows no transport.

Method("/pkg.Service/Call", read=parse, run=answer, write=serialize)
async def answer(request, rpc): ...        # ServeError becomes the status of its kind
"""

from __future__ import annotations

import logging
from asyncio import CancelledError, Future, get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from time import monotonic_ns
from typing import Any, Protocol

from fastserve.errors import Kind, Reason, ServeError
from fastserve.net.access_control import FROM_A_PAGE, Opening, Resources, Restrictions, Scope, Secret
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.settings import Limits
from fastserve.util.offload import Offload
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
_limited_log = RateLimitedLog(log)
Metadata = tuple[tuple[str, str | bytes], ...]
# path, name of the status, bytes of the answer, when the call came (time.monotonic_ns), request id, the
# subject of the client's certificate, and the client's address
AccessLog = Callable[[str, str, int, int, str, str, str], None]
STATUS_NAMES = {0: "OK", **{kind.value: kind.name for kind in Kind}}
INTERNAL_ERROR = "Internal error"  # of an unforeseen exception
SMALL_BYTES = 1 << 20
"""Largest request of a method that takes no tensors: the parser makes objects of it in one go, 10 ms."""
DETAIL_BYTES = 6000  # of an error's text


class Rpc(Protocol):
    """The facts of a call that its method may use besides the message."""

    received_ns: int
    """When it came, as time.monotonic_ns counts."""

    @property
    def request_id(self) -> str:
        """Return the client's x-request-id when it is short and plain, else its trace id, else a new id."""

    @property
    def metadata(self) -> Metadata:
        """Return the client's metadata; names in lower case."""

    def seconds_left(self) -> float | None:
        """Return the seconds until the client's deadline; None without one."""

    def set_trailing(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Set metadata to send after the reply."""

    def compress(self) -> None:
        """Compress the answer if the client takes that. Before the first message of it."""


class GrpcExchange(Rpc, Protocol):
    """A call that `Method.start` has taken, to be answered once: with `reply`, or with `fail`. Both do
    nothing after the client has gone."""

    deadline_ns: int
    """As time.monotonic_ns counts; 0 without one."""
    on_gone: Callable[[], object] | None
    """Called once if the client leaves, or its time is up, before the answer."""

    def reply(self, message: bytes | Sequence[bytes]) -> None:
        """Send a serialized response, in one part or several."""

    def fail(self, error: BaseException) -> None:
        """End the call with the status of a ServeError; any other error is logged, and the client gets
        INTERNAL."""

    def refuse(self, fault: ServeError) -> None:
        """End the call with an error that the client may read."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC over bytes, as a dialect declares it.

    `run` is a coroutine function of (request, rpc), or with `gives_stream` an async generator function; with
    `takes_stream` its request is an async iterator of what `read` returns. A client that leaves cancels
    `run`. `resources` are those it reaches, None the usual ones of its scope. Requests of web pages, which a
    gRPC-Web proxy forwards, are refused in the scope ADMIN.

    `start`, if any, is called before `run`: it takes a serialized request and returns True, or returns
    False and leaves no trace. It costs no task and no future."""

    path: str
    read: Callable[[bytes], Any]
    run: Callable[[Any, Any], Any]
    write: Callable[[Any], bytes]
    takes_stream: bool = False
    gives_stream: bool = False
    scope: Scope = field(kw_only=True)
    resources: Resources | None = None
    start: Callable[[bytes, GrpcExchange], bool] | None = None
    start_below: Callable[[bytes, GrpcExchange], bool] | None = None
    """`start` of calls whose client sent a `traceparent`, where it is another."""
    take: Callable[[GrpcExchange, ArrivedBody], bool] | None = None
    """As `start`, for a large message whose rest is still in the socket: reads it into a batch's rows."""
    most_bytes: int = 0
    """The most bytes of a request's message, within the listener's limit; 0: SMALL_BYTES unless it infers."""

    def __post_init__(self) -> None:
        if not isinstance(self.scope, Scope):
            raise TypeError(f"{self.path}: an RPC needs a Scope, given {self.scope!r}")

    def limit(self, most_bytes: int) -> int:
        """Return the most bytes of a request's message, where the listener allows `most_bytes`."""
        infers = self.scope is Scope.INFER
        return min(most_bytes, self.most_bytes or (most_bytes if infers else SMALL_BYTES))

    @property
    def service(self) -> str:
        return self.path.rpartition("/")[0].lstrip("/")


@dataclass(frozen=True, slots=True)
class RpcTerms:
    """The limits and the access log that all RPCs of a listener share."""

    most_bytes: int  # of a message
    limits: Limits  # inflated_bytes are those of a message
    access_log: AccessLog | None
    opening: Opening
    offload: Offload = field(default_factory=Offload)


def check_call(method: Method, opening: Opening, rpc: Rpc) -> None:
    """Check that the call may be answered, and that the server has opened. Raises ServeError."""
    if method.scope is Scope.ADMIN and any(name == "origin" for name, _ in rpc.metadata):
        raise ServeError(Kind.PERMISSION_DENIED, FROM_A_PAGE)
    opening.check(method.scope)


def too_large(size: int, most_bytes: int) -> ServeError:
    """Return the error of a reply over the limit."""
    text = f"the reply has {size} bytes, grpc_options.message_bytes allows {most_bytes}"
    return ServeError(Kind.RESOURCE_EXHAUSTED, text)


def tell_error(method: Method, rpc: Rpc, error: BaseException) -> ServeError:
    """Return the error for the client; one of the server's own is logged, and the client gets INTERNAL."""
    more = {"request_id": rpc.request_id} if _is_logged(error) else {}
    if not isinstance(error, ServeError):
        held = _limited_log.few(method.path)
        if held is not None:
            log.error("%s: the method failed%s", method.path, held, exc_info=error, extra=more)
        return ServeError(Kind.INTERNAL, INTERNAL_ERROR)
    if error.reason is Reason.MALFORMED_CALL:
        _limited_log.warn("calls that break gRPC's rules are answered INTERNAL")
    elif error.kind is Kind.INTERNAL:  # under the call's id: the worker that knows more has no ids
        held = _limited_log.few(method.path)
        if held is not None:
            log.warning("%s was answered INTERNAL: %s%s", method.path, error.message, held, extra=more)
    return error


def _is_logged(error: BaseException) -> bool:
    if not isinstance(error, ServeError):
        return True
    return error.kind is Kind.INTERNAL and error.reason is not Reason.MALFORMED_CALL


def shorten(text: str) -> str:
    """Cut an error text to what clients take: a trailer has 8 KiB, where a character beyond ASCII takes
    three bytes each."""
    if len(text) <= DETAIL_BYTES and text.isascii():
        return text
    raw = text.encode("utf-8", "replace")
    most = DETAIL_BYTES if text.isascii() else DETAIL_BYTES // 3
    return text if len(raw) <= most else raw[:most].decode("utf-8", "ignore") + "..."


class AwaitedExchange:
    """An exchange whose answer a coroutine awaits: `await exchange.answer()`, once."""

    __slots__ = ("_answer", "on_gone", "received_ns")

    def __init__(self, received_ns: int = 0) -> None:
        self.received_ns = received_ns or monotonic_ns()
        self.on_gone: Callable[[], object] | None = None
        self._answer: Future[bytes] = get_running_loop().create_future()

    def reply(self, message: bytes | Sequence[bytes]) -> None:
        """Answer with a message, in one part or several."""
        if not self._answer.done():  # it is when the call was cancelled in the turn its answer came
            self._answer.set_result(message if isinstance(message, bytes) else b"".join(message))

    def fail(self, error: BaseException) -> None:
        """Answer with an error; the transport decides what the client gets of it."""
        if not self._answer.done():
            self._answer.set_exception(error)

    def refuse(self, fault: ServeError) -> None:
        """Answer with an error that the client may read."""
        self.fail(fault)

    async def answer(self) -> bytes:
        """Return the message. Raises the error of the exchange; a cancelled caller counts as gone."""
        try:
            return await self._answer
        except CancelledError:
            gone, self.on_gone = self.on_gone, None
            if gone is not None:
                gone()
            raise
        finally:
            del self._answer  # with it the circle of an error, the frames in its traceback and the future


def guard_method(restrictions: Restrictions, method: Method) -> Method:
    """Return the RPC for calls with the metadata it wants; the others are refused with its fault."""
    wanted = restrictions.wanted_of(method.scope, method.resources)
    return restrict_method(method, wanted) if wanted else method


def restrict_method(method: Method, wanted: Sequence[Secret]) -> Method:
    """Return the RPC behind secrets. Where metadata repeats a key, the first one counts."""

    def check(rpc: Rpc) -> None:
        for secret in wanted:
            given = next((sent for name, sent in rpc.metadata if name == secret.header), "")
            if not compare_digest(given.encode() if isinstance(given, str) else given, secret.value):
                raise secret.fault()

    async def run(request: Any, rpc: Rpc) -> Any:
        check(rpc)
        return await method.run(request, rpc)

    async def stream(request: Any, rpc: Rpc) -> AsyncIterator[Any]:
        check(rpc)
        pieces = method.run(request, rpc)
        try:
            async for piece in pieces:
                yield piece
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    return replace(
        method, run=stream if method.gives_stream else run, start=None, start_below=None, take=None
    )
