"""Reads files of object stores, of archives at a URL and of models on the Hugging Face Hub.

    source = open_source("s3://bucket/models", options)
    files = source.list()                       path below the URI -> its ETag and size
    source.fetch("resnet/1/model.onnx", files[...], target)

obstore does all of it (docs/decisions/0044-object-stores-are-mirrored.md): credentials, endpoints and retries
are by its rules. What a store says is checked: paths stay below the folder they are written to, a file has
the ETag and the size that were listed, or StorageError is raised. Everything here blocks.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from fastserve.errors import ConfigError, install_text
from fastserve.settings import StorageOptions
from fastserve.settings.fields import fault_text

BUCKETS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
SCHEMES = (*BUCKETS, "https", "http", "hf")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
MOST_FILES = 100_000
MOST_DEPTH, LONGEST_PATH = 32, 1024
CHUNK = 1 << 20
HUB, HUB_VARIABLE, TOKEN_VARIABLE = "https://huggingface.co", "HF_ENDPOINT", "HF_TOKEN"
HUB_JSON_BYTES = 16 << 20
UNUSED_ON_HUB = (".h5", ".msgpack", ".ot", ".tflite", ".bin", ".pt", ".pth")
"""Endings of a Hub model's weights for other frameworks, where it has them as safetensors too."""
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
METADATA = ("/latest/api/token", "/latest/meta-data", "/computeMetadata/", "&resource=https%3A%2F%2Fstorage")
"""Parts of addresses at which the clouds' metadata services give credentials to their machines."""
SIGNS = {
    "dns error": "is no host that is known here",
    "ConnectionRefused": "refuses the connection",
    "InvalidCertificate": "has a certificate that is not trusted here",
    "TimedOut": "does not answer in time",
}
"""Signs of why no answer came, in the library's description of an error."""
_ASKED = re.compile(r"Error performing [A-Z]+ (https?://\S+) in ")
_STATUS = re.compile(r"non-2xx status code: (\d{3})([^:<]{0,40})")
_GENERIC = re.compile(r"^Generic \w+ error: ")
_CODE = re.compile(r"<Code>([A-Za-z]\w{0,60})</Code>")
MISSING = f"addresses of object stores need obstore: {install_text('obstore', 'storage')}"


class StorageError(Exception):
    """The store did not give what was asked of it; the text says what, without credentials."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as a store lists it. `size` -1: not known before it is read."""

    tag: str
    size: int


class Source(Protocol):
    """The files below one URI."""

    archive: bool = False
    """The one file that is listed holds the files that are served."""

    def list(self) -> dict[str, StoredFile]:
        """Return the files by their paths below the URI. Raises StorageError."""

    def fetch(self, path: str, listed: StoredFile, file: IO[bytes], most: int) -> int:
        """Write a listed file, of at most `most` bytes, and return its size. Raises StorageError, OSError."""


def is_uri(text: str) -> bool:
    """Return whether a repository's name is an address of a store."""
    return "://" in text


def open_source(uri: str, options: StorageOptions) -> Source:
    """Return what a URI names; nothing is asked of the store yet. Raises ConfigError."""
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            fault_text("repository", _shown(uri), f"a folder, or one of {', '.join(SCHEMES)}://")
        )
    if parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"repository: {_shown(uri)}: allowed: an address without password, query and fragment"
        )
    if parts.scheme == "http" and not options.allow_http:
        raise ConfigError("repository: http:// is read by anybody on the way: storage.allow_http allows it")
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None
    try:
        if parts.scheme == "hf":
            return HubSource(f"{parts.netloc}{parts.path}".strip("/"), options)
        if parts.scheme in ("https", "http") and not uri.endswith(ARCHIVES):
            raise ConfigError(
                f"repository: {_shown(uri)}: allowed: an address that ends in {', '.join(ARCHIVES)}"
            )
        if uri.endswith(ARCHIVES):
            folder, _, name = uri.rpartition("/")
            return ArchiveSource(folder, name, options)
        return BucketSource(uri, options)
    except ConfigError:
        raise
    except BaseException as error:  # of the library: an address or a variable that it cannot use
        if not _is_of_library(error):
            raise
        raise ConfigError(f"repository: {_shown(uri)}: {fault_sentence(error)}") from None


def _shown(uri: str) -> str:
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def check_path(path: str) -> str:
    """Return a path that a store or an archive has named. Raises StorageError where it leads elsewhere."""
    parts = path.split("/")
    sound = all(part not in ("", ".", "..") for part in parts) and "\0" not in path and "\\" not in path
    if (
        not sound
        or len(parts) > MOST_DEPTH
        or len(path.encode()) > LONGEST_PATH
        or max(map(len, parts)) > 255
    ):
        raise StorageError(f"{path[:200]!a} is no path of a file below the folder it would be written to")
    return path


