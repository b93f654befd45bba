"""Plain values -> validated structs, with errors that name the field, the value and what is allowed.

msgspec does the checking; this module adds what its errors leave out: the key inside a mapping,
the offending value, and the allowed values. It also lists a struct's fields with their help, so
that command line flags and docs/configuration.md come from one place: the annotations, and the
docstrings below the fields.
"""

from __future__ import annotations

import ast
import json
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from inspect import getsource
from itertools import islice, pairwise
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from fastserve.errors import ConfigError

T = TypeVar("T")
VALUE_CHARS = 80  # of a given value shown in an error
KEY_CHARS = 80  # of a key that nobody knows; what is longer is none that was meant
SLICE = 64  # items of a list that are tried together for the one that does not fit
SHOWN_DEPTH = 8  # levels of a given value shown in an error


def convert(raw: object, kind: type[T], origin: str, *, lax: bool = False) -> T:
    """Return `raw` as a validated `kind`. `lax` also takes numbers and booleans written as text (flags).

    Raises ConfigError: "ORIGIN: FIELD: given VALUE, allowed: ...".
    """
    try:
        return msgspec.convert(raw, kind, strict=not lax)
    except msgspec.ValidationError as fault:
        message = _Search(lax).find(raw, kind, "") or _own_words(fault)
        raise ConfigError(f"{origin}: {message}") from None


@dataclass(frozen=True)
class _Search:
    """Walks value and type side by side down to the first part that does not fit."""

    lax: bool

    def find(self, value: Any, kind: Any, path: str) -> str:
        """Return the fault in words, "" when `value` fits or only a struct's own check refuses it."""
        bare = _bare(kind)
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            return self._find_in_struct(value, bare, path)
        base, arms = get_origin(bare), get_args(bare)
        if base in (Union, types.UnionType):
            return self._find_in_union(value, kind, path)
        if base is dict and isinstance(value, Mapping):
            return self._first((v, arms[1], f"{path}.{cut_key(k)}") for k, v in value.items()) or self._leaf(
                value, kind, path
            )
        if base in (list, tuple) and isinstance(value, (list, tuple)):
            return self._find_in_list(value, arms[0], path) or self._leaf(value, kind, path)
        return self._leaf(value, kind, path)

    def _find_in_list(self, value: Sequence[Any], arm: Any, path: str) -> str:
        """Check a list slice by slice: trying an item alone takes microseconds, and lists may be long."""
        for start in range(0, len(value), SLICE):
            part = value[start : start + SLICE]
            if self._fits(part, list[arm]):
                continue
            text = self._first((v, arm, f"{path}[{i}]") for i, v in enumerate(part, start))
            if text:
                return text
        return ""

    def _find_in_struct(self, value: Any, kind: type[msgspec.Struct], path: str) -> str:
        if not isinstance(value, Mapping):
            return fault_text(path, value, "a mapping of fields " + ", ".join(kind.__struct_encode_fields__))
        hints = get_type_hints(kind, include_extras=True)
        names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        for key in value:
            if key not in names:
                return f"{_dotted(path, cut_key(key))}: unknown field{hint(str(key), names)}"
        for field in msgspec.structs.fields(kind):
            if field.required and field.encode_name not in value:
                name, wanted = field.encode_name, allowed(hints[names[field.encode_name]])
                return f"{_dotted(path, name)}: missing, write {name}: with {wanted}"
        pairs = ((v, hints[names[k]], _dotted(path, k)) for k, v in value.items())
        return self._first(pairs) or self._leaf(value, kind, path)

    def _find_in_union(self, value: Any, kind: Any, path: str) -> str:
        if self._fits(value, kind):
            return ""
        for arm in get_args(_bare(kind)):
            bare = _bare(arm)
            is_struct = isinstance(bare, type) and issubclass(bare, msgspec.Struct)
            is_mapping = is_struct or get_origin(bare) is dict
            if isinstance(value, Mapping) and is_mapping:
                return self.find(value, arm, path)
            if isinstance(value, (list, tuple)) and get_origin(bare) in (list, tuple):
                return self.find(value, arm, path)
        return self._leaf(value, kind, path)

    def _first(self, parts: Iterator[tuple[Any, Any, str]]) -> str:
        return next((text for v, kind, path in parts if (text := self.find(v, kind, path.lstrip(".")))), "")

    def _leaf(self, value: Any, kind: Any, path: str) -> str:
        try:
            msgspec.convert(value, kind, strict=not self.lax)
        except msgspec.ValidationError as fault:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                own = _own_words(fault)  # a __post_init__ check, which names its field itself
                return f"{path}.{own}" if path else own
            return fault_text(path, value, allowed(kind))
        return ""

    def _fits(self, value: Any, kind: Any) -> bool:
        try:
            msgspec.convert(value, kind, strict=not self.lax)
        except msgspec.ValidationError:
            return False
        return True


def fault_text(field: str, value: object, allowed_text: str) -> str:
    """Return a configuration fault in its one form: FIELD: given VALUE, allowed: ALLOWED."""
    prefix = f"{field}: " if field else ""
    return f"{prefix}given {shown(value)}, allowed: {allowed_text}"


