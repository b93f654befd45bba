"""message_skeleton read backwards: a head and what was in its placeholders, as the message it was made of.

Independent of the compiled one in everything but the rules of a head: tags and literal values as they were
written, nothing for a placeholder, a 0 where a message within ends,
a count of bytes before the rest of a shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastserve._ext.message_skeleton import DATA, LEAD, LEADS, TEXT, First, Skeleton

Fields = Mapping[int, Any]


@dataclass
class Holes:
    """The fields that are put back, in the order of the message."""

    leads: deque[int]
    data: deque[bytes]


def rebuild(fields: Fields, head: bytes, placeholders: Holes, id: bytes) -> bytes:
    """The message, with its id at the end. Lengths are written as short as they can be."""
    body, at = _message(fields, head, 0, placeholders, len(head))
    assert at == len(head)
    assert not placeholders.leads
    assert not placeholders.data
    number = next((number for number, what in fields.items() if what == TEXT), None)
    return body + (_field(number, id) if number is not None and id else b"")


def _message(fields: Fields, head: bytes, at: int, placeholders: Holes, end: int) -> tuple[bytes, int]:
    body, entered = b"", set()
    while at < end and head[at]:
        start = at
        tag, at = _varint(head, at)
        number = tag >> 3
        what = fields.get(number)
        if what is None or (isinstance(what, First) and number in entered):
            at = _skip(head, at, tag)
            body += head[start:at]
            continue
        entered.add(number)
        if what == LEAD:
            body += head[start:at] + _write(placeholders.leads.popleft())
        elif what == DATA:
            body += _field(number, placeholders.data.popleft())
        elif what == LEADS:
            rest = head[at + 1 : at + 1 + head[at]]
            at += 1 + head[at]
            body += _field(number, _write(placeholders.leads.popleft()) + rest)
        else:
            inner, at = _message(what, head, at, placeholders, end)
            at += 1
            body += _field(number, inner)
    return body, at


def _skip(head: bytes, at: int, tag: int) -> int:
    kind = tag & 7
    if kind == 0:
        return _varint(head, at)[1]
    if kind == 2:
        size, at = _varint(head, at)
        return at + size
    if kind in (1, 5):
        return at + (8 if kind == 1 else 4)
    assert kind == 3
    while True:
        inner, at = _varint(head, at)
        if inner & 7 == 4:
            return at
        at = _skip(head, at, inner)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _write(value: int) -> bytes:
    value &= 2**64 - 1
    text = bytearray()
    while value >= 0x80:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    text.append(value)
    return bytes(text)


def _field(number: int, value: bytes) -> bytes:
    return _write(number << 3 | 2) + _write(len(value)) + value


# -- messages that are known ---------------------------------------------------------------------


def meets(skeleton: Skeleton, leads: tuple[int, ...], batching: bool, most: int) -> int:
    """The rows of a request with such a head; 0 where it is not like the one it was learned from."""
    if not batching:
        return int(skeleton.leads == leads)
    rows = skeleton.leads[0] if len(set(skeleton.leads)) == 1 else 0
    return rows if 0 < rows <= most else 0


def fill(skeleton: Skeleton, sources: list[tuple[int, int, bool]], memory: list[bytearray]) -> bool:
    return all(
        skeleton.copy_data(placeholder, place, width, truth)
        for (placeholder, width, truth), place in zip(sources, memory, strict=True)
    )
