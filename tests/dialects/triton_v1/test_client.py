"""The original client's recorded traffic, over HTTP and gRPC, against a whole server."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.client import Answer, Client, Context
from tests.dialects.triton_v1.rig import V1, rig, write_dense
from tests.server.rig import run

COUNT, ONES = struct.pack("<16i", *range(16)), struct.pack("<16i", *[1] * 16)
# As captured.
HEADER = (
    'batch_size: 2 input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 } '
    'output { name: "OUTPUT0" } output { name: "OUTPUT1" cls { count: 2 } }'
)
PLAIN = HEADER.replace(" cls { count: 2 }", "")


def forms(folder: Path, dense: bool) -> None:
    if dense:
        write_dense(folder)
    else:
        models.write(folder, "simple")


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_inference(tmp_path: Path, dense: bool, text: bool) -> None:
    forms(tmp_path, dense)
    body = COUNT + ONES + ONES + COUNT

    async def ask() -> None:
        async with rig(tmp_path) as served:
            context = await Context(served.http, "simple", text=text).open()
            assert [(t.name, list(t.dims), t.data_type) for t in context.config.input] == [
                ("INPUT0", [16], 8),
                ("INPUT1", [16], 8),
            ]
            for number in (0, 0, 1, 2**63):
                tail = f" id: {number}" if number else ""
                answer, raw = await context.run(PLAIN + tail, body)
                assert (answer.code, answer.header.id, answer.header.batch_size) == (200, number, 2)
                check_order(answer)
                first, second = struct.unpack("<32i", raw["OUTPUT0"]), struct.unpack("<32i", raw["OUTPUT1"])
                assert first == tuple(a + b for a, b in numbers(body))
                assert second == tuple(a - b for a, b in numbers(body))
            answer, raw = await context.run(HEADER, body)
            check_order(answer)
            assert list(raw) == ["OUTPUT0"]
            best = [[(c.idx, c.value) for c in row.cls] for row in answer.header.output[1].batch_classes]
            assert best == [[(15, 14.0), (14, 13.0)], [(0, 1.0), (1, 0.0)]]
            assert context.wire.opened == 1
            context.close()

    run(ask())


def numbers(body: bytes) -> list[tuple[int, int]]:
    values = struct.unpack("<64i", body)
    return list(zip(values[:32], values[32:], strict=True))


def check_order(answer: Answer) -> None:
    names = [line.partition(":")[0] for line in answer.lines]
    ours = [name for name in names if name.startswith("NV-") or name == "Content-Type"]
    assert ours == ["NV-InferResponse", "NV-Status", "Content-Type"]


def test_versions_strings_sequences_and_errors(tmp_path: Path) -> None:
    models.write(tmp_path, "simple", "simple_string", "seq")
    texts = [struct.pack("<I", 1) + digit for digit in [b"5"] * 16 + [b"7"] * 16]

    async def ask() -> None:
        async with rig(tmp_path) as served:
            context = await Context(served.http, "simple", 1).open()
            header = PLAIN.replace("batch_size: 2", "batch_size: 1")
            answer, raw = await context.run(header, COUNT + ONES)
            assert (answer.header.model_version, raw["OUTPUT0"]) == (1, struct.pack("<16i", *range(1, 17)))
            answer, raw = await context.run(header + " id: 4", COUNT)  # the connection goes on after an error
            assert (answer.code, answer.status.code, answer.header.id, answer.body) == (400, 5, 4, b"")
            assert (
                answer.status.msg
                == "unexpected size for input 'INPUT1', expecting 64 bytes for model 'simple'"
            )
            answer, raw = await context.run(header, COUNT + ONES)
            assert context.wire.opened == 1
            context.close()

            context = await Context(served.http, "simple_string").open()
            sized = header.replace("dims: 16 }", "dims: 16 batch_byte_size: 80 }")
            answer, raw = await context.run(sized, b"".join(texts))
            assert raw["OUTPUT0"] == (struct.pack("<I", 2) + b"12") * 16
            assert raw["OUTPUT1"] == (struct.pack("<I", 2) + b"-2") * 16
            context.close()

            context = await Context(served.http, "seq").open()
            asked = 'batch_size: 1 input { name: "INPUT" dims: 1 } output { name: "OUTPUT" }'
            for flags, total in ((1, 3), (0, 6), (2, 9), (3, 3)):
                tail = " correlation_id: 7" + (f" flags: {flags}" if flags else "")
                answer, raw = await context.run(asked + tail, struct.pack("<i", 3))
                assert raw == {"OUTPUT": struct.pack("<i", total)}
            context.close()

    run(ask())


def test_control_calls(tmp_path: Path) -> None:
    write_dense(tmp_path)
    key = f"fastserve-test-{uuid.uuid4().hex}"
    Path("/dev/shm", key).write_bytes(bytes(128))

    async def ask() -> None:
        async with rig(tmp_path) as served:
            client = Client(served.http)
            for place in ("live", "ready"):
                assert (await client.get(f"/api/health/{place}?format=binary")).code == 200
            status = V1.ServerStatus.FromString((await client.get("/api/status?format=binary")).body)
            assert (status.id, status.ready_state, list(status.model_status)) == (
                "inference:0",
                2,
                ["simple"],
            )
            index = await client.get("/api/repository/index?format=binary")
            assert [m.name for m in V1.ModelRepositoryIndex.FromString(index.body).models] == ["simple"]
            for action in ("unload", "load"):
                assert (await client.post(f"/api/modelcontrol/{action}/simple")).status.code == 1
            place = "/api/sharedmemorycontrol"
            asked = f"{place}/register/inp//{key}/0/128?format=binary"
            assert [(await client.post(asked)).status.code for _ in range(2)] == [1, 8]
            shown = await client.get(f"{place}/status?format=binary")
            regions = V1.SharedMemoryStatus.FromString(shown.body).shared_memory_region
            assert [(r.name, r.system_shared_memory.shared_memory_key, r.byte_size) for r in regions] == [
                ("inp", f"/{key}", 128)
            ]
            cuda = await client.post(f"{place}/cudaregister/dev/64/0?format=binary")
            assert cuda.status.msg == "unexpected size for CUDA shared-memory handle, expecting 64 bytes"
            for asked in ("unregister/inp", "unregister/inp", "unregisterall"):
                assert (await client.post(f"{place}/{asked}?format=binary")).status.code == 1
            assert (await client.get(f"{place}/status?format=binary")).body == b""

    try:
        run(ask())
    finally:
        os.unlink(f"/dev/shm/{key}")


# --- gRPC: bytes as the client's generated code writes them ---------------------------------------------

LATEST = b"\x10" + b"\xff" * 9 + b"\x01"  # model_version: -1


def field(number: int, payload: bytes) -> bytes:
    size, written = len(payload), bytearray([number << 3 | 2])
    while size > 0x7F:
        written.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(written) + bytes([size]) + payload


def request_bytes(model: bytes, request_id: int, more: bytes = b"") -> bytes:
    inputs = b"".join(field(2, field(1, b"INPUT%d" % n) + field(2, b"\x10")) for n in range(2))
    outputs = field(3, field(1, b"OUTPUT0")) + field(3, field(1, b"OUTPUT1") + field(3, b"\x08\x02"))
    meta = b"\x08\x01" + inputs + outputs + (b"\x28" + bytes([request_id]) if request_id else b"") + more
    return field(1, model) + LATEST + field(3, meta) + field(4, COUNT) + field(4, ONES)


def check_answer(raw: bytes, request_id: int) -> None:
    reply = V1.InferResponse.FromString(raw)
    assert reply.request_status.code == 1
    assert (reply.meta_data.id, reply.meta_data.model_version) == (request_id, 1)
    assert list(reply.raw_output) == [struct.pack("<16i", *range(1, 17)), b""]
    assert [c.idx for c in reply.meta_data.output[1].batch_classes[0].cls] == [15, 14]


@pytest.mark.parametrize("dense", [False, True])
def test_grpc(tmp_path: Path, dense: bool) -> None:
    forms(tmp_path, dense)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            place = "{}:{}".format(*served.server.front.grpc[0].address)
            async with grpc.aio.insecure_channel(place) as channel:
                path = "/nvidia.inferenceserver.GRPCService/"
                status = await channel.unary_unary(path + "Status")(field(1, b"simple"))
                shown = V1.StatusResponse.FromString(status)
                assert shown.request_status.code == 1
                assert shown.server_status.model_status["simple"].config.max_batch_size == 8
                infer = channel.unary_unary(path + "Infer")
                check_answer(await infer(request_bytes(b"simple", 0)), 0)
                check_answer(await infer(request_bytes(b"simple", 9)), 9)
                await stream(channel.stream_stream(path + "StreamInfer"))

    run(ask())


async def stream(call: Any) -> None:
    """The client numbers the requests of a stream from 1, and one of them is for nobody."""

    async def requests() -> AsyncIterator[bytes]:
        for number in range(1, 6):
            yield request_bytes(b"simple" if number != 3 else b"nope", number)

    replies = [reply async for reply in call(requests())]
    for number, raw in enumerate(replies, 1):
        if number != 3:
            check_answer(raw, number)
    lost = V1.InferResponse.FromString(replies[2])
    assert lost.meta_data == V1.InferResponseHeader(id=3)
    assert lost.request_status.code == 6
    assert len(replies) == 5
