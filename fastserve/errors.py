"""Errors that all dialects share.

A fault is raised once, as a `ServeError` with one of the canonical kinds; each dialect says in one table
which status each has. Nothing here knows HTTP or gRPC.
"""

import sys
from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class Kind(Enum):
    """The canonical kinds of failure, numbered as gRPC and TensorFlow number them."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Reason(Enum):
    """The cause of an error, where its kind alone does not tell and a dialect has a text of its own for it.

    Decisions are taken on reasons, never on an error's text. A worker sends the number along with the kind
    (`pack_status`).
    """

    UNSPECIFIED = 0
    QUEUE_FULL = 1
    QUEUE_DEADLINE = 2
    """The request's own deadline passed before a worker took it."""
    SCALAR_OUTPUT = 3
    """The model returned an output without axes for a batch."""
    OUTPUT_ROWS = 4
    """The model returned an output with another number of rows than its batch has."""
    UNKNOWN_ENCODING = 5
    """The body has a content encoding that this server cannot decode."""
    WORKER_LOST = 6
    """The worker that had the request, or the state of its sequence, is gone. Another takes its place."""
    SERVER_STARTING = 7
    """The server listens, and has not loaded the model yet since its start."""
    MALFORMED_CALL = 8
    """The call breaks gRPC's own rules: its status is INTERNAL there, though the fault is the client's."""
    API_KEY = 9
    """The request has no valid API key (UNAUTHENTICATED), or one that does not allow it
    (PERMISSION_DENIED)."""
    KEY_LIMIT = 10
    """The request is over a limit of its API key."""
    REQUEST_TIMEOUT = 11
    """The time that a request of any dialect has is up (DEADLINE_EXCEEDED), or is no time that can be read
    (INVALID_ARGUMENT): X-Request-Timeout and its like."""


_REASON_SHIFT = 8


def pack_status(error: "ServeError | Kind", reason: Reason = Reason.UNSPECIFIED) -> int:
    """Return kind and reason as one 32-bit number, never 0."""
    kind = error.kind if isinstance(error, ServeError) else error
    reason = error.reason if isinstance(error, ServeError) else reason
    return int(kind.value) | int(reason.value) << _REASON_SHIFT


def unpack_status(status: int) -> tuple[Kind, Reason]:
    """Return what `pack_status` was given; for any other number (INTERNAL, UNSPECIFIED)."""
    try:
        return Kind(status & ((1 << _REASON_SHIFT) - 1)), Reason(status >> _REASON_SHIFT)
    except ValueError:
        return Kind.INTERNAL, Reason.UNSPECIFIED


MEMORY_RETRY_S = 1.0
WORKER_RETRY_S = 1.0
STARTING_RETRY_S = 1.0
MOST_TEXT = 16384
"""Characters of an error: it may quote what a client sent, and is encoded, counted, logged and sent back."""


class ServeError(Exception):
    """A failure a client may see.

    `message` is safe to send: it names the field, the place and the limit, and holds no path,
    pointer, file descriptor or process id. `retry_after_s` is set where trying again makes sense.
    `step` is the error of an ensemble's step, when `message` names the ensemble besides.
    """

    step: "ServeError | None" = None

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        retry_after_s: float | None = None,
        reason: Reason = Reason.UNSPECIFIED,
    ) -> None:
        if len(message) > MOST_TEXT:
            message = message[:MOST_TEXT] + "..."
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.reason = reason


def worker_lost(message: str) -> ServeError:
    """Return the error of a request whose worker died; another worker starts in a moment."""
    again_s, reason = WORKER_RETRY_S, Reason.WORKER_LOST
    return ServeError(Kind.UNAVAILABLE, message, retry_after_s=again_s, reason=reason)


def server_starting(model: str = "") -> ServeError:
    """Return the error of a call that comes before the start has loaded what it needs: `model`, or all of
    them for ""."""
    what = f"model {model} is loading" if model else "its models are loading"
    text, reason = f"The server is starting: {what}", Reason.SERVER_STARTING
    return ServeError(Kind.UNAVAILABLE, text, retry_after_s=STARTING_RETRY_S, reason=reason)


def detach(error: E) -> E:
    """Return the error without its traceback and context. An error that is kept for later requests has to be
    detached: its frames hold the connection and the request that it was first raised for."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def invalid(message: str) -> ServeError:
    """Return an INVALID_ARGUMENT error: the request is at fault."""
    return ServeError(Kind.INVALID_ARGUMENT, message)


def internal(message: str) -> ServeError:
    """Return an INTERNAL error: this server is at fault, or an original says so of what it could not read."""
    return ServeError(Kind.INTERNAL, message)


def malformed_call(message: str) -> ServeError:
    """Return the error of a call that breaks gRPC's rules."""
    return ServeError(Kind.INTERNAL, message, reason=Reason.MALFORMED_CALL)


def unsupported(message: str) -> ServeError:
    """Return an UNIMPLEMENTED error."""
    return ServeError(Kind.UNIMPLEMENTED, message)


class NoDeviceError(ServeError):
    """There is no GPU that CUDA could use."""

    def __init__(self) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, "there is no GPU")


class ModelError(ServeError):
    """Error made by the model itself: an error among its responses, or an exception. Out of memory
    (RESOURCE_EXHAUSTED) suggests a retry after MEMORY_RETRY_S."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        retry_after_s: float | None = None,
        reason: Reason = Reason.UNSPECIFIED,
    ) -> None:
        if kind is Kind.RESOURCE_EXHAUSTED and retry_after_s is None:
            retry_after_s = MEMORY_RETRY_S
        super().__init__(kind, message, retry_after_s=retry_after_s, reason=reason)


class LimitError(ServeError):
    """A request is over a limit, whose setting is `setting`."""

    def __init__(self, message: str, setting: str) -> None:
        super().__init__(Kind.RESOURCE_EXHAUSTED, message)
        self.setting = setting


class RateLimitError(ServeError):
    """A request is over a limit of its client's on `resource` (requests, rows, tokens, concurrency): of it
    `remaining` is left, and all again in `reset_s`."""

    def __init__(
        self,
        message: str,
        resource: str,
        limit: float,
        remaining: float,
        retry_after_s: float,
        reset_s: float | None = None,
    ) -> None:
        super().__init__(
            Kind.RESOURCE_EXHAUSTED, message, retry_after_s=retry_after_s, reason=Reason.KEY_LIMIT
        )
        self.resource, self.limit, self.remaining = resource, limit, remaining
        self.reset_s = retry_after_s if reset_s is None else reset_s


class RemoteTrace(Exception):
    """A traceback of another process: the cause of an error that it raised there, for logs only."""


class ConfigError(ValueError):
    """A setting or a model configuration that cannot be used; the text names field and allowed values."""


class DeadlineError(ServeError):
    """The request's time was up; `queued` tells whether it had not begun to run."""

    def __init__(self, message: str, *, queued: bool, reason: Reason = Reason.UNSPECIFIED) -> None:
        super().__init__(Kind.DEADLINE_EXCEEDED, message, reason=reason)
        self.queued = queued


def install_text(packages: str, extra: str) -> str:
    """Return how missing packages are installed. The command names no extra, which would need the path of
    fastserve's wheel: on the package index the name belongs to another project."""
    return f"pip install {packages}, as fastserve's extra {extra} does"


def check_system() -> None:
    """Raise ConfigError on a system that no server runs on."""
    if sys.platform != "linux":
        raise ConfigError(
            f"a server needs Linux (memfd, eventfd, pidfd), and this is {sys.platform}: run it in a "
            "container or a virtual machine. Here are the clients, and BatchedService(..., in_process=True)"
        )
