"""Listening sockets: bound by address or file, and closed without resetting clients that are about to be
accepted.

A file in use belongs to its server, and a file that is no socket is left alone; a socket without a listener
was left by a server that was killed, and is removed. Clients need write permission to the file: its mode is
0777 without the bits of the process's umask.

Closing a listening socket resets the connections that nobody has accepted yet, with the requests that their
clients have sent on them meanwhile; AcceptGate avoids that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any

UNIX = "unix:"


class AddressError(OSError):
    """An address that cannot be listened on; `place` is the address as settings write it."""

    def __init__(self, errno: int | None, text: str, place: str) -> None:
        super().__init__(errno, text)
        self.place = place


class SocketFile:
    """The file of a listening UNIX socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Remove the file: no new connection begins. Idempotent; another server's file of this name stays."""
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                os.unlink(self._path)


def bind_file(path: str) -> socket.socket:
    """Return a listening UNIX socket; until it listens, it looks like one that was left behind. Raises
    OSError where the name is taken, or cannot be had."""
    clear(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        listening.listen()
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def clear(path: str) -> None:
    """Remove a socket that nobody listens on. Raises OSError for any other file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue of connections means a listener
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


# A handshake under way ends within a round trip: across the world that is so long. Over loopback it is some
# microseconds, but a processor may be taken away in the midst of it, and a client may keep back the last
# acknowledgement until it sends something.
HANDSHAKE_S, LOOPBACK_S = 0.2, 0.05
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the module socket does not name it
# Classic BPF over the TCP header: drop a segment that has SYN and not ACK.
_DROP_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of flags
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # take
    )
)


class AcceptGate:
    """A bound socket that closes without resetting connections which nobody has accepted yet.

    First a filter drops SYNs (their clients try again a second later), handshakes under way finish and
    are accepted, then the socket is closed. An `inherited` socket is another process's to shut: that one
    accepts what is left, or keeps it for the next server."""

    def __init__(self, listening: socket.socket, *, inherited: bool = False) -> None:
        self.listening = listening
        self._inherited = inherited
        self._file = SocketFile(listening.getsockname()) if listening.family == socket.AF_UNIX else None

    @property
    def place(self) -> tuple[str, int]:
        """Return host and port, or "unix:PATH" and 0."""
        name = self.listening.getsockname()
        return (UNIX + name, 0) if self._file else (name[0], name[1])

    def shut(self) -> float:
        """Let no new connection begin. Returns the seconds after which all that had begun can be
        accepted, 0 for a file."""
        if self._inherited:
            return 0.0
        if self._file is None:
            return _shut(self.listening)
        self._file.remove()
        return 0.0


def _shut(listening: socket.socket) -> float:
    code = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    program = struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(code))
    with contextlib.suppress(OSError):  # a kernel without filters: what is accepted by then is what there is
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    return LOOPBACK_S if _is_loopback(listening.getsockname()[0]) else HANDSHAKE_S


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def shown(host: str, port: int) -> str:
    """Return a place as settings and messages write it."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_socket(address: str, port: int) -> socket.socket:
    """Return a bound socket; one of a file listens. "" and "::" take IPv4 and IPv6 where the machine has
    both. Raises OSError, whose text names the place."""
    with _named(address, port):
        if address.startswith(UNIX):
            return bind_file(address.removeprefix(UNIX))
        return _bind(address, port)


@contextlib.contextmanager
def _named(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = shown(address, port)
        text = f"cannot listen on {place}: {error.strerror or error}"
        raise AddressError(error.errno, text, place) from error


def resolve(address: str, port: int) -> tuple[int, int, int, tuple[Any, ...]]:
    """Return family, type, protocol and socket address of a TCP address. Raises socket.gaierror."""
    host = address or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, kind, protocol, place


def _bind(address: str, port: int) -> socket.socket:
    family, kind, protocol, place = resolve(address, port)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(place[0] != "::"))
        listening.bind(place)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
