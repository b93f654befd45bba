"""Whole requests of every dialect, mutated, over raw sockets; and what the server says to them.

    for request in http_inputs("kserve_v2", rng, 10): answer = send_http(place, request)

Bodies are the kept inputs and the small forms of tests/faults/shapes.py in their places, mutated; heads are
mutated as bytes, and so are frames of HTTP/2 and messages of gRPC.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

import grpc
from google.protobuf.descriptor import Descriptor

from fastserve._ext.http2_frames import frame
from tests.faults import shapes
from tests.faults.costs import ENDLESS
from tests.faults.flooding import (
    ACK,
    BOTH,
    DATA,
    END_HEADERS,
    END_STREAM,
    GREETING,
    HEADERS,
    SETTINGS,
    UPDATE,
    block,
    grpc_block,
)
from tests.faults.rig import request_bytes
from tests.fuzz.mutator import mutations, read_corpus
from tests.net.http2.kit import PREFACE

ANSWER_S = 30.0
# A client that has sent everything opens no window: what does not fit is given up a second later.
_WINDOW = (1 << 24).to_bytes(4, "big")
WIDE = PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + _WINDOW) + frame(SETTINGS, ACK, 0, b"")
WIDE += frame(UPDATE, 0, 0, _WINDOW)
SMALL = 40  # bytes of a filling
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
RPCS = shapes.rpcs()
# Of the server's own doing, whatever a client sends. 501 is for what is not there or not allowed, 503 for a
# model that an earlier request has unloaded, 505 for a version of HTTP.
FAULTS = {500, 502, 504}
# Triton answers 500 to a document that it cannot read, and so does its API here. A fault is in the log.
TRITONS = "/v2/"
GRPS = "/grps/", "/customized"
GRPS_HAS_NONE = b' not found.","status":"FAILURE"'
TRITONS_SERVICE = "/inference.GRPCInferenceService/"  # INTERNAL, for models and regions that there are not
TRITONS_CODE = grpc.StatusCode.INTERNAL
# gRPC itself has INTERNAL for a message that cannot be decoded; here its words begin with `malformed`.
GRPC_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
# Frames that end a connection, RFC 9113 section 7: the server's own error.
INTERNAL_ERROR = 2
STATUS_500 = b"\x8e"  # of HPACK's static table


class Sent(NamedTuple):
    """Bytes for a connection of their own. `name`: where they go."""

    name: str
    data: bytes


def bodies(dialect: str) -> list[bytes]:
    found = [*read_corpus("json"), *read_corpus("infer_json")]
    for place in shapes.PLACES.get(dialect, shapes.ADMIN_PLACES):
        found += [place % shapes.fill(filling, SMALL) for filling in shapes.FILLINGS]
    return found


def http_inputs(dialect: str, rng: random.Random, count: int) -> Iterator[Sent]:
    """`count` requests for each route of the dialect; of every fourth the head is mutated too."""
    kept = bodies(dialect)
    for route in shapes.routes():
        if route.dialect != dialect:
            continue
        for number, body in enumerate(mutations(kept, "json", rng, count)):
            headers = {"Content_Type": "application/json"}
            if dialect == "triton_v1":
                headers = {"Content_Type": "application/octet-stream", "NV_InferRequest": shapes.V1_HEADER}
            if rng.random() < 0.2:
                size = str(rng.choice((0, 1, len(body) // 2, len(body), len(body) + 1, 1 << 40)))
                headers["Inference_Header_Content_Length"] = size
            data = request_bytes(route.verb, route.target, body, Connection="close", **headers)
            if number % 4 == 3:
                head, _, rest = data.partition(b"\r\n\r\n")
                (head,) = mutations([head], "text", rng, 1)
                data = head + b"\r\n\r\n" + rest
            yield Sent(f"{route.verb} {route.target}", data)


def http2_inputs(dialect: str, rng: random.Random, count: int) -> Iterator[Sent]:
    """The same over HTTP/2: a good request with a mutated body, or mutated frames."""
    kept, frames = bodies(dialect), read_corpus("frames")
    routes = [route for route in shapes.routes() if route.dialect == dialect]
    for number in range(count):
        route = rng.choice(routes)
        (body,) = mutations(kept, "json", rng, 1)
        whole = frame(HEADERS, END_HEADERS, 1, block(route.target, route.verb)) + b"".join(
            frame(DATA, 0, 1, body[at : at + 16384]) for at in range(0, len(body), 16384)
        )
        whole += frame(DATA, END_STREAM, 1, b"")
        if number % 2:
            (whole,) = mutations([whole[:4000], *frames], "frames", rng, 1)
        yield Sent(f"HTTP/2 {route.verb} {route.target}", WIDE + whole)


def grpc_frames(rng: random.Random, count: int) -> Iterator[Sent]:
    """Frames of gRPC calls, mutated as bytes."""
    messages = [*read_corpus("grpc"), *read_corpus("v2_proto")]
    for _ in range(count):
        path = rng.choice(sorted(RPCS))
        (message,) = mutations(messages, "proto", rng, 1)
        good = frame(HEADERS, END_HEADERS, 1, grpc_block(path)) + frame(DATA, END_STREAM, 1, message[:16384])
        ping = frame(HEADERS, BOTH, 3, grpc_block(path))
        (data,) = mutations([good, good + ping], "frames", rng, 1)
        yield Sent(f"frames {path}", GREETING + data)


def rpc_inputs(service: str, rng: random.Random, count: int) -> Iterator[Sent]:
    """Messages for each RPC of a service: of its descriptor's shapes, and kept ones."""
    for path, message in RPCS.items():
        if path.split("/")[1] == service and path not in ENDLESS:
            for data in mutations(messages_of(message), "proto", rng, count):
                yield Sent(path, data)


