"""The checksum of a record of 600 KB, against zlib with its own polynomial."""

from __future__ import annotations

import random
import zlib

import pytest

from fastserve._ext.crc32c import crc32c

DATA = random.Random(1).randbytes(602_112)


@pytest.mark.parametrize(("kind", "limit_s"), [(crc32c, 2e-3), (zlib.crc32, 2e-3)])
def test_crc(benchmark, kind, limit_s):  # type: ignore[no-untyped-def]
    assert 0 < benchmark(kind, DATA) < 1 << 32
    assert benchmark.disabled or benchmark.stats["min"] < limit_s
