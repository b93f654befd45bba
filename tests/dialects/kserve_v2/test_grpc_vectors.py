"""The captured gRPC cases over a real channel, in their order: some depend on earlier ones."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import text_format

from fastserve import __version__
from fastserve.config import GrpcOptions
from fastserve.dialects.kserve_v2.grpc_methods import descriptors, make_methods
from fastserve.protos import load
from fastserve.wire.grpc import GrpcListener
from tests.dialects.kserve_v2.fakes import Probe

Vector = dict[str, Any]
Answer = tuple[str, str, Any]
V2 = load("kserve_v2")
KEY = f"probe_grpc_{os.getpid()}"
SHM = Path("/dev/shm") / KEY
CASES = Path(__file__).resolve().parents[2] / "vectors" / "triton_v2_grpc.jsonl"
VECTORS: list[Vector] = [
    json.loads(line.replace("probe_g", KEY).replace("2.51.0", __version__))
    for line in CASES.read_text().splitlines()
]
# What the rig of these tests cannot bring: a scheduler, or what the capture does not say.
ELSEWHERE = {
    "v2-grpc-061": "a model the probe repository does not have",
    "v2-grpc-083": "sequence model: the engine's",
    "v2-grpc-086": "sequence model: the engine's",
    "v2-grpc-092": "errors between responses: the engine's",
    "v2-grpc-098": "the capture leaves out the metadata sent",
    "v2-grpc-146": "grpcio has words of its own for an unknown method",
    "v2-grpc-147": "its request is not in the capture",
}
RUN = [v for v in VECTORS if v["request"].get("text") is not None and v["id"] not in ELSEWHERE]


def make_request(vector: Vector) -> Any:
    name = vector["request"]["rpc"]
    kind = "ModelInfer" if name == "ModelStreamInfer" else name
    message = getattr(V2, f"{kind}Request")()
    text_format.Parse(vector["request"]["text"], message)
    return message


async def ask(channel: grpc.aio.Channel, vector: Vector) -> Answer:
    """Status, details and the responses as messages."""
    name = vector["request"]["rpc"]
    call = channel.stream_stream if name == "ModelStreamInfer" else channel.unary_unary
    stub = call(
        f"/inference.GRPCInferenceService/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(V2, f"{name}Response").FromString,
    )
    request = make_request(vector)
    replies = []
    try:
        if name == "ModelStreamInfer":
            metadata = (("triton_grpc_error", "true"),) if "grpc_error" in vector["name"] else ()
            replies.extend([reply async for reply in stub(iter([request]), metadata=metadata)])
        else:
            replies.append(await stub(request, timeout=20))
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or "", replies
    return "OK", "", replies


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    SHM.write_bytes(struct.pack("<32i", *range(16), *([1] * 16)) + bytes(128))
    probe = Probe(tmp_path_factory.mktemp("models"))

    async def run() -> dict[str, Answer]:
        methods = make_methods(probe.service)
        listener = GrpcListener("127.0.0.1", 0, methods, GrpcOptions(), descriptors=descriptors())
        await listener.open()
        try:
            async with grpc.aio.insecure_channel("{}:{}".format(*listener.address)) as channel:
                return {vector["id"]: await ask(channel, vector) for vector in RUN}
        finally:
            await listener.close()

    yield asyncio.run(run())
    assert probe.engine.open_responses == 0
    probe.close()
    SHM.unlink(missing_ok=True)


@pytest.mark.parametrize("vector", RUN, ids=[f"{v['id']}-{v['name']}"[:60] for v in RUN])
def test_vector(vector: Vector, answers: dict[str, Answer]) -> None:
    code, details, replies = answers[vector["id"]]
    expected = vector["expect"]
    assert (code, details) == (expected["code"], expected["details"])
    if vector["request"]["rpc"] != "ModelStreamInfer" and code == "OK":
        wanted = getattr(V2, f"{vector['request']['rpc']}Response")()
        text_format.Parse(expected["response"], wanted)
        assert replies == [wanted]
    elif expected["response"]:
        first = expected["response"].split("\n")[0]  # the capture may go on to requests it does not show
        wanted = V2.ModelStreamInferResponse()
        text_format.Parse(first, wanted)
        assert replies[0] == wanted
