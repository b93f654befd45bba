"""The choice of a coding; what is packed can be inflated."""

from __future__ import annotations

import contextlib
import gc
import gzip
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import Kind, ServeError
from fastserve.net.compression import DEFLATE, GZIP, choose_coding, inflate, pack
from fastserve.settings import Limits
from tests.net.kit import limits


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


def refused(body: bytes, allowed: Limits) -> ServeError:
    with pytest.raises(ServeError) as caught:
        inflate(body, allowed)
    return caught.value


@given(st.lists(st.binary(max_size=70000), min_size=1, max_size=4))
def test_members_in_a_row_give_their_bytes(members: list[bytes]) -> None:
    body = b"".join(gzip.compress(member, mtime=0) for member in members)
    assert inflate(body, Limits()) == b"".join(members)
    assert inflate(body + bytes(9), Limits()) == b"".join(members)


@given(st.binary(max_size=70000))
def test_zlib_bodies_too(data: bytes) -> None:
    assert inflate(zlib.compress(data), Limits()) == data


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_truncated_body_is_an_error(data: bytes, draw: st.DataObject) -> None:
    body = gzip.compress(data, mtime=0)
    cut = draw.draw(st.integers(0, len(body) - 1))
    assert refused(body[:cut], Limits()).kind is Kind.INVALID_ARGUMENT


@given(st.binary(max_size=2000))
def test_noise_never_gives_more_than_an_error(data: bytes) -> None:
    with contextlib.suppress(ServeError):
        assert len(inflate(data, Limits())) <= 1 << 20


def test_corrupt_checksum_and_garbage_after_a_member() -> None:
    body = gzip.compress(b"hello")
    assert refused(body[:-5] + b"\xff" + body[-4:], Limits()).kind is Kind.INVALID_ARGUMENT
    assert refused(body + b"garbage", Limits()).kind is Kind.INVALID_ARGUMENT


def test_the_size_limit_is_exact() -> None:
    allowed = limits(inflated_bytes=1000)
    assert len(inflate(gzip.compress(bytes(1000)), allowed)) == 1000
    error = refused(gzip.compress(bytes(1001)), allowed)
    assert error.kind is Kind.RESOURCE_EXHAUSTED
    assert "limits.inflated_bytes" in error.message
    assert "1000" in error.message


def test_the_size_limit_counts_all_members() -> None:
    allowed = limits(inflated_bytes=1000)
    half = gzip.compress(bytes(500))
    assert len(inflate(half * 2, allowed)) == 1000
    assert "limits.inflated_bytes" in refused(half * 2 + gzip.compress(b"a"), allowed).message


def test_the_ratio_counts_beyond_a_floor() -> None:
    allowed = limits(inflate_ratio=10)
    assert len(inflate(gzip.compress(bytes(1 << 20)), allowed)) == 1 << 20
    assert "limits.inflate_ratio" in refused(gzip.compress(bytes((1 << 20) + 1)), allowed).message
    noise = random.Random(1).randbytes(2 << 20)
    assert inflate(gzip.compress(noise, 1), allowed) == noise


def test_a_hundred_bombs_leave_no_memory() -> None:
    bomb = gzip.compress(bytes(8 << 20), 9)
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        for _ in range(100):
            refused(bomb, Limits())
        gc.collect()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 1 << 20
    assert peak < 40 << 20


def test_doubly_encoded_bodies_are_decoded_once() -> None:
    inner = gzip.compress(b"hello")
    assert inflate(gzip.compress(inner), Limits()) == inner


def test_many_tiny_members_are_bounded() -> None:
    tiny = gzip.compress(b"", mtime=0)
    assert inflate(tiny * 65536, Limits()) == b""
    assert "limits.body_chunks" in refused(tiny * 65537, Limits()).message
