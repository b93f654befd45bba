"""Files whose name came from a config or a client. Workers import this file, and no YAML with it.

    read_confined(model_folder, "labels.txt", 1 << 20)     refused: "../x", "/etc/passwd", links that lead out

A confined file is inside its folder, regular, of bounded size. Links are followed as far as they stay inside.
Every folder on the way is opened without following links, so what was checked is what is opened, and the file
without waiting, so that a pipe or a device holds nobody up.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fastserve.errors import ConfigError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PIECE = 1 << 20


def is_inner_path(name: str) -> bool:
    """Return whether a name is that of a file below a folder, written without ".."."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def read_confined(folder: Path, name: str, most_bytes: int) -> bytes:
    """Return the bytes of file `name` inside `folder`. Raises ConfigError, which begins with the name."""
    with open_confined(folder, name, most_bytes) as file:
        data = bytearray()
        while len(data) <= most_bytes and (piece := file.read(min(_PIECE, most_bytes + 1 - len(data)))):
            data += piece
    if len(data) > most_bytes:  # files of /proc say 0 and are not empty
        raise _too_large(name, most_bytes)
    return bytes(data)


def open_confined(folder: Path, name: str, most_bytes: int) -> BinaryIO:
    """Open file `name` inside `folder`. Its size is checked now; it may grow. Raises ConfigError."""
    try:
        fd = _open(folder, name)
    except OSError as fault:
        raise ConfigError(f"{name!a}: cannot be read: {os.strerror(fault.errno or 0)}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{name!a}: not a regular file")
        if found.st_size > most_bytes:
            raise _too_large(name, most_bytes)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _too_large(name: str, most_bytes: int) -> ConfigError:
    return ConfigError(f"{name!a}: larger than {most_bytes} bytes")


def _open(folder: Path, name: str) -> int:
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / name)) if is_inner_path(name) else Path()
    if not real.is_relative_to(root) or real == root:
        raise ConfigError(f"{name!a}: leads out of its folder")
    *folders, last = real.relative_to(root).parts
    at = os.open(root, _FOLDER)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(last, _FILE, dir_fd=at)
    except OSError as fault:
        if fault.errno == errno.ELOOP:  # a link where there was none a moment ago
            raise ConfigError(f"{name!a}: leads out of its folder") from None
        raise
    finally:
        os.close(at)
