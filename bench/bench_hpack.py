"""The header block of a gRPC request once the table is warm, and a reply's: against the library `hpack`."""

from __future__ import annotations

import hpack
import pytest

from fastserve._ext.hpack import HpackDecoder, static_block

REQUEST = [
    (b":scheme", b"http"),
    (b":method", b"POST"),
    (b":authority", b"127.0.0.1:8001"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"user-agent", b"grpc-python/1.85.1 grpc-c/53.0.0 (linux; chttp2)"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
]
REPLY = [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"gzip")]
ENCODER = hpack.Encoder()
BLOCKS = [ENCODER.encode(REQUEST), ENCODER.encode(REQUEST)]


@pytest.mark.parametrize(("kind", "limit_s"), [(HpackDecoder, 2e-6), (hpack.Decoder, 1)])
def test_decode(benchmark, kind, limit_s):  # type: ignore[no-untyped-def]
    decoder, more = kind(), () if kind is HpackDecoder else (True,)
    decoder.decode(BLOCKS[0], *more)
    assert benchmark(decoder.decode, BLOCKS[1], *more) == REQUEST
    assert benchmark.disabled or benchmark.stats["min"] < limit_s


@pytest.mark.parametrize(("encode", "limit_s"), [(static_block, 3e-6), (ENCODER.encode, 1)])
def test_encode(benchmark, encode, limit_s):  # type: ignore[no-untyped-def]
    assert len(benchmark(encode, REPLY)) < 64
    assert benchmark.disabled or benchmark.stats["min"] < limit_s
