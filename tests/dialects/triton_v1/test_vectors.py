"""Every V1 case over real sockets, against a whole server: HTTP with `simple` in both forms, and gRPC.

Cases are made of what a client sends and what must come back; where a case says it in words, or stands on
something that must be so first, the table beside it here says what that is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.rig import V1, Reply, Rig, read_status, rig, write_dense
from tests.server.rig import run

CASES = [json.loads(line) for line in Path("tests/vectors/triton_v1.jsonl").read_text().splitlines()]
HTTP = [case for case in CASES if case["transport"] == "http"]
GRPC = {case["id"]: case for case in CASES if case["transport"] == "grpc"}
# Cases that need a server in another state than the rest.
NOT_READY, NOT_EXPLICIT = "v1-http-002", "v1-http-057"
OF_STRINGS, OF_SEQUENCE, MISSING_KEY = "v1-http-039", "v1-http-042", "v1-http-045"
COUNT, ONES = struct.pack("<16i", *range(16)), struct.pack("<16i", *[1] * 16)
NAMES = ["seq", "simple", "simple_string"]


@contextlib.contextmanager
def shared_region() -> Iterator[str]:
    """A file in shared memory that the cases call inp_shm: 16 ones, then room."""
    name = f"fastserve-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name
    path.write_bytes(ONES + bytes(64))
    try:
        yield name
    finally:
        os.unlink(path)


def header_of(body: bytes, raw_bytes: int = 0) -> Any:
    """The binary header behind the raw outputs."""
    return V1.InferResponseHeader.FromString(body[raw_bytes:])


def strings_of(raw: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(raw):
        size = struct.unpack_from("<I", raw, at)[0]
        found.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def sums(body: bytes, batch_size: int = 1) -> bool:
    return body[:64] == struct.pack("<16i", *range(1, 17)) and header_of(body, 64).batch_size == batch_size


def sums_in_text(body: bytes) -> bool:
    text = text_format.Parse(body[64:].decode(), V1.InferResponseHeader())
    return body[:64] == struct.pack("<16i", *range(1, 17)) and text.output[0].raw.batch_byte_size == 64


def sums_as_text(body: bytes) -> bool:
    size = len(body) - len(header_of_strings(body).SerializeToString())
    return strings_of(body[:size]) == [b"%d" % (n + 1) for n in range(16)]


def header_of_strings(body: bytes) -> Any:
    at = 0
    for _ in range(16):
        at += 4 + struct.unpack_from("<I", body, at)[0]
    return header_of(body, at)


def status_has_config(body: bytes) -> bool:
    one = V1.ServerStatus.FromString(body).model_status["simple"]
    shown = [(t.name, list(t.dims), t.data_type) for t in one.config.input]
    return shown == [("INPUT0", [16], 8), ("INPUT1", [16], 8)] and one.config.max_batch_size == 8


def json_has_config(body: bytes) -> bool:
    one = json.loads(body)["model_status"]["simple"]
    return one["config"]["max_batch_size"] == 8 and list(one["version_status"]) == ["1"]


def best_two(body: bytes) -> bool:
    found = header_of(body).output[0]
    return [(c.idx, c.value) for c in found.batch_classes[0].cls] == [(15, 16), (14, 15)]


# What cases say in words of a good reply's body.
IN_WORDS: dict[str, Callable[[bytes], object]] = {
    "v1-http-008": status_has_config,
    "v1-http-009": json_has_config,
    "v1-http-013": sums,
    "v1-http-015": sums,
    "v1-http-017": sums_in_text,
    "v1-http-018": best_two,
    OF_STRINGS: sums_as_text,
    OF_SEQUENCE: lambda body: body.startswith(struct.pack("<i", 1) + b'model_name: "seq"'),
    "v1-http-047": lambda body: V1.SharedMemoryStatus.FromString(body).shared_memory_region[0].name == "inp",
    "v1-http-049": lambda body: body[:64] == struct.pack("<16i", *[2] * 16),
    "v1-http-061": lambda body: [m.name for m in V1.ModelRepositoryIndex.FromString(body).models] == NAMES,
}


@pytest.mark.parametrize("write", [write_dense, lambda folder: models.write(folder, "simple")])
def test_http(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    models.write(tmp_path, "simple_string", "seq")

    async def replay() -> None:
        with shared_region() as name:
            async with rig(tmp_path) as served:
                cases = [case for case in HTTP if case["id"] not in (NOT_READY, NOT_EXPLICIT)]
                faults = [fault for case in cases for fault in await play(served, case, name)]
        assert faults == []
        assert len(cases) == len(HTTP) - 2

    run(replay())


async def play(served: Rig, case: dict[str, Any], region: str = "") -> list[str]:
    """Play a case and return the faults of its answer."""
    asked = case["request"]
    path, headers = asked["path"].replace("inp_shm", region), dict(asked["headers"])
    body = bytes.fromhex(asked["body_hex"])
    if case["id"] == MISSING_KEY:  # its name must be free; a case before it took it
        path = path.replace("/inp/", "/other/")
    if case["id"] == OF_STRINGS:
        count, ones = (b"".join(map(pack, numbers)) for numbers in (range(16), [1] * 16))
        headers["NV-InferRequest"] = headers["NV-InferRequest"].replace("<n>", "%d") % (len(count), len(ones))
        body = count + ones
    reply = await served.ask(asked["method"], path, body, **headers)
    return [f"{case['id']} {case['name']}: {fault}" for fault in compare(case, reply, region)]


def pack(number: int) -> bytes:
    text = b"%d" % number
    return struct.pack("<I", len(text)) + text


def compare(case: dict[str, Any], reply: Reply, region: str) -> Iterator[str]:
    wanted, (status, headers, body) = case["expect"], reply
    if status != wanted["status"]:
        yield f"status {status} {headers.get('nv-status')}"
    for name, value in wanted.get("headers", {}).items():
        value = value.split('" or "')[0].replace("inp_shm", region)
        pattern = re.escape(value).replace("<n>", "[0-9]+").replace("<id>", "[0-9]+")
        whole = "" if '" or "' in wanted["headers"][name] else "$"
        if not re.match(pattern + whole, headers.get(name.lower(), "missing")):
            yield f"{name}: {headers.get(name.lower())!r}, not {value!r}"
    if wanted.get("body") == "" and body:
        yield f"body {body!r}"
    if wanted.get("no_header", "").lower() in headers:
        yield f"{wanted['no_header']} is there"
    if status == 200 and wanted["body"] and not IN_WORDS[case["id"]](body):
        yield f"the body is not {wanted['body']!r}: {body!r}"


def one_case(number: str) -> dict[str, Any]:
    return next(case for case in CASES if case["id"] == number)


def test_not_ready_while_a_model_has_failed(tmp_path: Path) -> None:
    models.write(tmp_path, "bad", "refusing")

    async def ask() -> None:
        async with rig(tmp_path, load_models=("refusing",)) as served:
            assert (await served.ask("GET", "/api/health/ready"))[0] == 200
            status, headers, _ = await served.ask("POST", "/api/modelcontrol/load/bad")
            text = "failed to load 'bad', versions that are not available: 1"
            assert (status, read_status(headers)) == (400, f'INTERNAL msg: "{text}"')
            assert await play(served, one_case(NOT_READY)) == []
            assert (await served.ask("POST", "/api/modelcontrol/unload/bad"))[0] == 200

    run(ask())


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_control_needs_explicit_mode(tmp_path: Path, mode: str) -> None:
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path, model_control=mode, load_models=()) as served:
            assert await play(served, one_case(NOT_EXPLICIT)) == []
            reply = await served.grpc.ModelControl(V1.ModelControlRequest(model_name="simple"))
            assert reply.request_status.msg.startswith("explicit model load / unload is not allowed")

    run(ask())


# --- gRPC -----------------------------------------------------------------------------------------------


def infer_request(**fields: Any) -> Any:
    request = V1.InferRequest(model_name="simple", model_version=-1, raw_input=[COUNT, ONES])
    text_format.Parse(
        'batch_size: 1 input { name: "INPUT0" dims: 16 } input { name: "INPUT1" } output { name: "OUTPUT0" }',
        request.meta_data,
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def short_request() -> Any:
    request = infer_request()
    request.raw_input[0] = COUNT[:60]
    return request


# The requests that their cases describe in words.
SAID: dict[str, Callable[[], Any]] = {
    "v1-grpc-006": lambda: infer_request(model_version=0),
    "v1-grpc-008": short_request,
}


@pytest.mark.parametrize("number", sorted(GRPC))
def test_grpc(tmp_path: Path, number: str) -> None:
    write_dense(tmp_path)
    with shared_region() as region:
        ask_grpc(tmp_path, number, region)


def ask_grpc(folder: Path, number: str, region: str) -> bytes:
    """One case; the reply without its request's number."""
    asked, wanted = GRPC[number]["request"], GRPC[number]["expect"]["response"]
    rpc = asked["rpc"].rpartition("/")[2]
    kind = getattr(V1, f"{rpc}Request")
    told = b""

    async def ask() -> None:
        nonlocal told
        async with rig(folder) as served:
            await served.ask("POST", f"/api/sharedmemorycontrol/register/inp//{region}/0/128")
            request = SAID[number]() if number in SAID else text_format.Parse(asked["text"], kind())
            reply = await getattr(served.grpc, rpc)(request)
            check_grpc(number, wanted, reply)
            reply.request_status.ClearField("request_id")
            told = reply.SerializeToString(deterministic=True)
            if number == "v1-grpc-011":
                result = await served.over_http("simple", "batch_size: 1")
                assert "'simple' has no available versions" in result.status

    run(ask())
    return told


def check_grpc(number: str, wanted: str, reply: Any) -> None:
    status = reply.request_status
    assert (status.server_id, status.request_id > 0) == ("inference:0", True)
    if number == "v1-grpc-011":
        assert status.code == 1
    elif number == "v1-grpc-013":
        raw = reply.shared_memory_status.SerializeToString()
        assert [one.name for one in V1.SharedMemoryStatus.FromString(raw).shared_memory_region] == ["inp"]
    elif wanted.startswith("request_status"):
        reply.request_status.ClearField("server_id")
        reply.request_status.ClearField("request_id")
        assert reply == text_format.Parse(wanted, type(reply)())
    else:
        code, _, text = wanted.partition(" ")
        assert (V1.RequestStatusCode.Name(status.code), f'"{status.msg}"') == (code, text)
