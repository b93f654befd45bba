"""ChunkReader against what was encoded, in every split."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

from hypothesis import given
from hypothesis import strategies as st

from fastserve.net.http1.parser import ChunkReader
from fastserve.settings import Limits


def feed_all(reader: ChunkReader, data: bytes) -> int:
    """In as many steps as it takes; how many bytes were used."""
    used = 0
    while used < len(data) and not reader.done:
        taken, used = used, reader.feed(data, used)
        assert used > taken
    return used


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=9000), st.sampled_from([b"", b";a", b";a=b;c"]))),
    st.lists(st.integers(0, 20000), max_size=20),
    st.binary(max_size=20),
)
def test_a_body_comes_back_whole(chunks: list[tuple[bytes, bytes]], cuts: list[int], after: bytes) -> None:
    framed = (
        b"".join(b"%X%b\r\n%b\r\n" % (len(data), ext, data) for data, ext in chunks) + b"0\r\nT: x\r\n\r\n"
    )
    data = framed + after
    reader = ChunkReader(Limits())
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    used = 0
    for start, end in pairwise(ends):
        if not reader.done:
            used = start + feed_all(reader, data[start:end])
    assert reader.done
    assert used == len(framed)
    assert reader.body() == b"".join(data for data, _ in chunks)


def test_the_most_chunks_allowed_cost_little() -> None:
    data = b"1\r\na\r\n" * 65536 + b"0\r\n\r\n"
    reader = ChunkReader(Limits())
    before = process_time()
    feed_all(reader, data)
    assert process_time() - before < 1
    assert reader.done
    assert reader.body() == b"a" * 65536
