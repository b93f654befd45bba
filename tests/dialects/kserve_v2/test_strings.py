"""BYTES packing as it comes from clients, whole and broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.dialects.kserve_v2.inference import check_strings
from fastserve.errors import ServeError


def packed(*items: bytes) -> bytes:
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


@given(st.lists(st.binary(max_size=5), max_size=5))
def test_whole(items: list[bytes]) -> None:
    check_strings(packed(*items), len(items), "x", "m", "")


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (b"", 1, "expected 1 string elements for inference input 'x' for model 'm', got 0"),
        (packed(b"a", b"b"), 1, "unexpected number of string elements 2"),
        (packed(b"a") + b"\1\0", 2, "expecting 4 bytes but only 2 bytes available"),
        (packed(b"a") + b"\11\0\0\0ab", 2, "expecting string of length 9 but only 2 bytes available"),
        (b"\377\377\377\377", 1, "expecting string of length 4294967295 but only 0 bytes available"),
        (b"\1", 0, "expecting 4 bytes but only 1 bytes available"),
    ],
)
def test_broken(data: bytes, count: int, words: str) -> None:
    with pytest.raises(ServeError, match=words):
        check_strings(data, count, "x", "m", "")
