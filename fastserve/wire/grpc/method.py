"""What a dialect says of an RPC, and what an RPC may know of its call. Not how either travels.

Method("/pkg.Service/Call", read=parse, run=answer, write=serialize)
async def answer(request, rpc): ...        # ServeError becomes the status of its kind
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastserve.apart import Apart
from fastserve.config import Limits
from fastserve.errors import Kind, ServeError
from fastserve.wire.opening import Opening
from fastserve.wire.scope import FROM_A_PAGE, Scope

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]
# path, name of the status, bytes of the answer, when the call came (time.monotonic_ns), request id, and who
# the client's certificate says it is
AccessLog = Callable[[str, str, int, int, str, str], None]
STATUS_NAMES = {0: "OK", **{kind.value: kind.name for kind in Kind}}
INTERNAL_ERROR = "Internal error"  # of what is nobody's business
DETAIL_BYTES = 6000  # of an error's text


class Rpc(Protocol):
    """What a method may know of its call besides the message."""

    received_ns: int
    """When it came, as time.monotonic_ns counts."""
    patience_ns: int
    """How long a batch may wait for more calls of a busy loop, where they come one by one."""

    @property
    def request_id(self) -> str:
        """The client's x-request-id when it is short and plain, else its trace id, else one made here."""

    @property
    def metadata(self) -> Metadata:
        """What the client sent beside the message; names in lower case."""

    def seconds_left(self) -> float | None:
        """Until the client's deadline; None without one."""

    def set_trailing(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Metadata sent after the reply."""

    def compress(self) -> None:
        """Before the first message of the answer: compress them, if the client takes that."""


class Exchange(Rpc, Protocol):
    """A call that `Method.start` has taken, and answers once: with `reply`, or with `fail`. After the client
    has gone both do nothing."""

    deadline_ns: int
    """As time.monotonic_ns counts; 0 without one."""
    on_gone: Callable[[], object] | None
    """Called once if the client leaves, or its time is up, before the answer."""

    def reply(self, message: bytes | Sequence[bytes]) -> None:
        """A serialized response, in one part or several."""

    def fail(self, error: BaseException) -> None:
        """A ServeError becomes the status of its kind; anything else is logged and not told."""

    def refuse(self, fault: ServeError) -> None:
        """End it with an error the client may read."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC over bytes. `run` is a coroutine function of (request, rpc), or with `gives_stream` an
    async generator function; with `takes_stream` its request is an async iterator of what `read` gives.
    A client that leaves cancels `run`. One in the scope ADMIN is refused to what says that it comes from
    a web page, as a proxy of gRPC-Web does.

    `start`, where there is one, is asked before `run` by a transport that can: it takes a serialized request
    and says so, or returns False without a trace. It costs no task and no future."""

    path: str
    read: Callable[[bytes], Any]
    run: Callable[[Any, Any], Any]
    write: Callable[[Any], bytes]
    takes_stream: bool = False
    gives_stream: bool = False
    scope: Scope | None = None
    start: Callable[[bytes, Exchange], bool] | None = None

    @property
    def service(self) -> str:
        return self.path.rpartition("/")[0].lstrip("/")


@dataclass(frozen=True, slots=True)
class Terms:
    """What one listener holds all its methods to."""

    most_bytes: int  # of a message
    limits: Limits  # inflated_bytes are those of a message
    access_log: AccessLog | None
    opening: Opening
    apart: Apart = field(default_factory=Apart)


def check_call(method: Method, opening: Opening, rpc: Rpc) -> None:
    """Whether this call may be answered, and yet. Raises ServeError."""
    if method.scope is Scope.ADMIN and any(name == "origin" for name, _ in rpc.metadata):
        raise ServeError(Kind.PERMISSION_DENIED, FROM_A_PAGE)
    opening.check(method.scope)


def too_large(size: int, most_bytes: int) -> ServeError:
    """For a reply that may not be sent."""
    text = f"the reply has {size} bytes, grpc_options.message_bytes allows {most_bytes}"
    return ServeError(Kind.RESOURCE_EXHAUSTED, text)


def tell_error(method: Method, rpc: Rpc, error: BaseException) -> ServeError:
    """What the client is told of an error, which is logged where it is the server's own."""
    more = {"request_id": rpc.request_id} if _is_logged(error) else {}
    if not isinstance(error, ServeError):
        log.error("%s: the method failed", method.path, exc_info=error, extra=more)
        return ServeError(Kind.INTERNAL, INTERNAL_ERROR)
    if error.kind is Kind.INTERNAL:  # under the call's id: the worker that knows more has no ids
        log.warning("%s was answered INTERNAL: %s", method.path, error.message, extra=more)
    return error


def _is_logged(error: BaseException) -> bool:
    return not isinstance(error, ServeError) or error.kind is Kind.INTERNAL


def shorten(text: str) -> str:
    """What clients will take: a trailer has 8 KiB, and what is not ASCII takes three bytes for one there."""
    if len(text) <= DETAIL_BYTES and text.isascii():
        return text
    raw = text.encode("utf-8", "replace")
    most = DETAIL_BYTES if text.isascii() else DETAIL_BYTES // 3
    return text if len(raw) <= most else raw[:most].decode("utf-8", "ignore") + "..."
