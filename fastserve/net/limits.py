"""Refusals that need no dialect, and the time limits of connections. No I/O and no clock of its own.

A refusal's body names the rule that was broken, or the limit and the setting of it, and the connection
closes: the bytes after a broken request cannot be framed.

The listener looks at every connection about once a second. A phase is recognized by comparison
with the last look, so a request reads no clock; time limits are therefore kept to within one look.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import Enum

import msgspec

from fastserve.errors import ServeError
from fastserve.settings import Limits
from fastserve.util.memory_budget import REASON

JSON = b"application/json"
STRAY_TLS = "stray_tls"


class WireFault(Exception):
    """A request that is refused before any dialect sees it. `cause` is a short fixed word, counted by the
    listener."""

    def __init__(self, status: int, message: str, cause: str) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.body = error_body(message)


def error_body(message: str) -> bytes:
    """Return the JSON body of an error without a dialect."""
    return msgspec.json.encode({"error": message})


def bad_request(message: str) -> WireFault:
    """Return the fault of a request that breaks the grammar, or whose framing two readers could read in
    two ways."""
    return WireFault(400, message, "framing")


def is_tls(data: bytes | bytearray) -> bool:
    """Return whether these first bytes, few as they may be, begin a TLS handshake."""
    return data[:1] == b"\x16" and (len(data) < 2 or data[1] == 3)


def stray_tls() -> WireFault:
    """Return the fault of a client that speaks TLS to a plain-text port."""
    return WireFault(
        400, "Malformed method: these bytes begin TLS, and this port speaks plain text", STRAY_TLS
    )


class HeldBack(WireFault):
    """A request that is refused before its body is read; its dialect answers with `fault`."""

    def __init__(self, fault: ServeError, cause: str) -> None:
        super().__init__(503, fault.message, cause)
        self.fault = fault


class NoRoom(HeldBack):
    """A request that memory_bytes has no room for."""

    def __init__(self, fault: ServeError) -> None:
        super().__init__(fault, REASON)


class BodyRefused(HeldBack):
    """A body of a length that its route does not take."""

    def __init__(self, fault: ServeError) -> None:
        super().__init__(fault, "body_bytes")


class KeyRefused(HeldBack):
    """A request whose API key does not allow it, before its body is read."""

    def __init__(self, fault: ServeError) -> None:
        super().__init__(fault, "api_key")


def cut_off() -> WireFault:
    """Return the fault of a client that has sent FIN within a request."""
    return WireFault(400, "Malformed request: the connection ended within it", "cut_off")


def over_limit(status: int, what: str, name: str, limit: int) -> WireFault:
    """Return the fault of a request of which `what` went over `limit`, set as limits.`name`."""
    return WireFault(status, f"{what} over the limit of {limit} (setting limits.{name})", name)


def too_slow(what: str, name: str, limit: float) -> WireFault:
    """Return the fault of a client that took too long over `what`; the limit is set as limits.`name`."""
    return WireFault(408, f"{what}: the limit is {limit:g} (setting limits.{name})", name)


class UnknownMethod(WireFault):
    """A well-formed method that this server does not have, TRACE and CONNECT included. A dialect alone on
    its listener may answer it as its original does."""

    def __init__(self, method: str, target: str) -> None:
        super().__init__(501, f"the method {method} is not implemented", "method")
        self.method = method
        self.target = target


LINGER_S = 1.0  # how long a connection closed by us drops input, so that a reset cannot eat the reply


class Verdict(Enum):
    """Name what the listener has to do about a connection."""

    FINE = "fine"
    IDLE = "idle"
    SLOW_HEAD = "slow head"
    SLOW_BODY = "slow body"
    STALLED = "stalled"
    SLOW_REPLY = "slow reply"
    LINGERED = "lingered"


class ConnectionPhase(Enum):
    """Name what a connection is waiting for."""

    REQUEST = "request"  # nothing has been sent, nothing is owed
    HEAD = "head"
    BODY = "body"
    REPLY = "reply"  # the server's turn: no limit here
    END = "end"  # the last reply is out, the client should hang up


class DrainRate:
    """Judge how fast a client takes queued bytes, over stretches of limits.write_stall_s in which
    something is queued at every look."""

    __slots__ = ("_since_s", "_taken")

    def __init__(self) -> None:
        self._since_s = -1.0  # when this stretch began; below 0: nothing waited
        self._taken = 0

    def is_slow(self, waits: bool, taken: int, now: float, limits: Limits) -> bool:
        """Return whether the client is slower than limits.reply_bytes_per_s. `taken` counts bytes since
        any fixed time."""
        if not waits:
            self._since_s = -1.0
            return False
        passed = now - self._since_s
        if self._since_s >= 0 and passed < limits.write_stall_s:
            return False
        slow = self._since_s >= 0 and taken - self._taken < limits.reply_bytes_per_s * passed
        self._since_s, self._taken = now, taken
        return slow


class Timeouts:
    """Remember the previous look at a connection, and judge it against the time limits."""

    __slots__ = ("_calls", "_phase", "_received", "_since_s", "_taking", "_unsent", "_unsent_since_s")

    def __init__(self) -> None:
        self._phase = ConnectionPhase.REPLY
        self._calls = -1
        self._since_s = 0.0  # when this phase, or this stretch of a body, was first seen
        self._received = 0
        self._unsent = 0
        self._unsent_since_s = 0.0
        self._taking: DrainRate | None = None  # since something waited to be sent

    def judge(
        self,
        phase: ConnectionPhase,
        calls: int,
        received: int,
        unsent: int,
        taken: int,
        now: float,
        limits: Limits,
    ) -> Verdict:
        """Return the verdict of a look at `now` seconds.

        `calls` begun so far distinguish two phases of one kind. `received` counts body bytes, `unsent` bytes
        that the client has not taken, `taken` those it has (below 0: not known)."""
        if unsent or self._unsent:
            if self._is_stalled(unsent, now, limits.write_stall_s):
                return Verdict.STALLED
            if self._is_slow(unsent, taken, now, limits):
                return Verdict.SLOW_REPLY
        if phase is not self._phase or calls != self._calls or (phase is ConnectionPhase.END and unsent):
            self._phase = phase
            self._calls = calls
            self._since_s = now
            self._received = received
            return Verdict.FINE
        passed = now - self._since_s
        if phase is ConnectionPhase.REQUEST and passed >= limits.idle_timeout_s:
            return Verdict.IDLE
        if phase is ConnectionPhase.HEAD and passed >= limits.header_timeout_s:
            return Verdict.SLOW_HEAD
        if phase is ConnectionPhase.END and passed >= LINGER_S:
            return Verdict.LINGERED
        if phase is ConnectionPhase.BODY and passed >= limits.header_timeout_s:
            return self._judge_stretch(received, now, limits.body_bytes_per_s * passed)
        return Verdict.FINE

    def _is_stalled(self, unsent: int, now: float, limit_s: float) -> bool:
        if unsent == 0 or unsent < self._unsent or self._unsent == 0:
            self._unsent_since_s = now
        self._unsent = unsent
        return unsent > 0 and now - self._unsent_since_s >= limit_s

    def _is_slow(self, unsent: int, taken: int, now: float, limits: Limits) -> bool:
        if self._taking is None:
            self._taking = DrainRate()
        return self._taking.is_slow(unsent > 0 and taken >= 0, taken, now, limits)

    def _judge_stretch(self, received: int, now: float, least: float) -> Verdict:
        """Judge a body's rate over this stretch: it must keep the rate over each one."""
        if received - self._received < least:
            return Verdict.SLOW_BODY
        self._since_s = now
        self._received = received
        return Verdict.FINE


_INFO_BYTES, _ACKED = 128, 120  # of struct tcp_info: up to tcpi_bytes_acked, and where that stands


def acked_bytes(transport: asyncio.BaseTransport) -> int:
    """Return the bytes that TCP says the peer has acknowledged; -1 for a closed socket, or one that is
    not TCP's."""
    found = None if transport.is_closing() else transport.get_extra_info("socket")
    if found is None or found.family == socket.AF_UNIX:
        return -1
    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    acked: int = struct.unpack_from("=Q", info, _ACKED)[0] if len(info) == _INFO_BYTES else -1
    return acked


def slowness(verdict: Verdict, limits: Limits) -> WireFault:
    """Return the fault that a slow client is answered with."""
    if verdict is Verdict.SLOW_HEAD:
        return too_slow(
            "The header block did not arrive in time", "header_timeout_s", limits.header_timeout_s
        )
    text = "The request body arrives too slowly, in bytes per second"
    return too_slow(text, "body_bytes_per_s", limits.body_bytes_per_s)
