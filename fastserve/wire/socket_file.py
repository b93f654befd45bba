"""A listening socket with a name in the file system, `unix:PATH`: whose file it is, from open to close.

A file that somebody listens on is theirs, and one that is no socket is left alone; a socket that nobody
listens on was left by a server that was killed, and goes. Who may connect is who may write to the file: its
mode is 0777 without the bits of the process's umask. It is removed before the listener closes, unless it is
another by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

UNIX = "unix:"


class SocketFile:
    """The name of a socket that listens here."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """No new connection begins. Idempotent; another server's file of this name stays."""
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                os.unlink(self._path)


def bind_file(path: str) -> socket.socket:
    """A socket that listens: until it does, it looks to others like one that was left behind. Raises OSError
    where the name is taken, or cannot be had."""
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
        probe.setblocking(False)  # a full queue of connections is somebody's
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
