"""The V1 RPCs with stubs made of our own descriptors: what is asked is what protoc's stubs would send."""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.dialects.triton_v1.rig import V1, Rig, rig, write_dense
from tests.server.rig import run

ONES = struct.pack("<16i", *[1] * 16)
COUNT = struct.pack("<16i", *range(16))


@contextlib.asynccontextmanager
async def stub(folder: Path) -> AsyncIterator[tuple[Any, Rig]]:
    write_dense(folder)
    async with rig(folder) as served:
        yield served.grpc, served


def simple(**changes: Any) -> Any:
    request = V1.InferRequest(model_name="simple", model_version=-1, raw_input=[COUNT, ONES])
    meta = request.meta_data
    meta.batch_size = changes.pop("batch_size", 1)
    meta.input.add(name="INPUT0", dims=[16])
    meta.input.add(name="INPUT1", dims=[16])
    meta.output.add(name="OUTPUT0")
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_infer(tmp_path: Path) -> None:
    async def ask() -> None:
        async with stub(tmp_path) as (v1, _):
            request = simple()
            request.meta_data.id = 7
            request.meta_data.output.add(name="OUTPUT1").cls.count = 2
            reply = await v1.Infer(request)
            assert (reply.request_status.code, reply.request_status.server_id) == (1, "inference:0")
            meta = reply.meta_data
            assert (meta.model_name, meta.model_version, meta.batch_size, meta.id) == ("simple", 1, 1, 7)
            assert list(meta.output[0].raw.dims) == [16]
            assert reply.raw_output[0] == struct.pack("<16i", *range(1, 17))
            assert [(c.idx, c.value) for c in meta.output[1].batch_classes[0].cls] == [(15, 14.0), (14, 13.0)]
            assert reply.raw_output[1] == b""

    run(ask())


def test_errors_are_in_band(tmp_path: Path) -> None:
    async def ask() -> None:
        async with stub(tmp_path) as (v1, _):
            request = simple(model_name="nope")
            request.meta_data.id = 3
            reply = await v1.Infer(request)
            assert reply.request_status.code == 6
            assert reply.request_status.msg == "Request for unknown model: 'nope' is not found"
            assert reply.meta_data == V1.InferResponseHeader(id=3)
            reply = await v1.Infer(simple(model_version=0))
            assert reply.request_status.msg == "Request for unknown model: 'simple' version 0 is not found"
            short = simple()
            short.raw_input[0] = COUNT[:60]
            reply = await v1.Infer(short)
            wanted = "unexpected size 60 for input 'INPUT0', expecting 64 for model 'simple'"
            assert (reply.request_status.code, reply.request_status.msg) == (5, wanted)
            few = simple()
            del few.raw_input[1]
            reply = await v1.Infer(few)
            assert reply.request_status.msg == (
                "expected tensor data for at least 1 inputs but got only 1 sets of data for model 'simple'"
            )
            surplus = simple()
            surplus.raw_input.append(b"nobody's")
            assert (await v1.Infer(surplus)).request_status.code == 1

    run(ask())


def test_stream_answers_in_order(tmp_path: Path) -> None:
    async def ask() -> None:
        async with stub(tmp_path) as (v1, _):
            requests = [simple(model_name="nope" if n == 2 else "simple") for n in range(5)]
            for n, request in enumerate(requests):
                request.meta_data.id = n + 1
            replies = [reply async for reply in v1.StreamInfer(iter(requests))]
            assert [reply.meta_data.id for reply in replies] == [1, 2, 3, 4, 5]
            assert [reply.request_status.code for reply in replies] == [1, 1, 6, 1, 1]

    run(ask())


