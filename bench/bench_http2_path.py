"""A call of gRPC from the socket to its method, and its answer back: all of the wire, whose hot path is
compiled; the baseline is what plain HTTP/1.1 takes for a request of as many bytes."""

from __future__ import annotations

from typing import Any

from fastserve._ext.hpack import static_block
from fastserve._ext.http2_frames import DATA, HEADERS, SETTINGS, WINDOW_UPDATE, frame
from fastserve.net.access_control import Opening, Scope
from fastserve.net.grpc.calls import GrpcCalls
from fastserve.net.grpc.method import Method, RpcTerms
from fastserve.net.request import Call
from fastserve.settings import Limits
from tests.net.kit import Pipe

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATH, MESSAGE, ANSWER = "/a.B/Call", bytes(range(39)), bytes(30)
FIELDS = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH.encode()), (b":authority", b"a")]


async def never(request: Any, rpc: Any) -> Any:
    raise AssertionError("a call that `start` has taken")


def test_a_call(benchmark: Any) -> None:
    taken: list[Any] = []

    def start(message: bytes, call: Any) -> bool:
        taken.append(call)
        return True

    method = Method(PATH, bytes, never, bytes, scope=Scope.INFER, start=start)
    calls = GrpcCalls({PATH: method}, RpcTerms(1 << 20, Limits(), None, Opening()), 0)
    pipe = Pipe({}, services=[calls])
    pipe.feed(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4, "big")))
    block = static_block([*FIELDS, (b"content-type", b"application/grpc")])
    body = b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE
    number = 1

    def run() -> None:
        nonlocal number
        pipe.arrive(frame(HEADERS, 4, number, block) + frame(DATA, 1, number, body))
        taken.pop().reply(ANSWER)
        number += 2
        pipe.sent = b""

    benchmark(run)
    assert calls.running == 0


def test_baseline(benchmark: Any) -> None:
    taken: list[Call] = []
    pipe = Pipe({PATH: taken.append})
    request = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 39\r\n\r\n%b" % (PATH.encode(), MESSAGE)

    def run() -> None:
        pipe.arrive(request)
        taken.pop().reply(200, ANSWER)
        pipe.sent = b""

    benchmark(run)
    assert not taken
