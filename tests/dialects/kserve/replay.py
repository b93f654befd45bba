"""The captured cases put to a whole server with the probe models, in order: some depend on earlier ones.

HTTP first, then, with every model loaded again, gRPC. What the gRPC capture tells in words, as a scenario
over time, is in `scenarios`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import text_format

from fastserve import __version__
from fastserve.protos import load
from fastserve.server import Server
from fastserve.settings import AdminOptions, Listener, Settings
from tests.dialects.kserve.models import write_probe_models
from tests.dialects.kserve.scenarios import play
from tests.server.rig import Served

Vector = dict[str, Any]
Reply = tuple[int, dict[str, str], bytes]  # status, headers, body
RpcReply = tuple[str, str, list[bytes], tuple[Any, ...]]  # status, details, messages, metadata after them
V2 = load("kserve_v2")
VECTORS = Path(__file__).resolve().parents[2] / "vectors"
KEY = f"probe_{os.getpid()}"  # in place of the captured names: two runs may not meet
SHM = Path("/dev/shm") / KEY
UNASKED = ("id_uint32", "id_uint64", "id_int16", "reshape", "vllm_like")  # in no case: 0.4 s of a CPU each


def read_vectors(name: str, captured_key: str) -> list[Vector]:
    text = (VECTORS / name).read_text().replace(captured_key, KEY).replace("2.51.0", __version__)
    return [json.loads(line) for line in text.splitlines()]


HTTP = read_vectors("triton_v2_http.jsonl", "probe_shm")
GRPC = read_vectors("triton_v2_grpc.jsonl", "probe_g")


@dataclass
class Answers:
    """The server's answers, by the cases' ids."""

    http: dict[str, Reply]
    grpc: dict[str, RpcReply]


async def replay(folder: Path) -> Answers:
    """Every case on one server; nothing may be left behind in it."""
    write_probe_models(folder)
    wanted = tuple(sorted(path.name for path in folder.iterdir() if path.name not in UNASKED))
    alone = (Listener("127.0.0.1:0", ("kserve_v2",)),)
    settings = Settings(
        repository=str(folder), http=alone, grpc=alone, model_control="explicit", load_models=wanted,
        keep_going=True, parallel_loads=4, kserve_replies=False, allow_client_shm=True, response_cache_bytes=1
        << 20, admin=AdminOptions(file_overrides=True, log_settings=True),
    )  # fmt: skip
    SHM.write_bytes(struct.pack("<32i", *range(16), *([1] * 16)) + bytes(128))
    log = logging.getLogger("fastserve")  # whose level some cases change
    level = log.level
    server = Server(settings)
    await server.open()
    try:
        served = Served(server)
        address = server.front.http[0].address
        http = {v["id"]: await attempt(address, v["request"]) for v in HTTP}
        await load_again(address)
        target = "{}:{}".format(*server.front.grpc[0].address)
        async with grpc.aio.insecure_channel(target) as channel:
            replies = {v["id"]: await ask(channel, v) for v in GRPC if "scenario" not in v["request"]}
            for id, found in (await play(channel, served)).items():
                replies[id] = (*found, [], ())
        await served.until(served.is_clean)
    finally:
        await server.drain(5)
        SHM.unlink()
        log.setLevel(level)
    return Answers(http, replies)


async def load_again(address: tuple[str, int]) -> None:
    """Load again the models that the HTTP cases unloaded."""
    index = {"method": "POST", "path": "/v2/repository/index", "headers": {}, "body": ""}
    for entry in json.loads((await exchange(address, index))[2]):
        if entry.get("state") != "READY" and entry["name"] not in ("bad", "newm", *UNASKED):
            load = {**index, "path": f"/v2/repository/models/{entry['name']}/load"}
            await exchange(address, load)


# --- HTTP --------------------------------------------------------------------------------------------


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


async def exchange(address: tuple[str, int], given: Vector) -> Reply:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request_of(given))
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if given["method"] == "HEAD":  # what comes after the head, until the connection ends
        body = await reader.read(-1)
    elif headers.get("transfer-encoding") == "chunked":
        body = await read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    writer.close()
    await writer.wait_closed()
    return int(status.split()[1]), headers, body


async def attempt(address: tuple[str, int], given: Vector) -> Reply:
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


# --- gRPC --------------------------------------------------------------------------------------------

COUNTED = " ".join(f"int_contents: {number}" for number in range(16))
ONES = "int_contents: 1 " * 16
PAIR = f""" inputs {{ name: "INPUT0" datatype: "INT32" shape: 1 shape: 16 contents {{ {COUNTED} }} }}
 inputs {{ name: "INPUT1" datatype: "INT32" shape: 1 shape: 16 contents {{ {ONES} }} }}"""
NEXT = """ model_name: "seq" id: "%d" parameters { key: "sequence_end" value { bool_param: %s } }
 parameters { key: "sequence_id" value { int64_param: 5 } }
 inputs { name: "IN" datatype: "INT32" shape: 1 shape: 1 contents { int_contents: %d } } """
# The capture shows the first request of a stream; its replies say what the others were.
LATER = {
    "v2-grpc-094": ['model_name: "simple" id: "e2" outputs { name: "OUTPUT0" }' + PAIR],
    "v2-grpc-099": [NEXT % (2, "false", 2), NEXT % (3, "true", 3)],
}
# And for these its name, or its reply, says what the request was.
UNSHOWN = {"v2-grpc-147": 'model_name: "simple"' + PAIR}
HEALTH = {
    "v2-grpc-143": b"",
    "v2-grpc-144": b"\x0a\x1einference.GRPCInferenceService",
}


async def ask(channel: grpc.aio.Channel, vector: Vector) -> RpcReply:
    """Put one case to the server."""
    name = vector["request"]["rpc"]
    if name == "ModelStreamInfer":
        return await ask_stream(channel, vector)
    if name == "Health.Check":
        call, given = channel.unary_unary("/grpc.health.v1.Health/Check"), HEALTH[vector["id"]]
        return await told(call(given, timeout=60))
    path = f"/inference.GRPCInferenceService/{name}"
    if not hasattr(V2, f"{name}Request"):
        name = "ServerLive" if name == "Nope" else "ModelInfer"
    call = channel.unary_unary(
        path,
        request_serializer=lambda message: message.SerializeToString(),
    )
    text = vector["request"]["text"] or UNSHOWN.get(vector["id"], "")
    given = text_format.Parse(text, getattr(V2, f"{name}Request")())
    coding = grpc.Compression.Gzip if vector["name"].startswith("gzip") else None
    return await told(call(given, timeout=20, compression=coding))


async def told(call: Any) -> RpcReply:
    try:
        message = await call
        return "OK", "", [message], tuple(await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or "", [], tuple(error.trailing_metadata() or ())


async def ask_stream(channel: grpc.aio.Channel, vector: Vector) -> RpcReply:
    texts = [vector["request"]["text"], *LATER.get(vector["id"], ())]
    requests = [text_format.Parse(text, V2.ModelInferRequest()) for text in texts]
    metadata = (("triton_grpc_error", "true"),) if "grpc_error" in vector["name"] else ()
    call = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=lambda message: message.SerializeToString(),
    )
    replies: list[bytes] = []
    asked = call(iter(requests), metadata=metadata, timeout=60)
    try:
        async for reply in asked:
            replies.append(reply)  # noqa: PERF401 -- what came before an error counts
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or "", replies, tuple(error.trailing_metadata() or ())
    return "OK", "", replies, tuple(await asked.trailing_metadata())


def read_reply(vector: Vector, message: bytes) -> Any:
    """A message; bytes where the capture has bytes."""
    name = vector["request"]["rpc"]
    if name == "Health.Check":
        return message
    if not hasattr(V2, f"{name}Response"):
        name = "ServerLive" if name == "Nope" else "ModelInfer"
    return getattr(V2, f"{name}Response").FromString(message)


def expected_replies(vector: Vector) -> list[Any]:
    """The captured messages: one, or a line for each of a stream."""
    text, name = vector["expect"].get("response"), vector["request"]["rpc"]
    if not text and name == "ModelStreamInfer":
        return []
    if vector["expect"]["code"] != "OK" or "scenario" in vector["request"]:
        return []
    if name == "Health.Check":
        return [b"\x08\x02"] if text == "b'\\x08\\x02'" else []
    kind = "ModelInfer" if vector["id"] in UNSHOWN else name
    lines = text.split("\n") if name == "ModelStreamInfer" else [text]
    return [text_format.Parse(line, getattr(V2, f"{kind}Response")()) for line in lines]
