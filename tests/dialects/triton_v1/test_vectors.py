"""The V1 cases, against a whole server: those that need no model this rig lacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.triton_v1.rig import Rig, rig
from tests.server.rig import run

CASES = [json.loads(line) for line in Path("tests/vectors/triton_v1.jsonl").read_text().splitlines()]
HTTP = [case for case in CASES if case["transport"] == "http"]
# Cases in words, or of models that other tests bring: sequences, other control modes.
ELSEWHERE = {
    "v1-http-002": "needs a model that failed to load",
    "v1-http-039": "written in words: the sizes are left open",
    "v1-http-040": "sequence model",
    "v1-http-041": "sequence model",
    "v1-http-042": "sequence model",
    "v1-http-057": "another control mode",
}


@contextlib.contextmanager
def shared_region() -> Iterator[str]:
    """A file in shared memory that the cases call /inp_shm: 16 ones, then room."""
    name = f"fastserve-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name
    path.write_bytes(b"\1\0\0\0" * 16 + bytes(64))
    try:
        yield name
    finally:
        os.unlink(path)


def test_http(tmp_path: Path) -> None:
    async def replay() -> None:
        with shared_region() as name:
            async with rig(tmp_path) as served:
                faults = [
                    fault
                    for case in HTTP
                    if case["id"] not in ELSEWHERE
                    for fault in await play(served, case, name)
                ]
        assert faults == []

    run(replay())


async def play(served: Rig, case: dict[str, Any], region: str) -> list[str]:
    asked, wanted = case["request"], case["expect"]
    path = asked["path"].replace("inp_shm", region)
    if case["id"] == "v1-http-045":  # its name must be free; the cases before it took it
        path = path.replace("/inp/", "/other/")
    status, headers, body = await served.ask(
        asked["method"], path, bytes.fromhex(asked["body_hex"]), **asked["headers"]
    )
    faults = []
    if status != wanted["status"]:
        faults.append(f"status {status} {headers.get('nv-status')}")
    for name, value in wanted.get("headers", {}).items():
        value = value.split('" or "')[0].replace("inp_shm", region)
        pattern = re.escape(value).replace("<n>", "[0-9]+").replace("<id>", "[0-9]+")
        if not re.match(pattern, headers.get(name.lower(), "missing")):
            faults.append(f"{name}: {headers.get(name.lower())!r}, not {value!r}")
    if wanted.get("body") == "" and body:
        faults.append(f"body {body!r}")
    if wanted.get("no_header", "").lower() in headers:
        faults.append(f"{wanted['no_header']} is there")
    return [f"{case['id']} {case['name']}: {fault}" for fault in faults]


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_control_needs_explicit_mode(tmp_path: Path, mode: str) -> None:
    async def ask() -> None:
        async with rig(tmp_path, model_control=mode, load_models=()) as served:
            status, headers, _ = await served.ask("POST", "/api/modelcontrol/load/simple")
            assert status == 400
            assert (
                'code: UNAVAILABLE msg: "explicit model load / unload is not allowed' in headers["nv-status"]
            )

    run(ask())
