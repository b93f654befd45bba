"""What the wire refuses by itself, before any dialect sees it. Not the faults of a dialect.

Every refusal is answered with a body that says which rule was broken, or which limit and under what
name it is set, and then the connection closes: what follows a broken request cannot be framed.
"""

from __future__ import annotations

import msgspec

JSON = b"application/json"
STRAY_TLS = "stray_tls"


class WireFault(Exception):
    """One refusal. `cause` is a short fixed word, counted by the listener."""

    def __init__(self, status: int, message: str, cause: str) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.body = error_body(message)


def error_body(message: str) -> bytes:
    """The JSON body of the wire's own errors."""
    return msgspec.json.encode({"error": message})


def bad_request(message: str) -> WireFault:
    """A request that breaks the grammar, or whose framing two readers could read in two ways."""
    return WireFault(400, message, "framing")


def stray_tls() -> WireFault:
    """A client that speaks TLS to a port that does not."""
    return WireFault(
        400, "Malformed method: these bytes begin TLS, and this port speaks plain text", STRAY_TLS
    )


def cut_off() -> WireFault:
    """A client that has sent its last byte in the middle of a request."""
    return WireFault(400, "Malformed request: the connection ended within it", "cut_off")


def over_limit(status: int, what: str, name: str, limit: int) -> WireFault:
    """`what` went over `limit`, which is set as limits.`name`."""
    return WireFault(status, f"{what} over the limit of {limit} (setting limits.{name})", name)


def too_slow(what: str, name: str, limit: float) -> WireFault:
    """The client took too long over `what`; the time or rate is set as limits.`name`."""
    return WireFault(408, f"{what}: the limit is {limit:g} (setting limits.{name})", name)


class UnknownMethod(WireFault):
    """A well-formed method this server does not have, TRACE and CONNECT included. A dialect that is by itself
    on its listener may answer it as its original does."""

    def __init__(self, method: str, target: str) -> None:
        super().__init__(501, f"the method {method} is not implemented", "method")
        self.method = method
        self.target = target
