"""Plain values -> validated structs, with errors that name the field, the value and what is allowed.

msgspec does the checking; this module adds what its errors leave out: the key inside a mapping,
the offending value, and the allowed values. It also lists a struct's fields with their help, so
that command line flags and docs/configuration.md come from one place: the annotations.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from fastserve.errors import ConfigError

T = TypeVar("T")
VALUE_CHARS = 80  # of a given value shown in an error


def convert(raw: object, kind: type[T], origin: str, *, lax: bool = False) -> T:
    """`raw` as a validated `kind`. `lax` also takes numbers and booleans written as text (flags).

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
        """The fault in words, or "" when `value` fits or only a struct's own check refuses it."""
        bare = _bare(kind)
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            return self._find_in_struct(value, bare, path)
        base, arms = get_origin(bare), get_args(bare)
        if base in (Union, types.UnionType):
            return self._find_in_union(value, kind, path)
        if base is dict and isinstance(value, Mapping):
            return self._first((v, arms[1], f"{path}.{k}") for k, v in value.items()) or self._leaf(
                value, kind, path
            )
        if base in (list, tuple) and isinstance(value, (list, tuple)):
            return self._first((v, arms[0], f"{path}[{i}]") for i, v in enumerate(value)) or self._leaf(
                value, kind, path
            )
        return self._leaf(value, kind, path)

    def _find_in_struct(self, value: Any, kind: type[msgspec.Struct], path: str) -> str:
        if not isinstance(value, Mapping):
            return fault_text(path, value, "a mapping of fields " + ", ".join(kind.__struct_encode_fields__))
        hints = get_type_hints(kind, include_extras=True)
        names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        for key in value:
            if key not in names:
                return f"{_dotted(path, str(key))}: unknown field{hint(str(key), names)}"
        for field in msgspec.structs.fields(kind):
            if field.required and field.encode_name not in value:
                wanted = allowed(field.type)
                return f"{_dotted(path, field.encode_name)}: missing, allowed: {wanted}"
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
    """The one form of a configuration fault: FIELD: given VALUE, allowed: ALLOWED."""
    prefix = f"{field}: " if field else ""
    return f"{prefix}given {shown(value)}, allowed: {allowed_text}"


def hint(unknown: str, allowed: Iterable[str]) -> str:
    """What follows upon "unknown field": the one that was meant, if one is near, and all there are."""
    names = list(allowed)
    near = get_close_matches(unknown, names, 1, 0.75)
    return f", {f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(names)}"


def shown(value: object) -> str:
    """A given value as JSON-like text, cut at VALUE_CHARS."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."


def allowed(kind: Any) -> str:
    """What a field of this type may hold, in words."""
    bare = _bare(kind)
    base, arms = get_origin(bare), get_args(bare)
    if base is Literal:
        return " or ".join(map(str, arms))
    if base in (Union, types.UnionType):
        return " or ".join(map(allowed, arms))
    if base in (list, tuple):
        return f"a list of {allowed(arms[0])}"
    if base is dict:
        return f"a mapping of name: {allowed(arms[1])}"
    return _words(inspect.type_info(kind))


def _words(info: inspect.Type) -> str:
    if isinstance(info, inspect.Metadata):
        return _words(info.type)
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
class Field:
    """One setting as flags and docs see it. `path` is dotted: "limits.body_bytes"."""

    path: str
    kind: Any
    default: Any  # msgspec.NODEFAULT when it must be given
    hint: Any  # the kind with its annotations

    @property
    def help(self) -> str:
        """Its description."""
        return help_of(self.hint)

    @property
    def allowed(self) -> str:
        """What it may hold, in words."""
        return allowed(self.hint)

    @property
    def flag(self) -> str:
        """The path with dashes. Those of `triton` are Triton's own, which have no such word before them."""
        return "--" + self.path.removeprefix("triton.").replace(".", "-").replace("_", "-")


@cache
def list_fields(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Every setting below `kind`, nested structs flattened, in the order they are written. Finding them takes
    25 ms for a server's, which wants them for its flags and again to read those."""
    return tuple(_list_fields(kind, ""))


def _list_fields(kind: type[msgspec.Struct], prefix: str) -> Iterator[Field]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        path = _dotted(prefix, field.encode_name)
        hint = hints[field.name]
        bare = _bare(hint)
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            yield from _list_fields(bare, path)
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        yield Field(path, bare, default, hint)


def help_of(hint: Any) -> str:
    """The description written in an annotation, "" when there is none."""
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, msgspec.Meta) and part.description:
            return part.description
    return ""


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_words(fault: msgspec.ValidationError) -> str:
    return str(fault).split(" - at `$", 1)[0]
