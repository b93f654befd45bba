"""The captured cases over a real socket, in their order: some depend on earlier ones."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.config import Limits
from fastserve.wire import HttpListener
from tests.dialects.kserve_v2.deviations import DEVIATIONS
from tests.dialects.kserve_v2.fakes import Probe

Vector = dict[str, Any]
Answers = dict[str, tuple[int, dict[str, str], bytes]]
CASES = Path(__file__).resolve().parents[2] / "vectors" / "triton_v2_http.jsonl"
KEY = f"probe_{os.getpid()}"  # in place of the captured name: two runs may not meet
VECTORS: list[Vector] = [
    json.loads(line.replace("probe_shm", KEY)) for line in CASES.read_text().splitlines()
]
SHM = Path("/dev/shm") / KEY


def request_of(given: Vector) -> bytes:
    text = given["body"]
    body = base64.b64decode(text[4:]) if text.startswith("b64:") else text.encode()
    headers = {"Host": "x", "Content-Length": str(len(body)), **given["headers"]}
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    return f"{given['method']} {given['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while not body.endswith(b"0\r\n\r\n"):
        body += await reader.readuntil(b"\r\n")
    return body


async def exchange(address: tuple[str, int], given: Vector) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request_of(given))
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if given["method"] == "HEAD":
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = await read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    writer.close()
    await writer.wait_closed()
    return int(status.split()[1]), headers, body


async def attempt(address: tuple[str, int], given: Vector) -> tuple[int, dict[str, str], bytes]:
    """So that one broken answer fails its own test only."""
    try:
        return await exchange(address, given)
    except asyncio.IncompleteReadError as error:
        return 0, {}, error.partial


def differences(expected: Vector, status: int, headers: dict[str, str], body: bytes) -> Iterator[str]:
    """As the replay tool compares."""
    if status != expected["status"]:
        yield f"status {status}"
    for name, value in expected.get("headers", {}).items():
        if headers.get(name.lower()) != value:
            yield f"{name}: {headers.get(name.lower())}"
    if "body" in expected:
        try:
            got = json.loads(body) if body or expected["body"] else ""
        except ValueError:
            got = body.decode("latin1")
        if json.dumps(got, sort_keys=True) != json.dumps(expected["body"], sort_keys=True):
            yield f"body {str(got)[:400]}"
    elif "body_raw" in expected and body.decode("utf8", "replace") != expected["body_raw"]:
        yield f"raw body {body[:400]!r}"
    elif "body_b64" in expected and base64.b64encode(body).decode() != expected["body_b64"]:
        yield f"binary body {body[:400]!r}"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """Every case's answer by its id, and nothing left behind."""
    SHM.write_bytes(struct.pack("<32i", *range(16), *([1] * 16)) + bytes(128))
    probe = Probe(tmp_path_factory.mktemp("models"))

    async def run() -> Answers:
        listener = HttpListener("127.0.0.1", 0, [probe.dialect], Limits())
        await listener.open()
        try:
            return {v["id"]: await attempt(listener.address, v["request"]) for v in VECTORS}
        finally:
            await listener.close()

    yield asyncio.run(run())
    assert probe.engine.open_responses == 0
    probe.close()
    SHM.unlink(missing_ok=True)


@pytest.mark.parametrize("vector", VECTORS, ids=[f"{v['id']}-{v['name']}"[:60] for v in VECTORS])
def test_vector(vector: Vector, answers: Answers) -> None:
    expected = vector["expect"]
    if vector["id"] in DEVIATIONS:
        expected = DEVIATIONS[vector["id"]][0]
    assert list(differences(expected, *answers[vector["id"]])) == []
