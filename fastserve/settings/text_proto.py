"""Protobuf's text format as plain values, by a small schema written in Python.

    max_batch_size { value: 128 }    # comments, commas and semicolons between fields
    allowed_batch_sizes: [16, 128]   # lists of scalars and of messages

Scalars, enums, messages, repeated fields, maps, oneofs and string escapes are read. Extensions and
Any are refused. Iteration is bounded: at most MAX_DEPTH messages inside each other.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from fastserve.errors import ConfigError
from fastserve.settings.fields import hint

MAX_DEPTH = 64
Kind = Literal["string", "bool", "float", "double", "int32", "uint32", "int64", "uint64", "enum", "message"]
_BOUNDS = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
_BOOLS = {
    "true": True,
    "t": True,
    "True": True,
    "1": True,
    "false": False,
    "f": False,
    "False": False,
    "0": False,
}
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n\f\v]|\#[^\n]*)+)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>(?:0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?[fF]?)
        (?![A-Za-z0-9_.]))
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<mark>[{}<>\[\]:,;-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_SIMPLE = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_SIMPLE |= {mark: mark for mark in (b"\\", b"'", b'"', b"?")}
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True)
class TextField:
    """One field of a message. `oneof` names the choice it belongs to; `entries` makes it a map of its
    fields key and value; `words` gives an enum's name in place of its number."""

    kind: Kind
    repeated: bool = False
    fields: Mapping[str, TextField] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)
    oneof: str = ""
    entries: bool = False
    words: bool = False

    @property
    def zero(self) -> Any:
        """Default value of a map's entry."""
        if self.kind == "enum":
            return next(iter(self.names)) if self.words else 0
        return {"string": "", "bool": False, "message": {}}.get(self.kind, 0)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    offset: int


def parse_text(text: str, schema: Mapping[str, TextField], origin: str) -> dict[str, Any]:
    """The given fields of one message: scalars, dicts for messages and maps, lists where they repeat.

    Enums become their number. Raises ConfigError naming origin, line, column and what is allowed there.
    """
    return _Reader(text, origin).message(schema, "", 0)


