"""The messages between a remote runner and its workers, packed and read field by field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

HEAD = struct.Struct("<4sHHQIIIIQQ")
COPIED_BYTES, MOST_JOINED, MOST_PARTS, KINDS = 65536, 64, 65536, range(1, 16)


class PlainMessage(NamedTuple):
    """One message; `table` has pairs of numbers."""

    kind: int
    batch: int
    rows: int
    word: int
    ran_ns: int
    table: list[tuple[int, int]]
    parts: list[bytes]


def pack(message: PlainMessage) -> list[bytes]:
    """Return the frames of a message."""
    kind, batch, rows, word, ran_ns, table, parts = message
    lengths = [len(part) for part in parts]
    head = HEAD.pack(b"FSRW", 3, kind, batch, rows, len(table), word, len(parts), sum(lengths), ran_ns)
    head += b"".join(struct.pack("<II", *entry) for entry in table)
    head += b"".join(struct.pack("<Q", length) for length in lengths)
    return [head + b"".join(parts)] if sum(lengths) < COPIED_BYTES else [head, *parts]


def read(frames: Sequence[bytes]) -> list[PlainMessage]:
    """Read the messages of these frames. Raises ValueError."""
    data, apart = bytes(frames[0]), [bytes(frame) for frame in frames[1:]]
    found: list[PlainMessage] = []
    while data or not found:
        if len(found) == MOST_JOINED or len(data) < HEAD.size:
            raise ValueError("no message, or too many")
        magic, protocol, kind, batch, rows, entries, word, count, nbytes, ran_ns = HEAD.unpack_from(data)
        body = data[HEAD.size :]
        if (magic, protocol) != (b"FSRW", 3) or kind not in KINDS or count > MOST_PARTS:
            raise ValueError("no head of ours")
        if len(body) < 8 * (entries + count):
            raise ValueError("no whole table")
        table = [struct.unpack_from("<II", body, 8 * at) for at in range(entries)]
        lengths = [struct.unpack_from("<Q", body, 8 * (entries + at))[0] for at in range(count)]
        data, parts = body[8 * (entries + count) :], apart
        if not apart:
            parts = []
            for length in lengths:
                parts.append(data[:length])
                data = data[length:]
        if [len(part) for part in parts] != lengths or sum(lengths) != nbytes or (apart and data):
            raise ValueError("other parts than were announced")
        found.append(PlainMessage(kind, batch, rows, word, ran_ns, [(a, b) for a, b in table], parts))
    return found
