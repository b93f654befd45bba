"""Files that configure: YAML as plain Python values, and files whose name came from a config or a client.

`fields.convert` validates YAML's values. Plain words stay words: only `true` and `false` are booleans, as in
YAML 1.2, so that `warmup: off` is the text "off". A key given twice is a fault, not a silent choice.

    read_confined(model_folder, "labels.txt", 1 << 20)     refused: "../x", "/etc/passwd", links that lead out

A confined file is inside its folder, regular, of bounded size. Links are followed as far as they stay inside.
Every folder on the way is opened without following links, so what was checked is what is opened, and the file
without waiting, so that a pipe or a device holds nobody up.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from fastserve.errors import ConfigError

FILE_BYTES = 1 << 20  # a configuration, not a data file


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's core words and no duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool)):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _resolve(tag: str, pattern: str, first: str) -> None:
    regex = re.compile(pattern)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", regex, list(first))


_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Loader.yaml_implicit_resolvers.setdefault("", []).append(("tag:yaml.org,2002:null", re.compile(r"^$")))
_resolve("int", r"^[-+]?[0-9]+$|^0x[0-9a-fA-F]+$", "-+0123456789")
_resolve("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_resolve("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+.")


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))  # PyYAML's own would read 010 as eight
    return int(text, 16 if text.startswith("0x") else 10)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    # PyYAML reads "1e3" only with its own resolver's dot; float() takes every form resolved above.
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """Return the mapping of a YAML text, {} for an empty one. Raises ConfigError naming `origin`."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as fault:
        raise ConfigError(f"{origin}: not readable as YAML: {_one_line(fault)}") from None
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{origin}: not readable as YAML: {fault}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: given {type(value).__name__}, allowed: a mapping of field: value lines")
    return value


def read_yaml(path: Path, origin: str) -> dict[str, Any]:
    """Return the mapping of a file of at most FILE_BYTES. Raises ConfigError."""
    return parse_yaml(read_text(path, origin), origin)


def read_text(path: Path, origin: str) -> str:
    """Return a configuration file's text, at most FILE_BYTES of UTF-8. Raises ConfigError naming `origin`."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as fault:
        raise ConfigError(f"{origin}: cannot be read: {fault.strerror or fault}") from None
    if len(data) > FILE_BYTES:
        raise ConfigError(f"{origin}: larger than {FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{origin}: not UTF-8 text at byte {fault.start}") from None


def _one_line(fault: yaml.YAMLError) -> str:
    mark = getattr(fault, "problem_mark", None)
    problem = getattr(fault, "problem", None) or str(fault).splitlines()[0]
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(problem)


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
