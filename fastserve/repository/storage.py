"""The local mirror of a model repository that lies in an object store.

    mirror = open_mirror("s3://bucket/models", options)     fetches it; mirror.path is a folder as any other
    mirror.sync()                                           looks again: True if there is a new snapshot

    CACHE/NAME-DIGEST/NAME        a link to the files of the snapshot in use, moved by one rename
                     /snapshots/NUMBER/files/...       a whole copy that never changes; equal files are one
                     /snapshots/NUMBER/manifest.json   ETag and size of each
                     /incoming/                        files on their way; whole ones wait for the next try

The server looks at `mirror.path` as at any repository. A snapshot appears under it only when every file has
the ETag and the size that the store listed and is on the disk, so a process that is killed, or a store that
stalls, lies or fails, leaves what was served before. A snapshot is removed once no process has it open: each
holds a lock on the manifests of those that it uses. Everything here blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fastserve.errors import ConfigError
from fastserve.repository.storage_sources import (
    ARCHIVES,
    Source,
    StorageError,
    StoredFile,
    open_source,
    unpack,
)
from fastserve.settings import StorageOptions

log = logging.getLogger(__name__)
LOCK_LOOK_S = 0.2
LOCK_LOG_S = 10.0


class Manifest(msgspec.Struct, frozen=True):
    """The files that a snapshot is a copy of: by path, the ETag and size that the store listed."""

    uri: str
    files: dict[str, tuple[str, int]]


def open_mirror(uri: str, options: StorageOptions) -> Mirror:
    """Fetch what a URI names, and return its mirror. Without the store the copy of an earlier run serves.
    Raises ConfigError where there is neither."""
    mirror = Mirror(uri, open_source(uri, options), options)
    try:
        mirror.sync()
    except (StorageError, OSError) as error:
        if not mirror.adopt():
            raise ConfigError(f"repository: {uri}: {error}") from None
        mirror.trouble = str(error)
        log.warning("%s cannot be fetched: the copy of before is served: %s", uri, error)
    return mirror


class Mirror:
    """One URI's folder in the cache. `trouble` says why the last look failed; "" where it did not."""

    def __init__(self, uri: str, source: Source, options: StorageOptions) -> None:
        self.uri, self._source, self._options = uri, source, options
        title = _title(uri)
        digest = hashlib.sha256(uri.encode()).hexdigest()[:16]
        self.folder = cache_folder(options) / f"{title}-{digest}"
        self.path = self.folder / title
        self.trouble = ""
        self.synced_at = 0.0
        self.bytes = 0
        self._held: dict[Path, int] = {}  # snapshot -> descriptor with a shared lock
        try:
            for name in ("snapshots", "incoming"):
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"storage.cache: {self.folder}: {error.strerror}") from None

    def adopt(self) -> bool:
        """Use the snapshot that the link names, of this server or another. False: there is none."""
        for _ in range(3):  # another server may move the link meanwhile
            snapshot = self._current()
            if snapshot is None:
                return False
            if self._hold(snapshot):
                self.bytes = _tree_bytes(snapshot)
                return True
        return False

    def sync(self) -> bool:
        """Fetch what has changed in the store; return whether there is a new snapshot. Raises StorageError,
        OSError: what was served stays."""
        listed = self._source.list()
        if not listed:
            raise StorageError("no file is below the address")
        announced = sum(max(0, one.size) for one in listed.values())
        if announced > self._options.max_bytes:
            raise StorageError(
                f"it holds {announced} bytes, storage.max_bytes allows {self._options.max_bytes}"
            )
        with self._lock():
            self.adopt()
            changed = self._manifest() != self._wanted(listed)
            if changed:
                self._make(listed)
                self.adopt()
            self._remove_unused()
        self.trouble, self.synced_at = "", time.time()
        return changed

    def release(self, used: set[Path]) -> None:
        """Let go of snapshots that no version runs from; `used` are folders that versions have."""
        current = self._current()
        for snapshot in list(self._held):
            if snapshot != current and not any(snapshot in folder.parents for folder in used):
                os.close(self._held.pop(snapshot))

    def close(self) -> None:
        """Let go of all snapshots. The cache stays."""
        for held in self._held.values():
            os.close(held)
        self._held.clear()

    def _current(self) -> Path | None:
        try:
            return (self.folder / os.readlink(self.path)).parent
        except OSError:
            return None

    def _manifest(self) -> Manifest | None:
        snapshot = self._current()
        try:
            return None if snapshot is None else _read_manifest(snapshot)
        except (OSError, msgspec.MsgspecError):
            return None

    def _wanted(self, listed: Mapping[str, StoredFile]) -> Manifest:
        return Manifest(self.uri, {path: (one.tag, one.size) for path, one in sorted(listed.items())})

    def _hold(self, snapshot: Path) -> bool:
        if snapshot in self._held:
            return True
        try:
            held = os.open(snapshot / "manifest.json", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.stat(snapshot / "manifest.json")  # else it was removed before the lock
        except OSError:
            os.close(held)
            return False
        self._held[snapshot] = held
        return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Of the servers that share the cache one fetches at a time; the others wait, and find it fetched."""
        held = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        said = time.monotonic()
        try:
            while True:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - said > LOCK_LOG_S:
                        said = time.monotonic()
                        log.warning("%s: another server fetches %s", self.folder, self.uri)
                    time.sleep(LOCK_LOOK_S)
            yield
        finally:
            os.close(held)

    # --- a new snapshot, under the lock ---------------------------------------------------------------

    def _make(self, listed: Mapping[str, StoredFile]) -> None:
        before, manifest = self._current(), self._manifest()
        known = manifest.files if manifest is not None else {}
        wanted = self._wanted(listed)
        self._clear_incoming(keep={_part_name(path, one) for path, one in listed.items()})
        building = self.folder / "incoming" / f"snapshot-{time.time_ns()}"
        left = self._options.max_bytes - _tree_bytes(self.folder)
        (building / "files").mkdir(parents=True)
        for path, one in listed.items():
            place = building / "files" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if before is not None and not self._source.archive and known.get(path) == (one.tag, one.size):
                os.link(before / "files" / path, place)
                continue
            part, size = self._fetch(path, one, left)
            left -= size
            if self._source.archive:
                try:
                    left -= unpack(part, building / "files", left)
                finally:
                    part.unlink()  # a damaged one is fetched anew
            else:
                os.link(part, place)
        _write_synced(building / "manifest.json", msgspec.json.encode(wanted))
        _sync_folders(building)
        snapshot = self.folder / "snapshots" / str(time.time_ns())
        os.rename(building, snapshot)
        _sync_folder(snapshot.parent)
        self._point_to(snapshot)
        self._clear_incoming(keep=set())

    def _fetch(self, path: str, one: StoredFile, left: int) -> tuple[Path, int]:
        """Return the whole file, fetched now or by an earlier try, and how many bytes came now."""
        whole = self.folder / "incoming" / _part_name(path, one)
        if whole.exists():
            return whole, 0
        if max(one.size, 0) > left:
            raise StorageError(f"{path} has {one.size} bytes, storage.max_bytes leaves {max(left, 0)}")
        part = whole.with_suffix(".part")
        with part.open("wb") as file:
            size = self._source.fetch(path, one, file, left)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, whole)
        return whole, size

    def _point_to(self, snapshot: Path) -> None:
        link = self.folder / f".{self.path.name}.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join("snapshots", snapshot.name, "files"))
        os.rename(link, self.path)
        _sync_folder(self.folder)

    def _clear_incoming(self, keep: set[str]) -> None:
        for one in (self.folder / "incoming").iterdir():
            if one.name not in keep:
                shutil.rmtree(one) if one.is_dir() else one.unlink()

    def _remove_unused(self) -> None:
        current = self._current()
        for snapshot in (self.folder / "snapshots").iterdir():
            if snapshot in self._held or snapshot == current:
                continue
            try:
                held = os.open(snapshot / "manifest.json", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                shutil.rmtree(snapshot, ignore_errors=True)  # half removed
                continue
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (snapshot / "manifest.json").unlink()
                shutil.rmtree(snapshot, ignore_errors=True)
            except BlockingIOError:
                pass  # another server runs models from it
            finally:
                os.close(held)


def cache_folder(options: StorageOptions) -> Path:
    """Return the folder of all mirrors."""
    if options.cache:
        return Path(options.cache).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastserve" / "storage"


def _title(uri: str) -> str:
    """Return what the folder of a URI is called, which names the model where it holds only one."""
    parts = urlsplit(uri)
    last = f"{parts.netloc}{parts.path}".rstrip("/").rpartition("/")[2].partition("@")[0]
    for ending in ARCHIVES:
        last = last.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9_.-]", "-", last).strip(".")[:100] or "models"


def _part_name(path: str, one: StoredFile) -> str:
    return hashlib.sha256(f"{path}\0{one.tag}\0{one.size}".encode()).hexdigest()


def _read_manifest(snapshot: Path) -> Manifest:
    return msgspec.json.decode((snapshot / "manifest.json").read_bytes(), type=Manifest)


def _tree_bytes(folder: Path) -> int:
    """Return the bytes of a tree's files; a file with several names counts once."""
    seen: dict[int, int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(root, name))
            seen[found.st_ino] = found.st_size
    return sum(seen.values())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _sync_folders(folder: Path) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        _sync_folder(Path(root))
