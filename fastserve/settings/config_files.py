"""Files that configure: YAML as plain Python values.

`fields.convert` validates YAML's values. Plain words stay words: only `true` and `false` are booleans, as in
YAML 1.2, so that `warmup: off` is the text "off". A key given twice is a fault, not a silent choice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
