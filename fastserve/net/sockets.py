"""Listening sockets: bound by address or file, or inherited, and closed without resetting waiting clients.

A file in use belongs to its server, and a file that is no socket is left alone; a socket without a listener
was left by a server that was killed, and is removed. Clients need write permission to the file: its mode is
0777 without the bits of the process's umask.

Closing a listening socket resets the connections that nobody has accepted yet, with the requests that their
clients have sent on them meanwhile; AcceptGate avoids that.

Another program may have opened listening sockets and passed them on (systemd's socket activation):

    LISTEN_PID=4711 LISTEN_FDS=2        descriptors 3 and 4 of process 4711 are listening sockets

A listener whose address is that of such a socket takes it in place of opening one. The program that opened it
keeps it: connections that nobody has accepted when a server stops wait for the next one, so such a socket is
closed here and nothing is done to it before. They wait while a server starts, too: it accepts when its models
are loaded, since another one may still serve there.
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
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from fastserve.errors import ConfigError

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


FIRST = 3  # sd_listen_fds(3)
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")

Place = tuple[str, int]  # host and port as the socket has them, or "unix:PATH" and 0


class InheritedSockets:
    """Sockets by the place that they listen on. `find` gives each caller a descriptor of its own."""

    def __init__(self, sockets: Sequence[socket.socket] = ()) -> None:
        self._sockets = {_place_of(one): one for one in sockets}
        self._unclaimed = dict.fromkeys(self._sockets)

    def __bool__(self) -> bool:
        return bool(self._sockets)

    def find(self, address: str, port: int) -> socket.socket | None:
        """Return a socket for this listener's address; None where none was passed on for it."""
        place = self._key(address, port) if self._sockets else None
        if place is None:
            return None
        self._unclaimed.pop(place, None)
        return self._sockets[place].dup()

    def check(self) -> None:
        """Raise ConfigError if no listener has taken one: its clients would wait for ever."""
        if self._unclaimed:
            places = [shown(*place) for place in self._unclaimed]
            raise ConfigError(
                f"LISTEN_FDS: given a socket on {', '.join(places)}, allowed: listeners' addresses, such as "
                f"--listen {places[0]}"
            )

    def _key(self, address: str, port: int) -> Place | None:
        place = (address, 0) if address.startswith(UNIX) else _resolved(address, port)
        return place if place in self._sockets else None


def _resolved(address: str, port: int) -> Place | None:
    try:
        *_, place = resolve(address, port)
    except socket.gaierror:  # opening it will say so, with the address
        return None
    return str(place[0]), int(place[1])


def _place_of(one: socket.socket) -> Place:
    name = one.getsockname()
    if one.family == socket.AF_UNIX:
        return (f"{UNIX}{name}", 0) if isinstance(name, str) else (f"{UNIX}@{name[1:].decode()}", 0)
    return str(name[0]), int(name[1])


def take_inherited(environment: MutableMapping[str, str]) -> InheritedSockets:
    """Return the sockets that the variables announce to this process, and remove the variables: no child is
    meant. Raises ConfigError for a descriptor that is no listening socket."""
    pid, count, _ = (environment.pop(name, "") for name in VARIABLES)
    if pid != str(os.getpid()):
        return InheritedSockets()
    if not count.isdecimal():
        raise ConfigError(f'LISTEN_FDS: given "{count}", allowed: a whole number from 0 on')
    return take_descriptors(range(FIRST, FIRST + int(count)))


def take_descriptors(fds: Sequence[int]) -> InheritedSockets:
    """Return the sockets of these descriptors, which they own from then on. Raises ConfigError for one that
    is no listening socket of streams."""
    return InheritedSockets([_open(fd) for fd in fds])


def _open(fd: int) -> socket.socket:
    try:
        found = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"descriptor {fd} of LISTEN_FDS: {error.strerror}") from error
    listens = found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens:
        found.detach()
        raise ConfigError(
            f"descriptor {fd} of LISTEN_FDS: given no listening socket, allowed: one of ListenStream= with "
            "Accept=no"
        )
    found.set_inheritable(False)
    found.setblocking(False)
    return found
