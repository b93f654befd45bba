"""The choice of a coding; what is packed can be inflated."""

from __future__ import annotations

import pytest

from fastserve.config import Limits
from fastserve.wire.coding import DEFLATE, GZIP, choose_coding, pack
from fastserve.wire.inflate import inflate


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [(b"", b"identity"), (b"gzip, deflate, br", b"gzip"), (b"deflate, gzip", b"deflate"), (b"*", b"identity"),
     (b"gzip;q=0.2, deflate;q=0.8", b"deflate"), (b"gzip;q=0", b"identity"), (b"br", b"identity"),
     (b"gzip;q=0.5, identity", b"identity"), (b"gzip;q=x", b"identity")],
)  # fmt: skip
def test_choice_of_a_coding(accepted: bytes, coding: bytes) -> None:
    assert choose_coding(accepted) == coding


@pytest.mark.parametrize("coding", [DEFLATE, GZIP])
def test_packed_bodies_come_back(coding: bytes) -> None:
    assert inflate(pack(b"7," * 999, coding), Limits()) == b"7," * 999
