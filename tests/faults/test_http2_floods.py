"""Floods over real sockets: each is answered and bounded, the server's memory stays as it was, and somebody
else is answered, rightly, all the while. Rule by rule, without sockets: tests/net/http2/test_floods.py.

Memory is that of the front process. Its first connections teach it what it keeps for good, so each flood
comes twice before it is measured.
"""

from __future__ import annotations

import gzip
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, RstStreamFrame

from fastserve._ext.http2_frames import frame
from fastserve.net.http2.stream import ErrorCode
from fastserve.settings import Limits
from fastserve.util.memory import KEPT_BYTES
from tests.dialects.kserve import client_models
from tests.faults.bystander import Bystander
from tests.faults.flooding import (
    ACK,
    BOTH,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOODS,
    GOAWAY,
    GREETING,
    HEADERS,
    INFER,
    PING,
    PREFACE,
    ROW,
    SETTINGS,
    UPDATE,
    Link,
    block,
    grpc_block,
)
from tests.faults.rig import MESSAGES, SERVICE
from tests.faults.test_amplification import Cost
from tests.faults.test_counts import BACK
from tests.faults.test_slices import GROWS
from tests.running import QUICK_DEMO, Running, until

MB = 1 << 20
A_CONNECTION = 2 * MB  # what one may make the front process hold
QUEUED = 64 * MB  # replies that one does not take, beyond which it gets no new stream


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("floods")
    (folder / "models").mkdir()
    side, one = {"dtype": "float32", "shape": [-1]}, {"dtype": "float32", "shape": [1]}
    client_models.write_native(folder / "models", "free", BACK, inputs={"x": side}, outputs={"y": side})
    client_models.write_native(folder / "models", "grows", GROWS, inputs={"x": one}, outputs={"y": side})
    with Running(folder / "models", folder / "log") as running, Bystander(running):
        with Link(running.http) as link:
            link.send(frame(HEADERS, END_HEADERS, 1, block(INFER)) + frame(DATA, END_STREAM, 1, ROW))
            link.wait(1, DataFrame)
        yield running


@pytest.fixture
def served(server: Running) -> Iterator[Running]:
    """It lives, holds what it held, has logged no error, and everybody else was answered."""
    before = server.holds()
    with Bystander(server):
        yield server
    assert server.alive
    server.settles(before)


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood(served: Running, name: str) -> None:
    for _ in range(2):
        with Link(served.http) as link:
            link.flood(FLOODS[name]())
            link.rest()
    cost = Cost(served)
    with Link(served.http) as link:
        sent = link.flood(FLOODS[name]())
        goodbye = link.goodbye()
    assert goodbye is not None, f"not a word after {sent} bytes"
    assert ErrorCode(goodbye[1]) in (ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.FLOW_CONTROL_ERROR)
    assert cost.peak_bytes < A_CONNECTION


def test_many_floods_leave_nothing(served: Running) -> None:
    def all_of_them() -> None:
        for flood in FLOODS.values():
            with Link(served.http) as link:
                link.flood(flood())
                link.rest()

    all_of_them()
    before = served.rss_bytes
    for _ in range(5):
        all_of_them()
    assert served.rss_bytes - before < A_CONNECTION


def test_a_hundred_thousand_streams(served: Running) -> None:
    """One after the other on one connection, answered each: that is no flood, and leaves nothing."""
    head, total, at_once = block("/api/health/live", "GET"), 100_000, 100  # no body: no window is used up

    def ask(link: Link, first: int, last: int) -> None:
        for start in range(first, last, 2 * at_once):
            link.send(b"".join(frame(HEADERS, BOTH, n, head) for n in range(start, start + 2 * at_once, 2)))
            ends = 0
            with link._heard:  # every reply is a HEADERS frame of 200 that ends its stream
                while ends < at_once:
                    assert link._heard.wait_for(lambda: link.came, 60), "no reply"
                    found, ends = take_frames(link.came), ends
                    ends += sum(kind == HEADERS for kind in found)
                    assert GOAWAY not in found

    with Link(served.http) as link:
        ask(link, 1, 20_001)
        cost = Cost(served)
        ask(link, 20_001, 2 * total + 1)
        assert cost.peak_bytes < A_CONNECTION


