"""A recorded connection of gRPC with every kind of call, cut in two at every byte: the same answers."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from fastserve._ext.http2_frames import frame
from fastserve.net.access_control import Opening, Scope
from fastserve.net.grpc import GrpcExchange, Method
from fastserve.net.grpc.calls import GrpcCalls
from fastserve.net.grpc.method import RpcTerms
from fastserve.settings import Limits
from tests.net.grpc import peer
from tests.net.grpc.test_calls import squeeze, squeeze_all
from tests.net.grpc.test_methods import METHODS, echo, run
from tests.net.http2.kit import PREFACE, read_frames
from tests.net.kit import WAIT_S, Pipe

HEADERS, DATA, CONTINUATION = 1, 0, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
RESET = 17  # a stream that its client takes back
message = peer.frame


def reverse(data: bytes, exchange: GrpcExchange) -> bool:
    exchange.reply(data[::-1])
    return True


SERVED = [
    *METHODS,
    Method("/t.T/Squeeze", bytes, squeeze, bytes, scope=Scope.INFER),
    Method("/t.T/SqueezeAll", bytes, squeeze_all, bytes, True, True, scope=Scope.INFER),
    Method("/t.T/Reverse", bytes, echo, bytes, start=reverse, scope=Scope.INFER),
]
# path, headers besides, the frames of its body; in the order of their streams, 1 and on.
CALLS: list[tuple[str, list[tuple[str, str]], list[tuple[int, bytes]]]] = [
    ("Reverse", [], [(0, message(b"short"))]),
    ("Reverse", [("grpc-timeout", "1H")], [(0, message(b"in time"))]),
    ("Look", [("tag", "x"), ("key-bin", "AAE=")], [(0, message(b""))]),
    ("Squeeze", [("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip")],
     [(0, message(gzip.compress(b"packed" * 9, mtime=0), 1))]),
    ("SqueezeAll", [("grpc-encoding", "deflate"), ("grpc-accept-encoding", "deflate")],
     [(0, message(zlib.compress(b"a"), 1) + message(b"b")), (0, message(zlib.compress(b"c"), 1))]),
    ("Add", [], [(0, message(b"one")[:4]), (PADDED, b"\3" + message(b"one")[4:] + bytes(3)),
                 (0, message(b""))]),
    ("Count", [], [(0, message(b"3"))]),
    ("Fail", [], [(0, message(b"NOT_FOUND"))]),
    ("Double", [], [(0, message(b"taken back"))]),
    ("None", [], [(0, message(b"nobody's"))]),
    ("Reverse", [], [(0, message(b"short"))]),
]  # fmt: skip


def transcript() -> bytes:
    encoder, sent = Encoder(), PREFACE + SettingsFrame(0).serialize()
    sent += SettingsFrame(0, flags=["ACK"]).serialize()
    for number, (name, headers, body) in enumerate(CALLS):
        stream = 2 * number + 1
        fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/t.T/{name}"), (":authority", "t")]
        fields += [("content-type", "application/grpc"), ("te", "trailers"), *headers]
        block = encoder.encode(fields)
        if number % 3 == 2:
            sent += frame(HEADERS, 0, stream, block[:7])
            sent += frame(CONTINUATION, END_HEADERS, stream, block[7:])
        else:
            sent += frame(HEADERS, END_HEADERS, stream, block)
        sent += b"".join(frame(DATA, flags, stream, data) for flags, data in body)
        sent += (
            RstStreamFrame(stream, 8).serialize() if stream == RESET else frame(DATA, END_STREAM, stream, b"")
        )
    return sent


async def replies(parts: list[bytes]) -> dict[int, list[Any]]:
    """Return the answers of each stream: its header blocks decoded, its bytes joined."""
    terms = RpcTerms(1 << 20, Limits(), None, Opening())
    calls = GrpcCalls({method.path: method for method in SERVED}, terms, 0)
    pipe = Pipe({}, services=[calls], only_http2=True)
    for part in parts:
        pipe.feed(part)
        await asyncio.sleep(0)
    for _ in range(10_000):
        if not calls.running:
            break
        await asyncio.sleep(0)
    assert not pipe.protocol.streams
    pipe.close()
    calls.deadlines.close()
    decoder, found = Decoder(), dict[int, list[Any]]()
    for one in read_frames(pipe.sent):
        told = found.setdefault(one.stream_id, [])
        if isinstance(one, HeadersFrame):
            fields = decoder.decode(one.data)
            told.append(sorted(field for field in fields if field[0] != "x-request-id"))  # a new one
        elif isinstance(one, DataFrame):
            before = told.pop() if told and isinstance(told[-1], bytes) else b""
            told.append(before + one.data)
    found.pop(0)  # the connection's own
    found.pop(RESET, None)  # whether its reply had begun is a matter of time
    return found


def test_a_transcript_cut_at_every_byte() -> None:
    whole = transcript()

    async def main() -> None:
        wanted = await asyncio.wait_for(replies([whole]), WAIT_S)
        statuses = [dict(wanted[stream][-1])["grpc-status"] for stream in sorted(wanted)]
        assert statuses == ["0", "0", "0", "0", "0", "0", "0", "5", "12", "0"]
        assert wanted[1][1] == message(b"trohs")
        assert wanted[11][1] == message(b"one+")
        for cut in range(1, len(whole)):
            assert await replies([whole[:cut], whole[cut:]]) == wanted, cut
        assert await replies([whole[at : at + 1] for at in range(len(whole))]) == wanted

    run(main())
