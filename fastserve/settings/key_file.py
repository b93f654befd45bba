"""The file of API keys: its form, how it is read, and how entries are added and removed.

    keys:
    - name: search
      scopes: [infer, metadata]
      id: 5f0c19aa8d21
      hash: 9b1f...:3c77...             the salt, and SHA-256 of salt and key, both in hexadecimal
      expires: "2027-01-01T00:00:00Z"
      models: [search-*, rank]          patterns of the models that it may use; without any, all
      requests_per_second: 50
      rows_per_second: 400
      tokens_per_second: 1000
      concurrency: 8                    requests under way
      weight: 3                         its share under overload; without it 1
    - name: dashboards
      scopes: [metrics]
      subject: CN=grafana,O=example      a client's certificate in place of a key

A key is `fs_ID_SECRET`: the id finds its entry, the secret has 256 random bits. So one round of SHA-256 is
enough: there is nothing to guess that a slow hash would make slower (docs/decisions/0031).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.errors import ConfigError
from fastserve.settings.fields import convert

ScopeName = Literal["health", "metadata", "metrics", "infer", "admin"]
WHOLE_SERVER: tuple[ScopeName, ...] = ("metrics", "admin")
ALLOWED = "allowed: health, metadata, infer"
KEY = re.compile(rb"fs_([0-9a-f]{12})_[A-Za-z0-9_\-]{43}")
_HASH = re.compile("[0-9a-f]{32}:[0-9a-f]{64}")
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
HEADER = "# Keys of clients, by their hashes: `fastserve key new|list|revoke`, which write this file anew.\n"


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client: the hash of its key, or the subject of its certificate, and what it may do."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")]
    """Name of the client, once in a file."""
    scopes: Annotated[tuple[ScopeName, ...], Meta(min_length=1)]
    """Kinds of access: health, metadata, metrics, infer, admin."""
    id: Annotated[str, Meta(pattern="^([0-9a-f]{12})?$")] = ""
    """The part of the key that is no secret."""
    hash: str = ""
    """SALT:SHA256 of the key."""
    subject: str = ""
    """The subject of a client's certificate, as CN=name,O=company."""
    expires: str = ""
    """Date, or date and time with a zone, from which it is refused; empty: never."""
    models: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    """Patterns of the names of the models that it may use (*, ?, [abc]); none: all models."""
    requests_per_second: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Requests a second over all front processes, after a second's worth at once; 0: any number."""
    rows_per_second: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Rows a second that models run for it, over all front processes; 0: any number."""
    tokens_per_second: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Tokens a second of its prompts and answers, over all front processes; 0: any number."""
    concurrency: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Requests under way at a time over all front processes; 0: any number."""
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Its share of a model that has more requests than it can run."""

    def __post_init__(self) -> None:
        if bool(self.hash) == bool(self.subject) or bool(self.id) != bool(self.hash):
            raise ValueError("id, hash, subject: allowed: id and hash, or subject alone")
        if self.hash and _HASH.fullmatch(self.hash) is None:  # not shown: somebody may have put a key there
            raise ValueError(
                "hash: allowed: SALT:SHA256, both in hexadecimal, as `fastserve key new` writes it"
            )
        if self.expires:
            read_time(self.expires)
        if self.models and (whole := [scope for scope in self.scopes if scope in WHOLE_SERVER]):
            raise ValueError(f"models: given with the scope {whole[0]}, of the whole server; {ALLOWED}")

    @property
    def expires_at(self) -> float:
        """Unix seconds from which it is refused; infinite without a date."""
        return read_time(self.expires).timestamp() if self.expires else float("inf")

    def fits(self, key: bytes) -> bool:
        """Return whether this is the entry's key. The time taken does not depend on where they differ."""
        salt, _, digest = self.hash.partition(":")
        return compare_digest(_digest(bytes.fromhex(salt), key), digest)


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of keys."""

    keys: tuple[KeyEntry, ...]
    """The clients. None: nobody has a key."""

    def __post_init__(self) -> None:
        for what in ("name", "id", "subject"):
            given = Counter(getattr(entry, what) for entry in self.keys)
            twice = next((value for value, count in given.items() if value and count > 1), "")
            if twice:
                raise ValueError(f'keys: given {what} "{twice}" twice, allowed: once')


def _digest(salt: bytes, key: bytes) -> str:
    return hashlib.sha256(salt + key).hexdigest()


def read_time(text: str) -> datetime:
    """Return a date, or a date and time; without a zone it is UTC. Raises ValueError."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f'expires: given "{text}", allowed: 2027-01-31, or 2027-01-31T12:00:00Z') from None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def read_expiry(text: str, now: datetime) -> str:
    """Return a date, or a duration such as 90d, as `expires` has it. Raises ValueError."""
    duration = _DURATION.fullmatch(text)
    found = now + timedelta(**{_UNITS[duration[2]]: int(duration[1])}) if duration else read_time(text)
    return found.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_keys(path: Path) -> KeyFile:
    """Read a file of keys. Raises ConfigError, which shows no hash."""
    return KeyFileReader(path).read()