def take_frames(came: bytearray) -> list[int]:
    """The kinds of the whole frames, which are taken away."""
    found, at = [], 0
    while at + 9 <= len(came) and at + 9 + int.from_bytes(came[at : at + 3], "big") <= len(came):
        found.append(came[at + 3])
        at += 9 + int.from_bytes(came[at : at + 3], "big")
    del came[:at]
    return found


# -- gRPC -------------------------------------------------------------------------------------------


def call(number: int, head: bytes, message: bytes, flag: int = 0) -> bytes:
    """A unary call whose message fits the window a client has before it is told of more."""
    data = struct.pack(">BI", flag, len(message)) + message
    pieces = [data[at : at + 16384] for at in range(0, len(data), 16384)]
    frames = [
        frame(DATA, END_STREAM if at == len(pieces) - 1 else 0, number, piece)
        for at, piece in enumerate(pieces)
    ]
    return frame(HEADERS, END_HEADERS, number, head) + b"".join(frames)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_messages_that_unpack_to_a_thousand_times_their_size(served: Running, coding: str) -> None:
    """12 bombs of 30 MB in 30 KB at once on one connection, of each of which 6 MB may be seen: they are
    refused one after the other, so that all take what a few would."""
    zeros = bytes(30 * MB)
    bomb = gzip.compress(zeros, 9) if coding == "gzip" else zlib.compress(zeros, 9)
    head = grpc_block(f"{SERVICE}ModelInfer", ("grpc-encoding", coding))
    cost = Cost(served)
    with Link(served.grpc) as link:
        for number in range(1, 25, 2):
            link.send(call(number, head, bomb, flag=1))
        answers = link.wait(12, HeadersFrame)
        assert len(answers) == 12
        assert all("END_STREAM" in one.flags for one in answers)
    assert cost.peak_bytes < 5 * Limits().inflate_ratio * len(bomb)


def infer_message() -> bytes:
    made = MESSAGES.ModelInferRequest(model_name="free")
    made.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    made.raw_input_contents.append(np.array([1, 2], "<f4").tobytes())
    data: bytes = made.SerializeToString()
    return data


def test_a_deadline_in_ten_thousand_years(served: Running) -> None:
    """As many hours as a client may write, which are more nanoseconds than 64 bits hold; also on the way of
    a request that is known."""
    head = grpc_block(f"{SERVICE}ModelInfer", ("grpc-timeout", "99999999H"))
    with Link(served.grpc) as link:
        for number in (1, 3, 5):
            link.send(call(number, head, infer_message()))
            assert len(link.wait((number + 1) // 2, DataFrame)) == (number + 1) // 2


def test_calls_reset_in_the_same_breath(served: Running) -> None:
    head, message = grpc_block(f"{SERVICE}ModelInfer"), infer_message()

    def flood() -> Iterator[bytes]:
        for number in range(1, 1 << 30, 2):
            yield call(number, head, message) + frame(3, 0, number, b"\0\0\0\x08")

    for _ in range(3):
        cost = Cost(served)
        with Link(served.grpc) as link:
            link.flood(flood())
            goodbye = link.goodbye()
        assert goodbye is not None
        assert goodbye[1] == ErrorCode.ENHANCE_YOUR_CALM
    assert cost.peak_bytes < A_CONNECTION


# -- windows ----------------------------------------------------------------------------------------

SHUT = PREFACE + frame(SETTINGS, 0, 0, b"\0\x04\0\0\0\0") + frame(SETTINGS, ACK, 0, b"")


def ask_for(number: int, count: int) -> bytes:
    """A reply of so many numbers, of 5 bytes each."""
    body = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[%d]}]}' % count
    return frame(HEADERS, END_HEADERS, number, block("/v2/models/grows/infer")) + frame(
        DATA, END_STREAM, number, body
    )


def test_a_window_of_nothing_then_one_byte_at_a_time(served: Running) -> None:
    with Link(served.http, SHUT) as link:
        link.send(frame(HEADERS, END_HEADERS, 1, block(INFER)) + frame(DATA, END_STREAM, 1, ROW))
        link.wait(1, HeadersFrame)
        body = b""
        while not body.endswith(b"}]}"):
            link.send(frame(UPDATE, 0, 1, b"\0\0\0\x01"))
            found = link.wait(len(body) + 1, DataFrame)
            assert all(len(one.data) == 1 for one in found)
            body = b"".join(one.data for one in found)
        assert b'"data":[1.0,2.0]' in body