class BucketSource:
    """A bucket of S3, Google Cloud Storage or Azure, below a prefix."""

    archive = False

    def __init__(self, uri: str, options: StorageOptions) -> None:
        self._store = _open(uri, options)

    def list(self) -> dict[str, StoredFile]:
        import obstore

        found: dict[str, StoredFile] = {}
        with _told("its files cannot be listed"):
            for page in obstore.list(self._store):
                for one in page:
                    if not one["path"].endswith("/"):  # a console's mark of a folder
                        found[check_path(one["path"])] = _listed(one)
                if len(found) > MOST_FILES:
                    raise StorageError(f"more than {MOST_FILES} files are below the address")
        return found

    def fetch(self, path: str, listed: StoredFile, file: IO[bytes], most: int) -> int:
        return _fetch(self._store, path, listed, file, most)


class ArchiveSource:
    """An archive of models, by itself in a bucket or at a URL."""

    archive = True

    def __init__(self, folder: str, name: str, options: StorageOptions) -> None:
        self._store, self._name = _open(folder, options), name

    def list(self) -> dict[str, StoredFile]:
        import obstore

        with _told("it cannot be looked at"):
            return {self._name: _listed(obstore.head(self._store, self._name))}

    def fetch(self, path: str, listed: StoredFile, file: IO[bytes], most: int) -> int:
        return _fetch(self._store, path, listed, file, most)


class HubSource:
    """A model on the Hugging Face Hub: ORG/MODEL or ORG/MODEL@REVISION. Its commit is every file's tag."""

    archive = False

    def __init__(self, name: str, options: StorageOptions) -> None:
        self._model, _, revision = name.partition("@")
        self._revision = revision or "main"
        if len(self._model.split("/")) > 2 or not self._model:
            raise ConfigError(
                fault_text("repository", f"hf://{name}", "hf://ORG/MODEL, hf://ORG/MODEL@REVISION")
            )
        token = os.environ.get(TOKEN_VARIABLE, "")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._store = _open(os.environ.get(HUB_VARIABLE) or HUB, options, headers)

    def list(self) -> dict[str, StoredFile]:
        import obstore

        where = f"api/models/{self._model}/revision/{self._revision}"
        with _told("the Hub does not describe the model"):
            body = b"".join(_pieces(obstore.get(self._store, where), HUB_JSON_BYTES))
            told = json.loads(body)
            commit, names = str(told["sha"]), [str(one["rfilename"]) for one in told["siblings"]]
        if len(names) > MOST_FILES:
            raise StorageError(f"the model has more than {MOST_FILES} files")
        check_path(commit)
        safe = any(name.endswith(".safetensors") for name in names)
        kept = [
            name for name in names if not (name.startswith(".") or (safe and name.endswith(UNUSED_ON_HUB)))
        ]
        return {check_path(name): StoredFile(commit, -1) for name in kept}

    def fetch(self, path: str, listed: StoredFile, file: IO[bytes], most: int) -> int:
        where = f"{self._model}/resolve/{listed.tag}/{path}"
        return _fetch(self._store, where, StoredFile("", -1), file, most)


def _open(uri: str, options: StorageOptions, headers: Mapping[str, str] | None = None) -> Any:
    import obstore.store

    client: dict[str, Any] = {
        "connect_timeout": f"{max(1, int(options.timeout_s))}s",
        "read_timeout": f"{max(1, int(options.timeout_s))}s",
        "timeout": "24h",  # of a whole file, however large: read_timeout ends what stands still
    }
    if options.allow_http:
        client["allow_http"] = True
    if headers:
        client["default_headers"] = dict(headers)
    retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=options.timeout_s)}
    made: Any = obstore.store.from_url
    return made(uri, client_options=client, retry_config=retry)


def _listed(meta: Mapping[str, Any]) -> StoredFile:
    """Return what a store says of a file. Azure lists ETags without the quotes that its headers have."""
    tag = meta.get("e_tag") or f"{meta.get('last_modified')}"
    return StoredFile(str(tag).replace('"', ""), int(meta["size"]))


def _fetch(store: Any, path: str, listed: StoredFile, file: IO[bytes], most: int) -> int:
    """Write a file of the ETag and the size that were listed. A store that changes it meanwhile is found out
    by either; what has come is of no use then."""
    import obstore

    with _told(f"{path} cannot be read"):
        found = obstore.get(store, path)
        meta = _listed(found.meta)
        if listed.tag and meta.tag != listed.tag:
            raise StorageError(f"{path} has changed since it was listed")
        wanted = listed.size if listed.size >= 0 else meta.size
        size = 0
        for piece in _pieces(found, min(most, wanted)):
            size += file.write(piece)
    if size != wanted:
        raise StorageError(f"{path} has {size} bytes; {wanted} were announced")
    return size


def _pieces(found: Any, most: int) -> Iterator[bytes]:
    size = 0
    for piece in found.stream(min_chunk_size=CHUNK):
        size += len(piece)
        if size > most:
            raise StorageError(f"more than {most} bytes came")
        yield bytes(piece)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise StorageError for whatever the library raises: its errors have no common base, and broken JSON is
    the store's fault too."""
    try:
        yield
    except (StorageError, OSError) as error:
        if isinstance(error, StorageError) or error.errno is not None:
            raise
        raise StorageError(f"{what}: {fault_sentence(error)}") from None
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise StorageError(f"{what}: {fault_sentence(error)}") from None


