"""A version's files on their way to another machine: listed, sent in pieces, kept in a cache.

There is no archive, so nothing is unpacked: the list has relative paths, sizes and SHA-256 sums; the worker
makes each file itself, in a fresh folder that gets its name when every sum is right.

    CACHE/<hash of the list>/...      complete; many workers of a machine share it, one at a time fills it
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from fastserve._ext.remote_batches import ProtocolFault
from fastserve.workers.remote.protocol import PIECE_BYTES, FileRequest

MOST_FILES = 100_000
MOST_BYTES = 1 << 42
_IGNORED = {"__pycache__"}
Read = Callable[[FileRequest], bytes]


class ShippedFile(msgspec.Struct, array_like=True, frozen=True):
    """One file: its path within the version's folder, its bytes and their SHA-256."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ShippedFolder:
    """The runner's end: the files of a folder, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = [_describe(folder, path) for path in _walk(folder)]
        self._list = msgspec.json.encode(self._files)
        self.hash = hashlib.sha256(self._list).hexdigest()

    def read(self, asked: FileRequest) -> bytes:
        """Return the list, or a piece of a file. Raises ProtocolFault for a file that is not on the list,
        OSError for one that cannot be read any more."""
        if asked.file < 0:
            return self._list[asked.at : asked.at + PIECE_BYTES]
        if asked.file >= len(self._files):
            raise ProtocolFault(f"a question for file {asked.file} of {len(self._files)}")
        with (self._folder / self._files[asked.file].path).open("rb") as file:
            file.seek(asked.at)
            return file.read(PIECE_BYTES)


def _walk(folder: Path) -> Iterator[Path]:
    for place, names, files in os.walk(folder, followlinks=False):
        names[:] = sorted(name for name in names if name not in _IGNORED)
        for name in sorted(files):
            path = Path(place, name)
            if path.is_file():  # no socket, no pipe, no broken link
                yield path


def _describe(folder: Path, path: Path) -> ShippedFile:
    with path.open("rb") as file:
        summed, nbytes = hashlib.sha256(), 0
        while piece := file.read(PIECE_BYTES):
            summed.update(piece)
            nbytes += len(piece)
    return ShippedFile(path.relative_to(folder).as_posix(), nbytes, summed.hexdigest())


def fetch_folder(wanted: str, cache: Path, read: Read) -> Path:
    """Return the folder of these files, out of the cache or by `read`. Raises ProtocolFault for what is not
    as the hash says, OSError."""
    target = cache / wanted
    if not all(c in "0123456789abcdef" for c in wanted) or len(wanted) != 64:
        raise ProtocolFault("a hash that is none")
    cache.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(cache / f".{wanted}.lock"):
        if target.is_dir():
            return target
        files = _read_list(wanted, read)
        needed = sum(file.nbytes for file in files)
        if needed > shutil.disk_usage(cache).free:
            raise OSError(28, f"the version takes {needed} bytes, more than {cache} has free")
        made = Path(tempfile.mkdtemp(prefix=f".{wanted[:16]}.", dir=cache))
        try:
            for number, file in enumerate(files):
                _fetch_file(made, number, file, read)
            made.rename(target)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return target


def _read_list(wanted: str, read: Read) -> list[ShippedFile]:
    data = b""
    while piece := read(FileRequest(-1, len(data))):
        data += piece
        if len(data) > MOST_FILES * 5000:
            raise ProtocolFault("a list of files that does not end")
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ProtocolFault("a list of files that is not the one that was announced")
    try:
        files = msgspec.json.decode(data, type=list[ShippedFile])
    except (msgspec.MsgspecError, ValueError) as fault:
        raise ProtocolFault("a list of files that is none") from fault
    if len(files) > MOST_FILES or sum(file.nbytes for file in files) > MOST_BYTES:
        raise ProtocolFault("more files or bytes than a version may have")
    for file in files:
        check_path(file.path)
    return files


def check_path(path: str) -> None:
    """Raise ProtocolFault for a path that is not plainly below its folder."""
    parts = PurePosixPath(path).parts
    plain = parts and "/".join(parts) == path and "\\" not in path and "\0" not in path
    if not plain or path.startswith("/") or ".." in parts:
        raise ProtocolFault("a file whose path is not below its folder")


def _fetch_file(folder: Path, number: int, file: ShippedFile, read: Read) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    summed, at = hashlib.sha256(), 0
    with target.open("xb") as out:
        while at < file.nbytes:
            piece = read(FileRequest(number, at))
            at += len(piece)
            if not piece or at > file.nbytes:
                raise ProtocolFault("a file of other bytes than were announced: it has changed meanwhile")
            summed.update(piece)
            out.write(piece)
    if summed.hexdigest() != file.sha256:
        raise ProtocolFault("a file of another content than was announced: it has changed meanwhile")


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