@pytest.mark.parametrize("number", [0, 1])
def test_a_window_beyond_its_end(served: Running, number: int) -> None:
    with Link(served.http, SHUT) as link:
        link.send(frame(HEADERS, END_HEADERS, 1, block(INFER)))
        link.send(frame(UPDATE, 0, number, b"\x7f\xff\xff\xff") * 2)
        kind = RstStreamFrame if number else GoAwayFrame
        (answer,) = link.wait(1, kind)
        assert answer.error_code == ErrorCode.FLOW_CONTROL_ERROR


def test_a_client_that_does_not_read_large_replies(served: Running) -> None:
    """5 MB each: they are kept up to a bound, and from then on it is told to come again."""
    before, cost = served.rss_bytes, Cost(served)
    with Link(served.http, SHUT) as link:
        for number in range(1, 81, 2):
            link.send(ask_for(number, MB))
            link.wait((number + 1) // 2, (HeadersFrame, RstStreamFrame))
        refused = link.frames(RstStreamFrame)
        assert refused
        assert {one.error_code for one in refused} == {ErrorCode.REFUSED_STREAM}
        assert cost.peak_bytes < 2 * QUEUED
    until(lambda: served.rss_bytes < before + KEPT_BYTES, "what was kept for it is given back", 30)


# -- connections that end badly ---------------------------------------------------------------------


def test_connections_that_vanish(served: Running) -> None:
    """In the middle of the preface, a header block, a body, a reply; with and without a reset."""
    request = frame(HEADERS, END_HEADERS, 1, block(INFER)) + frame(DATA, END_STREAM, 1, ROW)
    script = GREETING + request + ask_for(3, 100_000)
    host, _, port = served.http.rpartition(":")
    for cut in range(1, len(script), 3):
        link = socket.create_connection((host, int(port)), 60)
        link.sendall(script[:cut])
        if cut & 1:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()


def test_a_client_that_shuts_its_side_is_answered(served: Running) -> None:
    with Link(served.http) as link:
        for number in range(1, 41, 2):
            link.send(ask_for(number, 10))
        link.socket.shutdown(socket.SHUT_WR)
        found = link.rest()
        assert {one.stream_id for one in found if isinstance(one, DataFrame)} == set(range(1, 41, 2))


def test_goodbyes_in_the_middle(served: Running) -> None:
    """A client that says GOAWAY and goes on: what it asks is answered, before and after."""
    leave = frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0))
    with Link(served.http) as link:
        link.send(ask_for(1, 10) + leave + ask_for(3, 10) + leave + frame(PING, 0, 0, bytes(8)))
        assert {one.stream_id for one in link.wait(2, DataFrame)} == {1, 3}


def test_a_drain_answers_what_it_has_promised(tmp_path: Path) -> None:
    """Requests flow while the server is told to stop: those up to the number of its last GOAWAY are answered,
    and no other. Ten connections, a new request as soon as one is answered."""
    links = []
    with Running(Path("demo"), tmp_path / "log", *QUICK_DEMO, "--drain-s", "20") as running:
        body = b'{"instances":[1]}'
        head = block("/v1/models/half_plus_two:predict")

        def ask(number: int) -> bytes:
            return frame(HEADERS, END_HEADERS, number, head) + frame(DATA, END_STREAM, number, body)

        links = [Link(running.http) for _ in range(10)]
        asked = dict.fromkeys(links, -1)
        end = time.monotonic() + 60
        stopped = False
        while not all(link.ended.is_set() for link in links) and time.monotonic() < end:
            for link in links:
                if len(link.frames(DataFrame)) > asked[link] // 2 and not link.ended.is_set():
                    asked[link] += 2
                    link.send(ask(asked[link]))
            if not stopped and min(asked.values()) > 40:
                running.signal(15)  # type: ignore[arg-type]
                stopped = True
        running.wait(60)
        for link in links:
            frames = link.rest()
            last = [one.last_stream_id for one in frames if isinstance(one, GoAwayFrame)][-1]
            answered = {one.stream_id for one in frames if isinstance(one, DataFrame)}
            assert answered >= set(range(1, min(last, asked[link]) + 1, 2))
            assert max(answered) <= last
            link.close()
