"""The `http` vectors over a real socket: wire and dialect together, byte for byte but for Date."""

from __future__ import annotations

import asyncio
import json

import pytest

from fastserve.net.listener import HttpListener
from fastserve.settings import Limits
from tests.dialects.tfserving.fakes import dialect_of, standard_engine
from tests.dialects.tfserving.vectors import Vector, body_of, each

OURS_TO_ADD = {"date", "connection", "server", "x-request-id"}


async def exchange(raw: bytes, *, cors: bool) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own; the reply's status, headers by lower-case name, and body."""
    dialect = dialect_of(standard_engine(), cors=cors, monitoring=True)
    listener = HttpListener("127.0.0.1", 0, [dialect], Limits())
    await listener.open()
    try:
        reader, writer = await asyncio.open_connection(*listener.address)
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
        size = 0 if raw.startswith(b"HEAD ") else int(headers["content-length"])
        body = await reader.readexactly(size)
        writer.close()
        await writer.wait_closed()
        return int(status.split()[1]), headers, body
    finally:
        await listener.close()


def request_of(given: dict[str, object]) -> bytes:
    headers = {"Host": "localhost", **given.get("headers", {})}  # type: ignore[dict-item]
    body = body_of(given)
    if body or given["method"] == "POST":
        headers["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{given['method']} {given['path']} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


@each("http")
def test_vector(vector: Vector) -> None:
    expected = vector["expected"]
    raw = request_of(vector["input"])
    status, headers, body = asyncio.run(exchange(raw, cors=vector["server"]["cors_enabled"]))
    compared = expected.get("compare", ["http_status", "headers", "body"])
    assert status == expected["http_status"]
    if "headers" in compared:
        wanted = {key.lower(): value for key, value in expected["headers"].items()}
        assert {key: headers[key] for key in wanted if key in headers} == wanted
        assert set(headers) - set(wanted) <= OURS_TO_ADD
    if "body" in compared:
        assert body == body_of(expected)


@pytest.mark.parametrize("target", ["/v1/models/m:predict", "/v1/models/m/labels/latest:predict"])
def test_one_connection_carries_many_calls(target: str) -> None:
    async def run() -> list[bytes]:
        listener = HttpListener("127.0.0.1", 0, [dialect_of(standard_engine())], Limits())
        await listener.open()
        reader, writer = await asyncio.open_connection(*listener.address)
        given = {"method": "POST", "path": target, "body": '{"instances": [1.0]}'}
        writer.write(request_of(given) * 3)
        bodies = []
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            bodies.append(await reader.readexactly(size))
        writer.close()
        await writer.wait_closed()
        await listener.close()
        return bodies

    assert [json.loads(body) for body in asyncio.run(run())] == [{"predictions": [2.5]}] * 3
