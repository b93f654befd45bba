"""Templates by regular expressions: a header with placeholders and their values. No claim to speed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from tests.oracles import infer_json

PATTERNS = {"id": rb'("(?:[^"\\]|\\.)*")', "rows": rb"([1-9][0-9]{0,14})", "data": rb'(\[[^"{}]*\])'}
PATTERNS["size"] = PATTERNS["rows"]


def take(
    header: bytes,
    placeholders: Sequence[tuple[str, int, int, int]],
    inputs: Sequence[tuple[str, Sequence[int], str]],
    request: bytes,
    header_bytes: int,
) -> tuple[int, str, list[bytes | None]] | None:
    """(rows, id, each input's bytes) of a request that fits a header with placeholders; None of another.

    inputs: (datatype, shape of a row, where the data is: "data", "blob" or "outside").
    """
    pattern, at = b"", 0
    for kind, start, end, _ in placeholders:
        pattern += re.escape(header[at:start]) + PATTERNS[kind]
        at = end
    found = re.fullmatch(pattern + re.escape(header[at:]), request[:header_bytes], re.DOTALL)
    if found is None:
        return None
    texts = {
        (kind, number): text for (kind, _, _, number), text in zip(placeholders, found.groups(), strict=True)
    }
    rows = int(texts["rows", 0])
    identity = infer_json.read(b'{"id":' + texts.get(("id", -1), b'""') + b',"inputs":[]}')[0]
    values: list[bytes | None] = []
    rest = request[header_bytes:]
    for number, (datatype, row_shape, place) in enumerate(inputs):
        if int(texts["rows", number]) != rows:
            return None
        nbytes = rows * row_bytes(datatype, row_shape)
        if place != "data" and int(texts["size", number]) != nbytes:
            return None
        if place == "data":
            values.append(_read(texts["data", number], datatype, rows * prod(row_shape)))
        else:
            values.append(rest[:nbytes] if place == "blob" else None)
            rest = rest[nbytes:] if place == "blob" else rest
    return None if rest else (rows, identity, values)


def row_bytes(datatype: str, row_shape: Sequence[int]) -> int:
    return prod(row_shape) * infer_json.np.dtype(infer_json.DTYPES[datatype]).itemsize


def _read(text: bytes, datatype: str, items: int) -> bytes:
    body = b'{"inputs":[{"name":"x","datatype":"%b","shape":[%d],"data":%b}]}'
    got: Any = infer_json.read(body % (datatype.encode(), items, text))
    data: bytes = got[2][0][4]
    return data