def _is_of_library(error: BaseException) -> bool:
    """Return whether an error is the library's or the store's: a panic of Rust code is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def fault_sentence(error: BaseException) -> str:
    """Return an error of the library as a sentence for an operator who sets addresses and credentials."""
    text, _, insides = str(error).partition("Debug source")
    asked, status, code = _ASKED.search(text), _STATUS.search(text), _CODE.search(text)
    parts = urlsplit(asked[1]) if asked else None
    host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts else "the store"
    if status is None:
        why = _unanswered(text, insides, host)
    else:
        answered = f"{status[1]} {status[2].strip()}{f', {code[1]}' if code else ''}"
        why = f"{host} answers {answered}"
        if not _is_metadata(text):
            why = _answered(int(status[1]), answered, code[1] if code else "")
    if why and _is_metadata(text):
        return f"no variable sets credentials, and the machine has none: {why}"
    return why or _line(text)


def _answered(status: int, answered: str, code: str) -> str:
    if status in (401, 403):
        return f"the credentials are missing, are wrong or give no right to it ({answered})"
    if status == 404:
        return f"{'there is no such bucket' if code in NO_BUCKET else 'nothing is there'} ({answered})"
    return f"the store answers with an error ({answered})"


def _unanswered(text: str, insides: str, host: str) -> str:
    """Return why no answer came, or "" for an error of another kind."""
    if "InvalidUri" in text:
        return "an endpoint that a variable sets is no address: those begin with https:// or http://"
    if "Account must be specified" in text:
        return "AZURE_STORAGE_ACCOUNT_NAME is not set"
    if "without LOCATION" in text:
        return "the store has it elsewhere: another region or endpoint is to be set"
    if "builder error" in text and host.startswith("http://"):
        return f"{host} is read by anybody on the way: storage.allow_http allows it"
    if "error sending request" not in text:
        return ""
    return f"{host} {next((told for sign, told in SIGNS.items() if sign in insides), 'does not answer')}"


def _is_metadata(text: str) -> bool:
    """Return whether the machine's metadata service was asked, where the search for credentials ends."""
    return any(part in text for part in METADATA)


def _line(text: str) -> str:
    return " ".join(_GENERIC.sub("", text).split())[:300]


class BoundedReader:
    """The bytes of an archive for tarfile, which would read a header of any size at once."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int = -1) -> bytes:
        """Return at most so many bytes. Raises StorageError."""
        if not 0 <= size <= 2 * CHUNK:
            raise StorageError("the archive has a header larger than 2 MiB")
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise StorageError("the archive holds more than storage.max_bytes allows")
        return data

    def seek(self, at: int) -> int:
        """Go to a byte; the way there is read, and counts."""
        self._left -= max(0, at - self._stream.tell())
        if self._left < 0:
            raise StorageError("the archive holds more than storage.max_bytes allows")
        return self._stream.seek(at)

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._stream.tell()


def unpack(archive: Path, folder: Path, most: int) -> int:
    """Write the files of an archive below an empty folder; return their bytes.

    Raises StorageError, with files that are of no use, for a path that leads out, a link, a device, a name
    twice, more than MOST_FILES, and more than `most` bytes."""
    with archive.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        reader: Any = BoundedReader(stream, most + MOST_FILES * 2048)
        try:
            with tarfile.open(fileobj=reader, mode="r:") as tar:
                total = sum(_unpack_each(tar, folder, most))
                _check_end(reader, tar.offset)
                return total
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError, OverflowError) as error:
            raise StorageError(f"the archive cannot be read: {_line(str(error))}") from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise StorageError(f"the archive cannot be read: {_line(str(error))}") from None


def _check_end(reader: BoundedReader, at: int) -> None:
    """Raise StorageError for an archive without an end, which tarfile takes for a whole one, and for a wrong
    checksum behind it."""
    reader.seek(at)
    if reader.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise StorageError("the archive has no end: it is damaged, or was cut off")
    while reader.read(CHUNK):
        pass


def _unpack_each(tar: Any, folder: Path, most: int) -> Iterator[int]:
    total = 0
    for number, member in enumerate(tar):
        tar.members.clear()  # else it keeps every header
        if number >= MOST_FILES:
            raise StorageError(f"the archive holds more than {MOST_FILES} files")
        name = member.name.removeprefix("./").rstrip("/")
        if name in ("", ".") and member.isdir():
            continue
        place = folder / PurePosixPath(check_path(name))
        if not (member.isreg() or member.isdir()):
            raise StorageError(f"{name!a}: an archive may hold files and folders; this is a link or a device")
        if member.isdir():  # those that hold files are made with them
            continue
        total += member.size
        if total > most:
            raise StorageError("the archive holds more than storage.max_bytes allows")
        source = tar.extractfile(member)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as file:
                while data := source.read(CHUNK):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise StorageError(f"{name!a} is twice in the archive") from None
        except (NotADirectoryError, IsADirectoryError):
            raise StorageError(f"{name!a} is a file and a folder in the archive") from None
        if place.stat().st_size != member.size:
            raise StorageError(f"{name!a} ends too early in the archive")
        yield member.size
