"""A miss, its answer kept, and a hit: against hashing the inputs and an OrderedDict alone."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import count

import pytest

from fastserve._ext.response_cache import COUNTS_BYTES, Counts, ResponseCache

HEAD, OUTPUTS = b"h" * 80, [memoryview(bytes(range(64)))] * 2
INPUTS = [memoryview(bytearray(64)), memoryview(bytes(64))]
NUMBERS = count()
CACHE, COUNTS = ResponseCache(1 << 20), Counts(lambda ns, others, *, hit: None, bytearray(COUNTS_BYTES))
PLAIN: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()


def ours():  # type: ignore[no-untyped-def]
    INPUTS[0][:8] = next(NUMBERS).to_bytes(8, "big")
    miss = CACHE.find(HEAD, INPUTS, COUNTS)
    miss.keep("form", OUTPUTS)
    miss.close()
    return CACHE.find(HEAD, INPUTS, COUNTS).memory


def plain():  # type: ignore[no-untyped-def]
    INPUTS[0][:8] = next(NUMBERS).to_bytes(8, "big")
    key = HEAD + b"".join(blake2b(data).digest() for data in INPUTS)
    PLAIN[key] = tuple(map(bytes, OUTPUTS))
    PLAIN.move_to_end(key)
    return PLAIN[key]


@pytest.mark.parametrize("way", [ours, plain])
def test_a_miss_and_a_hit(benchmark, way):  # type: ignore[no-untyped-def]
    assert benchmark(way) == tuple(map(bytes, OUTPUTS))
    assert benchmark.disabled or way is plain or benchmark.stats["min"] < 4e-6