def test_status_and_health(tmp_path: Path) -> None:
    async def ask() -> None:
        async with stub(tmp_path) as (v1, _):
            await v1.Infer(simple())
            one = (await v1.Status(V1.StatusRequest(model_name="simple"))).server_status
            model = one.model_status["simple"]
            assert [t.name for t in model.config.input] == ["INPUT0", "INPUT1"]
            assert (model.config.max_batch_size, model.config.input[0].data_type) == (8, 8)
            version = model.version_status[1]
            assert (version.ready_state, version.model_inference_count) == (1, 1)
            assert version.infer_stats[1].success.count == 1
            assert len((await v1.Status(V1.StatusRequest())).server_status.model_status) == 1
            unknown = await v1.Status(V1.StatusRequest(model_name="nope"))
            assert unknown.request_status.msg == "no status available for unknown model 'nope'"
            assert (await v1.Health(V1.HealthRequest(mode="live"))).health
            assert (await v1.Health(V1.HealthRequest(mode="ready"))).health
            odd = await v1.Health(V1.HealthRequest(mode="well"))
            assert (odd.request_status.code, odd.request_status.msg, odd.health) == (
                2,
                "unknown health mode 'well'",
                False,
            )

    run(ask())


def test_control_and_repository(tmp_path: Path) -> None:
    async def ask() -> None:
        async with stub(tmp_path) as (v1, _):
            asked = V1.ModelControlRequest(model_name="simple")  # UNLOAD is the default
            assert (await v1.ModelControl(asked)).request_status.code == 1
            assert "has no available versions" in (await v1.Infer(simple())).request_status.msg
            asked.type = V1.ModelControlRequest.LOAD
            assert (await v1.ModelControl(asked)).request_status.code == 1
            assert (await v1.Infer(simple())).request_status.code == 1
            asked.model_name = "nope"
            status = (await v1.ModelControl(asked)).request_status
            assert status.msg == "failed to load 'nope', failed to poll from model repository"
            index = (await v1.Repository(V1.RepositoryRequest(index=False))).index
            assert [model.name for model in index.models] == ["simple"]
            none = (await v1.Repository(V1.RepositoryRequest())).request_status
            assert (none.code, none.msg) == (2, "request type is not specified")

    run(ask())


def test_shared_memory(tmp_path: Path) -> None:
    name = f"fastserve-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name
    path.write_bytes(COUNT + bytes(64))

    async def ask() -> None:
        async with stub(tmp_path) as (v1, _):
            asked = V1.SharedMemoryControlRequest()
            asked.register.name = "both"
            asked.register.byte_size = 128
            asked.register.system_shared_memory.shared_memory_key = "/" + name
            assert (await v1.SharedMemoryControl(asked)).request_status.code == 1
            assert (await v1.SharedMemoryControl(asked)).request_status.code == 8
            request = simple()
            del request.raw_input[0]
            place = request.meta_data.input[0].shared_memory
            place.name, place.byte_size = "both", 64
            place = request.meta_data.output[0].shared_memory
            place.name, place.offset, place.byte_size = "both", 64, 64
            reply = await v1.Infer(request)
            assert (reply.request_status.code, list(reply.raw_output)) == (1, [b""])
            assert path.read_bytes()[64:] == struct.pack("<16i", *range(1, 17))
            place.offset = 2**64 - 1
            assert (await v1.Infer(request)).request_status.code == 5
            status = V1.SharedMemoryControlRequest()
            status.status.SetInParent()
            reply = await v1.SharedMemoryControl(status)
            raw = reply.shared_memory_status.SerializeToString()
            listed = V1.SharedMemoryStatus.FromString(raw)  # as the official client reads it: field 2
            assert [region.name for region in listed.shared_memory_region] == ["both"]
            assert len(reply.shared_memory_status.shared_memory_region) == 1
            nothing = (await v1.SharedMemoryControl(V1.SharedMemoryControlRequest())).request_status
            assert (nothing.code, nothing.msg) == (2, "unknown sharedmemorycontrol request type")
            asked.Clear()
            asked.register.name = "c"
            asked.register.cuda_shared_memory.raw_handle = bytes(64)
            status = (await v1.SharedMemoryControl(asked)).request_status
            assert "GPUs not supported" in status.msg
            asked.Clear()
            asked.unregister_all.SetInParent()
            assert (await v1.SharedMemoryControl(asked)).request_status.code == 1

    try:
        run(ask())
    finally:
        os.unlink(path)
