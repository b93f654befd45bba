"""CRC-32C against RFC 3720's examples and the checksum bit by bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.crc32c import crc32c
from tests.effort import examples
from tests.oracles.crc32c import plain_crc32c


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_examples_of_rfc_3720(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum == plain_crc32c(data)


@given(st.binary(max_size=200), st.integers(0, 9))
@examples(200)
def test_any_bytes_from_any_address(data: bytes, start: int) -> None:
    assert crc32c(memoryview(bytearray(data))[start:]) == plain_crc32c(data[start:])


def test_more_than_is_summed_under_the_lock() -> None:
    data = bytes(n * 7 % 251 for n in range(20_011))
    assert crc32c(data) == plain_crc32c(data)


@pytest.mark.parametrize("given", ["text", 7, memoryview(b"abcd")[::2]])
def test_what_is_no_buffer(given: object) -> None:
    with pytest.raises((TypeError, BufferError)):
        crc32c(given)  # type: ignore[arg-type]