class KeyFileReader:
    """Reads a file of keys again and again. An entry that is written as before is the same object as before.

    A server reads its keys while it serves: 300 take 3 ms the first time, 0.4 ms when one has changed, and
    150 ms where the file is not in the form of `fastserve key`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, KeyEntry] = {}  # by what the file says

    def read(self) -> KeyFile:
        """Read the file. Raises ConfigError, which shows no hash."""
        from fastserve.settings.config_files import parse_yaml, read_text

        path = self._path
        try:
            text = read_text(path, path.name)
            found = self._read_known(text)
            if found is not None:
                return found
            tree = _read_as_written(text) or parse_yaml(text, path.name)
        except ConfigError as fault:
            raise ConfigError(f"keys: {fault}") from None
        return convert(tree, KeyFile, str(path.name))

    def _read_known(self, text: str) -> KeyFile | None:
        """Return the content of a text in the form of `_as_yaml` without faults, None for any other."""
        known = self._known
        try:
            pieces = _split_as_written(text)
            entries = {piece: known.get(piece) or _convert_entry(piece) for piece in pieces}
            found = KeyFile(tuple([entries[piece] for piece in pieces]))
        except ValueError:
            return None  # `convert` says of the whole what is wrong
        self._known = entries
        return found


_LINE = re.compile(r"  ([a-z_]+): (.+)")


def _read_as_written(text: str) -> dict[str, Any] | None:
    """Return the tree of a text in the form of `_as_yaml`, None for any other."""
    try:
        return {"keys": [_read_entry(piece) for piece in _split_as_written(text)]}
    except ValueError:
        return None


def _split_as_written(text: str) -> list[str]:
    """Return the texts of the entries. Raises ValueError for a text that is not in the form of `_as_yaml`."""
    head, _, rest = text.partition("keys:\n")
    before, *pieces = ("\n" + rest.rstrip("\n")).split("\n- ")
    if not pieces or any(line and not line.startswith("#") for line in (head + before).splitlines()):
        raise ValueError("not as written")
    return pieces


def _read_entry(piece: str) -> dict[str, Any]:
    """Return the fields of the text of an entry. Raises ValueError."""
    entry: dict[str, Any] = {}
    for line in f"  {piece}".splitlines():
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1] in entry:
            raise ValueError("not as written")
        entry[match[1]] = msgspec.json.decode(match[2])
    return entry


def _convert_entry(piece: str) -> KeyEntry:
    """Return an entry of its text. Raises ValueError."""
    return msgspec.convert(_read_entry(piece), KeyEntry)


def make_key(name: str, scopes: Sequence[ScopeName], expires: str = "", **more: Any) -> tuple[str, KeyEntry]:
    """Return a new key and its entry, which does not have the key in it; `more` are further fields of it."""
    ident, salt = secrets.token_hex(6), secrets.token_bytes(16)
    key = f"fs_{ident}_{secrets.token_urlsafe(32)}"
    hashed = f"{salt.hex()}:{_digest(salt, key.encode())}"
    return key, KeyEntry(name, tuple(scopes), ident, hashed, expires=expires, **more)


@contextlib.contextmanager
def changing(path: Path) -> Iterator[list[KeyEntry]]:
    """Yield the entries of a file for changes, and then write it: as a whole, readable by its owner alone,
    one writer at a time. Nothing is written after an exception. Raises ConfigError, OSError."""
    path = Path(os.path.realpath(path))  # a link stays one
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = list(read_keys(path).keys) if path.exists() else []
        yield entries
        _write(path, convert({"keys": msgspec.to_builtins(entries)}, KeyFile, path.name))
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, keys: KeyFile) -> None:
    """Replace the file. An existing one keeps its owner, who may be the server's user."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "w", encoding="utf-8") as out:
            if path.exists():
                was = path.stat()
                if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file, was.st_uid, was.st_gid)
            out.write(_as_yaml(keys))
            out.flush()
            os.fsync(file)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _as_yaml(keys: KeyFile) -> str:
    lines = [HEADER, "keys:\n" if keys.keys else "keys: []\n"]
    for entry in keys.keys:
        given = {name: value for name, value in msgspec.structs.asdict(entry).items() if value}
        lead = "- "
        for name, value in given.items():
            lines.append(f"{lead}{name}: {json.dumps(value)}\n")
            lead = "  "
    return "".join(lines)