def hint(unknown: str, allowed: Iterable[str]) -> str:
    """Return the hint behind "unknown field": a near name, if any, and all names."""
    names = list(allowed)
    near = get_close_matches(unknown, names, 1, 0.75) if len(unknown) <= KEY_CHARS else []
    return f", {f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(names)}"


def cut_key(key: object) -> str:
    """Return a given key as an error shows it."""
    text = str(key)
    return text if len(text) <= KEY_CHARS else text[: KEY_CHARS - 3] + "..."


def shown(value: object) -> str:
    """Return a given value as JSON-like text, cut at VALUE_CHARS."""
    value = _beginning(value, SHOWN_DEPTH)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."


def _beginning(value: object, depth: int) -> object:
    """Return a smaller value whose text begins with the same VALUE_CHARS."""
    if isinstance(value, str):
        return value[: VALUE_CHARS + 1]
    if depth and isinstance(value, Mapping):
        first = islice(value.items(), VALUE_CHARS)
        return {
            key[: VALUE_CHARS + 1] if isinstance(key, str) else key: _beginning(v, depth - 1)
            for key, v in first
        }
    if depth and isinstance(value, (list, tuple)):
        return [_beginning(item, depth - 1) for item in value[:VALUE_CHARS]]
    return "..." if isinstance(value, (Mapping, list, tuple)) else value


def allowed(kind: Any) -> str:
    """Return the allowed values of a type, in words."""
    bare = _bare(kind)
    base, arms = get_origin(bare), get_args(bare)
    if base is Literal:
        return " or ".join(map(str, arms))
    if base in (Union, types.UnionType):
        return " or ".join(map(allowed, arms))
    if base in (list, tuple):
        most = [
            part.max_length for part in getattr(kind, "__metadata__", ()) if isinstance(part, msgspec.Meta)
        ]
        items = f"at most {most[0]} items, each " if most and most[0] is not None else ""
        return f"a list of {items}{allowed(arms[0])}"
    if base is dict:
        return f"a mapping of name: {allowed(arms[1])}"
    return _words(inspect.type_info(kind))


def _words(info: inspect.Type) -> str:
    if isinstance(info, inspect.Metadata):
        return str((info.extra or {}).get("allowed") or _words(info.type))
    if isinstance(info, (inspect.IntType, inspect.FloatType)):
        return ("a whole number" if isinstance(info, inspect.IntType) else "a number") + _bounds(info)
    if isinstance(info, inspect.StrType):
        return f"text matching {info.pattern}" if info.pattern else "text"
    if isinstance(info, inspect.StructType):
        return "a mapping of fields " + ", ".join(f.encode_name for f in info.fields)
    plain: dict[type, str] = {inspect.BoolType: "true or false", inspect.NoneType: "null"}
    return plain.get(type(info), "any value")


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = ((info.ge, " from "), (info.gt, " above "), (info.le, " to "), (info.lt, " below "))
    return "".join(f"{word}{bound}" for bound, word in bounds if bound is not None)


@dataclass(frozen=True)
class ConfigField:
    """One setting as flags and docs see it. `path` is dotted: "limits.body_bytes"."""

    path: str
    kind: Any
    default: Any  # msgspec.NODEFAULT when it must be given
    hint: Any  # the kind with its annotations
    owner: type[msgspec.Struct]
    name: str  # in its owner

    @property
    def help(self) -> str:
        """The docstring below the field, "" without one. Reading the first of a module takes 5 ms."""
        found = (_docstrings(one.__module__).get((one.__name__, self.name)) for one in self.owner.__mro__)
        return next(filter(None, found), "")

    @property
    def allowed(self) -> str:
        """Allowed values, in words."""
        return allowed(self.hint)

    @property
    def flag(self) -> str:
        """The path with dashes, for `triton` without that word: these flags are Triton's own."""
        return "--" + self.path.removeprefix("triton.").replace(".", "-").replace("_", "-")


@cache
def list_fields(kind: type[msgspec.Struct]) -> tuple[ConfigField, ...]:
    """Return every setting below `kind`, nested structs flattened, in their order. Finding them takes
    25 ms for a server's, which wants them for its flags and again to read those."""
    return tuple(_list_fields(kind, ""))


def _list_fields(kind: type[msgspec.Struct], prefix: str) -> Iterator[ConfigField]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        path = _dotted(prefix, field.encode_name)
        hint = hints[field.name]
        bare = _bare(hint)
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            yield from _list_fields(bare, path)
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        yield ConfigField(path, bare, default, hint, kind, field.name)


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below the fields of a module's classes, by class and field."""
    try:
        tree = ast.parse(getsource(sys.modules[module]))
    except (OSError, TypeError):  # the module has no source at hand
        return {}
    return {
        (kind.name, field.target.id): " ".join(text.value.value.split())
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for field, text in pairwise(kind.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_words(fault: msgspec.ValidationError) -> str:
    return str(fault).split(" - at `$", 1)[0]


BOOLS = {"true": True, "1": True, "false": False, "0": False}


def unbuilt_fault(name: str, value: str, idle: str) -> str:
    """Return the fault of another server's flag that is not built, "" where its value asks for nothing.

    `idle` is such a value.
    """
    if value == idle or (idle == "false" and BOOLS.get(value.lower()) is False):
        return ""
    return fault_text(f"--{name}", value, f"{idle or 'nothing'}: this flag is not built")