def messages_of(message: Descriptor) -> list[bytes]:
    found = [data for _, data in shapes.message_shapes(message, SMALL)]
    for kind in ("v2_proto", "tfs_proto", "grps_proto", "v1_proto"):
        found += read_corpus(kind)
    return found


def converse(place: str, data: bytes) -> bytes:
    """All that the server says before it hangs up, which it does when its client has sent everything."""
    host, _, port = place.rpartition(":")
    came = bytearray()
    with socket.create_connection((host, int(port)), ANSWER_S) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                came += piece
        except ConnectionError:
            pass
    return bytes(came)


def _is_originals(sent: Sent, came: bytes) -> bool:
    """Whether the original answers 500 to this: Triton where it cannot read JSON, grps where it has no such
    model (spec)."""
    return TRITONS in sent.name or (GRPS_HAS_NONE in came and any(path in sent.name for path in GRPS))


def http_fault(sent: Sent, came: bytes) -> str:
    """Name a status that no input may cause; "" for none."""
    if _is_originals(sent, came):
        return ""
    return ", ".join(
        f"{code.decode()} {came[-200:]!r}" for code in STATUS.findall(came) if int(code) in FAULTS
    )


def http2_fault(sent: Sent, came: bytes) -> str:
    """The same of frames: GOAWAY and RST_STREAM with INTERNAL_ERROR, and responses that are such faults."""
    at, said = 0, []
    while at + 9 <= len(came):
        size, kind = int.from_bytes(came[at : at + 3], "big"), came[at + 3]
        payload = came[at + 9 : at + 9 + size]
        if (kind == 7 and payload[4:8] == INTERNAL_ERROR.to_bytes(4, "big")) or (
            kind == 3 and payload == INTERNAL_ERROR.to_bytes(4, "big")
        ):
            said.append("INTERNAL_ERROR")
        if kind == 1 and payload[:1] == STATUS_500 and not _is_originals(sent, came):
            said.append("500")
        at += 9 + size
    return ", ".join(said)


def call(channel: grpc.Channel, path: str, data: bytes) -> str:
    """One call as a stream of one message; names a code that no input may cause."""
    answers = channel.stream_stream(path)(iter([data]), timeout=ANSWER_S)
    try:
        for _ in answers:
            pass
    except grpc.RpcError:
        pass
    code = answers.code()
    words = answers.details() or ""
    if words.startswith("malformed ") or (path.startswith(TRITONS_SERVICE) and code is TRITONS_CODE):
        return ""
    return f"{code.name}: {words}" if code in GRPC_FAULTS else ""
