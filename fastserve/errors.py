"""What can go wrong, in the words every dialect shares.

A fault is raised once, as a `ServeError` with one of the canonical kinds; each dialect says in one table
which status each has. Nothing here knows HTTP or gRPC.
"""

from enum import Enum


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


MEMORY_RETRY_S = 1.0
MOST_TEXT = 16384
"""Characters of an error: it may quote what a client sent, and is encoded, counted, logged and sent back."""


class ServeError(Exception):
    """A failure a client may see.

    `message` is safe to send: it names the field, the place and the limit, and holds no path,
    pointer, file descriptor or process id. `retry_after_s` is set where trying again makes sense.
    """

    def __init__(self, kind: Kind, message: str, *, retry_after_s: float | None = None) -> None:
        if len(message) > MOST_TEXT:
            message = message[:MOST_TEXT] + "..."
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s


def invalid(message: str) -> ServeError:
    """What is wrong with a request."""
    return ServeError(Kind.INVALID_ARGUMENT, message)


def internal(message: str) -> ServeError:
    """What is wrong with this server, or in an original's words with what it could not read."""
    return ServeError(Kind.INTERNAL, message)


def unsupported(message: str) -> ServeError:
    """What is not to be had here."""
    return ServeError(Kind.UNIMPLEMENTED, message)


class NoDeviceError(ServeError):
    """There is no GPU that CUDA could use."""

    def __init__(self) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, "there is no GPU")


class ModelError(ServeError):
    """What the model itself answered a request with: an error among its responses, or an exception. What it
    had no memory for it may have memory for later."""

    def __init__(self, kind: Kind, message: str, *, retry_after_s: float | None = None) -> None:
        if kind is Kind.RESOURCE_EXHAUSTED and retry_after_s is None:
            retry_after_s = MEMORY_RETRY_S
        super().__init__(kind, message, retry_after_s=retry_after_s)


class RemoteTrace(Exception):
    """A traceback of another process: the cause of an error that it raised there, for logs only."""


class ConfigError(ValueError):
    """A setting or a model configuration that cannot be used; the text names field and allowed values."""


class DeadlineError(ServeError):
    """The request's time was up; `queued` tells whether it had not begun to run."""

    def __init__(self, message: str, *, queued: bool) -> None:
        super().__init__(Kind.DEADLINE_EXCEEDED, message)
        self.queued = queued
