"""JSON as spec 2.1 has it, read by recursive descent over regular expressions. Slow and plain."""

from __future__ import annotations

import math
import re
from typing import Any

SPACE = re.compile(rb"[ \n\r\t]*")
NUMBER = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
HEX4 = re.compile(rb"[0-9a-fA-F]{4}")
ESCAPES = {
    b'"': b'"',
    b"\\": b"\\",
    b"/": b"/",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
}


class Refused(Exception):
    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(reason, offset)
        self.reason, self.offset = reason, offset


class Parser:
    """Objects come out as ("object", [(name, value), ...]); everything else as json_value has it."""

    def __init__(self, body: bytes, max_depth: int = 100) -> None:
        self.body, self.max_depth, self.at = body, max_depth, 0

    def peek(self) -> bytes:
        byte = self.body[self.at : self.at + 1]
        return b"" if byte == b"\0" else byte

    def space(self) -> None:
        match = SPACE.match(self.body, self.at)
        assert match
        self.at = match.end()

    def document(self, alone: bool = False) -> Any:
        if self.body.startswith(b"\xef\xbb\xbf"):
            self.at = 3
        self.space()
        if self.peek() in (b"", b",", b":", b"]", b"}"):
            raise Refused("The document is empty.", self.at)
        root = self.value(0)
        self.space()
        if alone and self.peek():
            raise Refused("The document root must not be followed by other values.", self.at)
        return root

    def value(self, depth: int) -> Any:
        self.space()
        first = self.peek()
        if first in (b"{", b"["):
            if depth >= self.max_depth:
                raise Refused("Nesting too deep.", self.at)
            return self.members(depth + 1) if first == b"{" else self.items(depth + 1)
        if first == b'"':
            return self.string()
        for word, meant in ((b"true", True), (b"false", False), (b"null", None)):
            if first == word[:1]:
                self.word(word)
                return meant
        return self.number()

    def word(self, word: bytes) -> None:
        for byte in word:
            if self.body[self.at : self.at + 1] != bytes([byte]):
                raise Refused("Invalid value.", self.at)
            self.at += 1

    def items(self, depth: int) -> list[Any]:
        self.at += 1
        self.space()
        found: list[Any] = []
        if self.peek() == b"]":
            self.at += 1
            return found
        while True:
            found.append(self.value(depth))
            self.space()
            self.at += 1
            if self.body[self.at - 1 : self.at] == b"]":
                return found
            if self.body[self.at - 1 : self.at] != b",":
                raise Refused("Missing a comma or ']' after an array element.", self.at - 1)

    def members(self, depth: int) -> tuple[str, list[tuple[bytes, Any]]]:
        self.at += 1
        self.space()
        found: list[tuple[bytes, Any]] = []
        if self.peek() == b"}":
            self.at += 1
            return "object", found
        while True:
            self.space()
            if self.peek() != b'"':
                raise Refused("Missing a name for object member.", self.at)
            name = self.string()
            self.space()
            if self.peek() != b":":
                raise Refused("Missing a colon after a name of object member.", self.at)
            self.at += 1
            found.append((name, self.value(depth)))
            self.space()
            self.at += 1
            if self.body[self.at - 1 : self.at] == b"}":
                return "object", found
            if self.body[self.at - 1 : self.at] != b",":
                raise Refused("Missing a comma or '}' after an object member.", self.at - 1)

    def string(self) -> bytes:
        self.at += 1
        out = b""
        while True:
            match = PLAIN.match(self.body, self.at)
            assert match
            out, self.at = out + match[0], match.end()
            if self.peek() == b"":
                raise Refused("Missing a closing quotation mark in string.", self.at)
            if self.peek() == b'"':
                self.at += 1
                return out
            if self.peek() != b"\\":
                raise Refused("Invalid escape character in string.", self.at)
            out += self.escape()

    def escape(self) -> bytes:
        start = self.at
        kind = self.body[start + 1 : start + 2]
        if kind in ESCAPES:
            self.at += 2
            return ESCAPES[kind]
        if kind != b"u":
            raise Refused("Invalid escape character in string.", start)
        unit = self.hex4(start, start + 2)
        if 0xD800 <= unit < 0xDC00:
            if self.body[self.at : self.at + 2] != b"\\u":
                raise Refused("The surrogate pair in string is invalid.", start)
            low = self.hex4(start, self.at + 2)
            if not 0xDC00 <= low < 0xE000:
                raise Refused("The surrogate pair in string is invalid.", start)
            unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
        return chr(unit).encode("utf-8", "surrogatepass")

    def hex4(self, start: int, at: int) -> int:
        match = HEX4.match(self.body, at)
        if not match:
            raise Refused("Incorrect hex digit after \\u escape in string.", start)
        self.at = match.end()
        return int(match[0], 16)

    def number(self) -> int | float:
        start = self.at
        negative = self.peek() == b"-"
        self.at += negative
        if self.peek() == b"N":
            self.word(b"NaN")
            return math.nan
        if self.peek() == b"I":
            self.word(b"Inf")
            if self.peek() == b"i":
                self.word(b"inity")
            return -math.inf if negative else math.inf
        match = NUMBER.match(self.body, start)
        if not match:
            raise Refused("Invalid value.", self.at)
        self.at = match.end()
        if not match[2] and not match[3] and self.peek() == b".":
            raise Refused("Miss fraction part in number.", self.at + 1)
        if not match[3] and self.peek() in (b"e", b"E"):
            sign = self.body[self.at + 1 : self.at + 2] in (b"+", b"-")
            raise Refused("Miss exponent in number.", self.at + 1 + sign)
        return self.meaning(match, start)

    def meaning(self, match: re.Match[bytes], start: int) -> int | float:
        text = match[0].decode()
        if not match[2] and not match[3] and len(text) < 25 and -(2**63) <= int(text) < 2**64:
            return int(text)
        value = float(text)
        if math.isinf(value):
            raise Refused("Number too big to be stored in double.", start)
        return value


def parse(body: bytes, max_depth: int = 100, alone: bool = False) -> Any:
    return Parser(body, max_depth).document(alone)


def normal_precision(text: str) -> float:
    """A literal that is no 64-bit integer as RapidJSON's normal precision reads it: integers go on in doubles
    from the digit that would overflow, a fraction as an integer up to 2**53 and then in doubles to 17 digits,
    and one power of ten scales the whole."""
    sign, text = text.startswith("-"), text.removeprefix("-")
    mantissa, _, exponent = text.lower().partition("e")
    integer, _, fraction = mantissa.partition(".")
    most, whole, at, expanded = 2**63 if sign else 2**64 - 1, 0, 0, 0
    while at < len(integer) and whole * 10 + int(integer[at]) <= most:
        whole, at = whole * 10 + int(integer[at]), at + 1
    counted, overflowed, value = at - 1, at < len(integer), float(whole)
    for digit in integer[at:]:
        value = value * 10 + int(digit)
    at = 0
    while not overflowed and at < len(fraction) and whole <= 2**53 - 1:
        whole, at, expanded = whole * 10 + int(fraction[at]), at + 1, expanded - 1
        counted += whole != 0
        value = float(whole)
    for digit in fraction[at:]:
        if counted < 17:
            value, expanded = value * 10 + int(digit), expanded - 1
            counted += value > 0
    power = int(exponent or 0) + expanded
    if power < -308:
        value, power = value / 1e308, power + 308
        value = 0.0 if power < -308 else value
    value = value / float(f"1e{-power}") if power < 0 else value * float(f"1e{power}")
    return -value if sign else value
