"""Streams: each message its own chunk at once, to the end; slow readers hold models up, leavers end them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.grps import deployments
from tests.dialects.grps.rig import JSON, PREDICT, Deployed, deployed, settings_of
from tests.dialects.grps.test_vectors import documents
from tests.running import until

STREAMS, MESSAGES = 200, 10
STREAMING = PREDICT + "?streaming=true"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(settings_of(deployments.write(tmp_path_factory.mktemp("streams") / "d"))) as opened:
        yield opened


@pytest.fixture(autouse=True)
def settled(served: Deployed) -> Iterator[None]:
    yield
    served.settle()


def request(body: Any, path: str = STREAMING, *lines: str) -> bytes:
    text = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1", "Host: t", "Content-Type: application/json", *lines)
    return "\r\n".join((*head, f"Content-Length: {len(text)}", "", "")).encode() + text


async def chunks(port: int, body: Any) -> AsyncIterator[bytes]:
    """Each as it comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body))
    try:
        await reader.readuntil(b"\r\n\r\n")
        while size := int((await reader.readline()).strip(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    finally:
        writer.close()


async def ask_chunks(port: int, body: Any) -> list[bytes]:
    return [chunk async for chunk in chunks(port, body)]


def test_every_message_is_a_chunk(served: Deployed) -> None:
    found = asyncio.run(ask_chunks(served.port, {"str_data": "s"}))
    assert [json.loads(data)["str_data"] for data in found] == ["s-0", "s-1", "s-2"]
    found = asyncio.run(ask_chunks(served.port, {"str_data": "binstream"}))
    assert found == [b"ab", b"cd"]
    found = asyncio.run(ask_chunks(served.port, {"str_data": "final"}))
    assert [json.loads(data)["str_data"] for data in found] == ["the last"]


def test_many_streams_at_once_are_told_at_once(served: Deployed, tmp_path: Path) -> None:
    """Nothing is gathered up: models send on when every client has what was sent. How soon that is,
    `bench.load grps-stream-200` measures."""
    came: Counter[int] = Counter()

    async def one() -> list[int]:
        found = []
        async for data in chunks(served.port, {"str_data": f"{tmp_path}*{MESSAGES}"}):
            found.append(int(json.loads(data)["str_data"]))
            came[found[-1]] += 1
            if came[found[-1]] == STREAMS:
                (tmp_path / str(found[-1])).touch()
        return found

    async def work() -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*(one() for _ in range(STREAMS))), 90)

    assert asyncio.run(work()) == [list(range(MESSAGES))] * STREAMS


def test_failures_are_the_last_chunk(served: Deployed) -> None:
    for body, told in (
        ({"str_data": "serr"}, "ValueError: midstream"),
        ({"str_data": "err:mine"}, "mine"),
        ({"model": "zz-1", "str_data": "x"}, "Model zz-1 not found."),
        ({}, "Have no legal member in json body."),
    ):
        reply = served.ask("POST", STREAMING, json.dumps(body).encode(), JSON)
        *good, last = documents(reply.body)
        assert (reply.status, last["status"]["status"], last["status"]["msg"]) == (200, "FAILURE", told)
        assert all(one["status"]["status"] == "SUCCESS" for one in good)
        message = served.stream(**body)[-1]
        if body:
            assert (message.status.code, message.status.msg) == (500, told)
    assert served.ask("POST", STREAMING, b"", JSON).status == 200


def test_a_batching_model_streams_each_caller_its_own(served: Deployed) -> None:
    async def work() -> list[list[tuple[int, bytes]]]:
        bodies = [{"model": "echo-2.0.0", "str_data": f"s{n}"} for n in range(8)]
        return await asyncio.gather(*(ask_chunks(served.port, body) for body in bodies))

    for n, stream in enumerate(asyncio.run(work())):
        assert [json.loads(data)["str_data"] for data in stream] == [f"s{n}-{k}" for k in range(3)]
    assert [m.str_data for m in served.stream(model="echo-2.0.0", str_data="g")] == ["g-0", "g-1", "g-2"]


@pytest.mark.parametrize("how", ["http", "grpc"])
def test_who_leaves_ends_its_stream(served: Deployed, tmp_path: Path, how: str) -> None:
    seen, began = tmp_path / "gone", tmp_path / "gone.began"
    if how == "http":
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(request({"str_data": f"gone:{seen}"}))
            until(began.exists, "the model has it")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        import grpc

        from tests.dialects.grps.rig import GRPS, SERVICE

        with grpc.insecure_channel(served.rpc) as channel:
            data = GRPS.GrpsMessage(str_data=f"gone:{seen}").SerializeToString()
            call = channel.unary_stream(SERVICE + "PredictStreaming")(data)
            until(began.exists, "the model has it")
            call.cancel()
    until(seen.exists, "the model saw it leave")


def test_a_slow_reader_holds_its_model_up(served: Deployed) -> None:
    """200 messages of 256 KiB, of which a few are read: the rest is not made, and others are served."""
    before = resident(served)
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(request({"str_data": "big"}))
        first = client.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        for _ in range(20):
            assert served.predict({"str_data": "hi"}).json["str_data"] == "hi"
        assert resident(served) - before < 30 << 20
        held = sum(h.queue.ring.slab_pages_used() for h in served.server.host.hosted.values())
        assert 0 < held * 4096 < 80 << 18  # 64 messages may wait
    assert served.predict({"str_data": "hi"}).json["str_data"] == "hi"


def resident(served: Deployed) -> int:
    """Of this process, which is the front."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_offline_while_requests_run(served: Deployed, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    go = tmp_path / "go"
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(served.predict, {"str_data": f"hold:{go}"})
        assert served.ask("GET", "/grps/v1/health/offline").status == 200
        assert served.predict({"str_data": "hi"}).json["str_data"] == "hi"
        go.touch()
        assert held.result().status == 200


@pytest.mark.parametrize("mode", ["header_param", "body_param"])
def test_other_controls(tmp_path: Path, mode: str) -> None:
    control = {"ctrl_mode": mode, "ctrl_key": "X-Stream", "res_content_type": "text/event-stream"}
    folder = deployments.write(tmp_path / "d", custom={"streaming_ctrl": control})
    with deployed(settings_of(folder)) as served:
        for value, streams in ((True, True), (False, False), ("true", mode == "header_param")):
            body: dict[str, Any] = {"str_data": "s"}
            headers = dict(JSON)
            if mode == "body_param":
                body["X-Stream"] = value
            else:
                headers["x-stream"] = str(value)
            reply = served.ask("POST", PREDICT + "?streaming=true", json.dumps(body).encode(), headers)
            assert (reply.headers["content-type"] == "text/event-stream") == streams
            assert len(documents(reply.body)) == (3 if streams else 1)
        assert served.ask("POST", PREDICT, b"", JSON).code == 400
