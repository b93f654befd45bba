"""InferRequestHeader (spec 3.1): what a request says of its tensors, read from the text format.

    batch_size: 2 input { name: "INPUT0" dims: 16 } output { name: "OUTPUT0" cls { count: 3 } } id: 7

Clients send one header with every request and change little of it, so what comes before the scalar
fields at the end is read once and remembered. The tensors' bytes and the model are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from fastserve.config.text_proto import TextField, parse_text
from fastserve.protos import load
from fastserve.protos.text import schema_of
from fastserve.serving.shared_memory import Range

if TYPE_CHECKING:
    from fastserve._ext.proto_wire_v1 import SharedMemoryPlace, V1InferMessage

FLAG_START, FLAG_END = 1, 2
REMEMBERED_HEADERS = 256
REMEMBERED_CHARS = 4096

# The scalars as clients print them: in order of their numbers, after the last message, far inside 64 bits.
_TAIL = re.compile(
    r"(?: correlation_id: (?P<correlation_id>[1-9][0-9]{0,17}))?(?: id: (?P<id>[1-9][0-9]{0,17}))?"
    r"(?: flags: (?P<flags>[1-9][0-9]{0,7}))?(?: priority: (?P<priority>[1-9][0-9]{0,7}))?"
    r"(?: timeout_microseconds: (?P<timeout_us>[1-9][0-9]{0,17}))?\s*"
)


@dataclass(frozen=True, slots=True)
class InputHeader:
    """One input as described; what is left out (no `dims`, a size of 0) the model's configuration says."""

    name: str
    dims: tuple[int, ...] = ()
    batch_byte_size: int = 0
    shared: Range | None = None


@dataclass(frozen=True, slots=True)
class OutputHeader:
    """One output as wanted: raw, or with `classes` > 0 as its highest values."""

    name: str
    classes: int = 0
    shared: Range | None = None


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The whole header."""

    batch_size: int = 0
    inputs: tuple[InputHeader, ...] = ()
    outputs: tuple[OutputHeader, ...] = ()
    correlation_id: int = 0
    id: int = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0

    @property
    def destinations(self) -> dict[str, Range]:
        """Where outputs into shared memory go; looked up before the model runs (spec 3.4)."""
        return {one.name: one.shared for one in self.outputs if one.shared is not None}


def read_header(text: str) -> RequestHeader:
    """A header in text format. Raises ConfigError when it is not one."""
    if len(text) > REMEMBERED_CHARS:
        return _read_whole(text)
    front, brace, tail = text.rpartition("}")
    match = _TAIL.fullmatch(tail)
    if not brace or match is None:
        return _read_whole(text)
    header = _read_remembered(front + brace)
    given: dict[str, Any] = {name: int(n) for name, n in match.groupdict().items() if n is not None}
    if not given:
        return header
    if any(getattr(header, name) for name in given):  # given twice: the reader says so
        return _read_whole(text)
    return replace(header, **given)


def _read_whole(text: str) -> RequestHeader:
    found = parse_text(text, _schema(), "NV-InferRequest")
    inputs = (
        InputHeader(
            one.get("name", ""),
            tuple(one.get("dims", ())),
            one.get("batch_byte_size", 0),
            _range(one.get("shared_memory")),
        )
        for one in found.pop("input", ())
    )
    outputs = (
        OutputHeader(
            one.get("name", ""), one.get("cls", {}).get("count", 0), _range(one.get("shared_memory"))
        )
        for one in found.pop("output", ())
    )
    timeout_us = found.pop("timeout_microseconds", 0)
    return RequestHeader(inputs=tuple(inputs), outputs=tuple(outputs), timeout_us=timeout_us, **found)


@cache
def _schema() -> dict[str, TextField]:
    return schema_of(load("triton_v1").InferRequestHeader.DESCRIPTOR)


_read_remembered = lru_cache(maxsize=REMEMBERED_HEADERS)(_read_whole)


def _range(found: Mapping[str, Any] | None) -> Range | None:
    if found is None:
        return None
    return Range(found.get("name", ""), found.get("offset", 0), found.get("byte_size", 0))


def read_message(message: V1InferMessage) -> RequestHeader:
    """The header of a gRPC request."""
    return RequestHeader(
        message.batch_size,
        tuple(
            InputHeader(one.name, one.dims, one.batch_byte_size, _read_shared(one.shared_memory))
            for one in message.inputs
        ),
        tuple(
            OutputHeader(one.name, one.class_count or 0, _read_shared(one.shared_memory))
            for one in message.outputs
        ),
        message.correlation_id,
        message.id,
        message.flags,
        message.priority,
        message.timeout_us,
    )


def _read_shared(place: SharedMemoryPlace | None) -> Range | None:
    return None if place is None else Range(place.name, place.offset, place.byte_size)
