"""Listening sockets that another program has opened and passed on: systemd's socket activation.

    LISTEN_PID=4711 LISTEN_FDS=2        descriptors 3 and 4 of process 4711 are listening sockets

A listener whose address is that of such a socket takes it in place of opening one. The program that opened it
keeps it: connections that nobody has accepted when a server stops wait for the next one, so such a socket is
closed here and nothing is done to it before. They wait while a server starts, too: it accepts when its models
are loaded, since another one may still serve there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence

from fastserve.errors import ConfigError
from fastserve.net.sockets import UNIX, resolve, shown

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