def as_single(value: float) -> float:
    """Return the float32 next to a number, infinity for one that is too large."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class _Reader:
    def __init__(self, text: str, origin: str) -> None:
        self.text = text
        self.origin = origin
        self.offset = 0
        self.token = self.scan()

    # -- tokens

    def scan(self) -> _Token:
        while True:
            if self.offset == len(self.text):
                return _Token("end", "", self.offset)
            match = _TOKEN.match(self.text, self.offset)
            if match is None:
                self.fail(f"unexpected {self.text[self.offset]!r}", self.offset)
            start, self.offset = self.offset, match.end()
            if match.lastgroup != "space":
                return _Token(str(match.lastgroup), match.group(), start)

    def take(self) -> _Token:
        token, self.token = self.token, self.scan()
        return token

    def skip(self, *marks: str) -> str:
        """Take and return the next mark if it is one of these, else return ""."""
        if self.token.kind == "mark" and self.token.text in marks:
            return self.take().text
        return ""

    def fail(self, message: str, offset: int) -> NoReturn:
        line = self.text.count("\n", 0, offset) + 1
        column = offset - (self.text.rfind("\n", 0, offset) + 1) + 1
        raise ConfigError(f"{self.origin}: line {line}, column {column}: {message}")

    # -- messages

    def message(self, schema: Mapping[str, TextField], closing: str, depth: int) -> dict[str, Any]:
        """Read fields up to `closing` ("" for the end of the text)."""
        found: dict[str, Any] = {}
        chosen: dict[str, str] = {}
        while not (self.token.kind == "mark" and self.token.text == closing):
            if self.token.kind == "end":
                if closing:
                    self.fail(f"the text ends where {closing!r} is due", self.token.offset)
                return found
            name = self.take()
            if name.kind != "word" or name.text not in schema:
                self.fail(f"unknown field {name.text!r}{hint(name.text, schema)}", name.offset)
            kind = schema[name.text]
            if kind.oneof and chosen.setdefault(kind.oneof, name.text) != name.text:
                self.fail(f"{name.text} and {chosen[kind.oneof]} exclude each other", name.offset)
            self.field(name, kind, found, depth)
            self.skip(",", ";")
        self.take()
        return found

    def field(self, name: _Token, kind: TextField, found: dict[str, Any], depth: int) -> None:
        has_colon = bool(self.skip(":"))
        if not has_colon and kind.kind != "message":
            self.fail(f"':' is due after {name.text}", self.token.offset)
        values = self.values(name, kind, depth)
        if kind.entries:
            key, value = kind.fields["key"].zero, kind.fields["value"].zero
            found.setdefault(name.text, {}).update(
                (entry.get("key", key), entry.get("value", value)) for entry in values
            )
        elif kind.repeated:
            found.setdefault(name.text, []).extend(values)
        elif name.text in found:
            self.fail(f"{name.text} is given more than once", name.offset)
        else:
            found[name.text] = values[0]

    def values(self, name: _Token, kind: TextField, depth: int) -> list[Any]:
        """Read one value, or the members of a [list] where the field repeats."""
        if not (kind.repeated or kind.entries) or not self.skip("["):
            return [self.value(name, kind, depth)]
        members: list[Any] = []
        while not self.skip("]"):
            if members and not self.skip(","):
                self.fail("',' or ']' is due", self.token.offset)
            members.append(self.value(name, kind, depth))
        return members

    def value(self, name: _Token, kind: TextField, depth: int) -> Any:
        if kind.kind != "message":
            return _READ[kind.kind](self, name.text, kind)
        opening = self.skip("{", "<")
        if not opening:
            self.fail(f"'{{' is due, since {name.text} is a message", self.token.offset)
        if depth == MAX_DEPTH:
            self.fail(f"more than {MAX_DEPTH} messages inside each other", name.offset)
        return self.message(kind.fields, _CLOSING[opening], depth + 1)

    # -- scalars

    def string(self, name: str, kind: TextField) -> str:
        if self.token.kind != "string":
            self.refuse(name, "text in quotes")
        start, parts = self.token.offset, []
        while self.token.kind == "string":  # neighbours are one text
            parts.append(_ESCAPE.sub(self.unescape, self.take().text[1:-1].encode()))
        try:
            return b"".join(parts).decode()
        except UnicodeDecodeError:
            self.fail(f"{name}: not UTF-8 text", start)

    def unescape(self, match: re.Match[bytes]) -> bytes:
        octal, hexa, short, long, plain = match.groups()
        if plain is not None:
            if plain not in _SIMPLE:
                self.fail(f"unknown escape {match.group().decode(errors='replace')}", self.token.offset)
            return _SIMPLE[plain]
        if octal is not None or hexa is not None:
            code = int(octal, 8) if octal is not None else int(hexa, 16)
            if code > 255:
                self.fail(f"no byte has the number {code}", self.token.offset)
            return bytes([code])
        point = int(short or long, 16)
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            self.fail(f"no character has the number {point:#x}", self.token.offset)
        return chr(point).encode()

    def integer(self, name: str, kind: TextField) -> int:
        low, high = _BOUNDS[kind.kind]
        wanted = f"a whole number from {low} to {high}"
        start = self.token
        sign = -1 if self.skip("-") else 1
        text = self.token.text.lower()
        base = 16 if text.startswith("0x") else 8 if len(text) > 1 and text.startswith("0") else 10
        try:
            number = sign * int(text, base) if self.token.kind == "number" and len(text) < 80 else None
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            self.refuse(name, wanted, start)
        self.take()
        return number

    def double(self, name: str, kind: TextField) -> float:
        start = self.token
        sign = -1.0 if self.skip("-") else 1.0
        text = self.token.text.lower()
        known = self.token.kind == "number" or text in ("inf", "infinity", "nan")
        if not known or re.match("0[0-9x]", text):
            self.refuse(name, "a number", start)
        self.take()
        return sign * float(text.rstrip("f") if text[-1] == "f" and text != "inf" else text)

    def single(self, name: str, kind: TextField) -> float:
        return as_single(self.double(name, kind))

    def bool(self, name: str, kind: TextField) -> bool:
        if self.token.kind not in ("word", "number") or self.token.text not in _BOOLS:
            self.refuse(name, "true or false")
        return _BOOLS[self.take().text]

    def enum(self, name: str, kind: TextField) -> int | str:
        given = self.token
        for word, number in kind.names.items():
            if (given.kind, given.text) in (("word", word), ("number", str(number))):
                self.take()
                return word if kind.words else number
        self.refuse(name, " or ".join(kind.names))

    def refuse(self, name: str, wanted: str, token: _Token | None = None) -> NoReturn:
        token = token or self.token
        given = self.text[token.offset : self.offset].strip() or "nothing"
        self.fail(f"{name}: given {given[:80]}, allowed: {wanted}", token.offset)


_READ: dict[str, Callable[[_Reader, str, TextField], Any]] = {
    "string": _Reader.string,
    "bool": _Reader.bool,
    "float": _Reader.single,
    "double": _Reader.double,
    "int32": _Reader.integer,
    "uint32": _Reader.integer,
    "int64": _Reader.integer,
    "uint64": _Reader.integer,
    "enum": _Reader.enum,
}
