"""Errors among a decoupled model's responses reach a client of generate_stream, and the stream goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.dialects.kserve.models import DECOUPLED, MANY, REPEAT, config, put, tensors
from tests.dialects.kserve.replay import exchange
from tests.dialects.kserve.test_options import serving
from tests.server.rig import run

ENDS = """
    def all(self, request):
        import os, pathlib, time

        yield respond(OUT=np.array([1], np.int32))
        until = time.monotonic() + 60
        while not pathlib.Path(%r).exists() and time.monotonic() < until:
            time.sleep(0.001)
        os._exit(3)
"""


def test_errors_are_events(tmp_path: Path) -> None:
    sides = tensors("input", IN="INT32 [-1]") + tensors("output", OUT="INT32 [1]")
    put(tmp_path, "repeat", config(0, sides, DECOUPLED), MANY + REPEAT)

    async def work() -> None:
        async with serving(tmp_path) as asked:

            async def ask(verb: str, *numbers: int) -> tuple[int, list[object]]:
                path, body = f"/v2/models/repeat/{verb}", json.dumps({"IN": numbers})
                given = {"method": "POST", "path": path, "headers": {}, "body": body}
                status, _, reply = await exchange(asked.server.front.http[0].address, given)
                texts = [line.removeprefix(b"data: ") for line in reply.split(b"\r\n")[1::2]]
                shown = [json.loads(text) for text in texts if text]
                return status, [one.get("error", one.get("OUT")) for one in shown]

            assert await ask("generate_stream", 1, -1, 2) == (200, [1, "bad value", 2])
            assert await ask("generate_stream", -1, 3) == (400, ["bad value", 3])
            assert await ask("generate", -1) == (400, ["bad value"])
            status, (text,) = await ask("generate", 1, -1)
            assert (status, str(text)[:46]) == (200, "generate expects model to produce exactly 1 re")

    run(work())


@pytest.mark.logs_errors
def test_the_end_of_the_worker_is_an_event(tmp_path: Path) -> None:
    """No answer of the model's, but one event has been sent, and with it the status."""
    sides = tensors("input", IN="INT32 [-1]") + tensors("output", OUT="INT32 [1]")
    put(tmp_path, "ends", config(0, sides, DECOUPLED), MANY + ENDS % str(tmp_path / "go"))
    body = b'{"IN":[1]}'
    head = b"POST /v2/models/ends/generate_stream HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n"

    async def work() -> None:
        async with serving(tmp_path) as asked:
            reader, writer = await asyncio.open_connection(*asked.server.front.http[0].address)
            writer.write(head % len(body) + body)
            begun = await reader.readuntil(b"data: ")
            (tmp_path / "go").touch()
            rest = await reader.readuntil(b"0\r\n\r\n")
            assert begun.startswith(b"HTTP/1.1 200 ")
            first, error = (begun + rest).split(b"data: ")[1:]
            assert b'"OUT":1' in first.replace(b" ", b"")
            assert b"the worker process died while it ran this request" in error
            writer.close()

    run(work())
