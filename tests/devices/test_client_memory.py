"""Clients' memory on GPUs, registered with a server whose models are on CPUs: listed, checked, and refused
when a request names it. What workers on a GPU do with it is in test_lending.

The GPUs are simulated (`simulated`).
"""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import grpc as grpcio
import numpy as np
import pytest

from fastserve.protos import load
from tests.devices.simulated import Allocation, FakeGpus, client_library
from tests.dialects.kserve.client_rig import COUNT, FLAVOURS, ONES, connected, run, tritonclient
from tests.faults.rig import Answer, Grpc, Http, leaks, message, tensor
from tests.running import Running

V1 = load("triton_v1")
V1_SERVICE = "/nvidia.inferenceserver.GRPCService/"
REFUSED = "failed to register shared memory region: invalid args"


def register(http: Http, name: str, at: Allocation, **other: Any) -> Answer:
    handle = {"b64": base64.b64encode(at.handle).decode()}
    asked = {"raw_handle": handle, "device_id": at.device, "byte_size": at.nbytes, **other}
    return http.post(f"/v2/cudasharedmemory/region/{name}/register", asked)


def unregister(http: Http, name: str) -> None:
    assert http.post(f"/v2/cudasharedmemory/region/{name}/unregister", {}).status == 200


def place(name: str, offset: int, nbytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": nbytes,
    }


def sums(name: str, size: int = 64, at: int = 0) -> dict[str, Any]:
    """`sums` with both inputs and the first output in a region."""
    inputs = [tensor(f"INPUT{n}", [1, 16], **place(name, at + 64 * n, 64)) for n in (0, 1)]
    return {"inputs": inputs, "outputs": [{"name": "OUTPUT0", "parameters": place(name, 1024, size)}]}


IN_PLACE = (
    "shared memory region '{}' cannot be used: model '{}' cannot access CUDA memory of device {} in place; "
    "use system shared memory"
)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("device", [0, 1])
def test_the_official_client_is_told_that_a_model_on_a_cpu_takes_none(
    served: Running, gpus: FakeGpus, flavour: str, device: int
) -> None:
    """Neither an input nor an output; one beside plain tensors, or all of them."""

    async def work(cuda: Any) -> None:
        region = cuda.create_shared_memory_region("gpu", 4096, device)
        async with connected(flavour, served) as client:
            cuda.set_shared_memory_region(region, [COUNT, ONES])
            await client.register_cuda_shared_memory("gpu", cuda.get_raw_handle(region), device, 4096)
            status = await client.told("get_cuda_shared_memory_status")
            listed = status["regions"]["gpu"] if "regions" in status else status[0]
            assert (listed["name"], int(listed["byte_size"])) == ("gpu", 4096)
            assert int(listed.get("device_id", 0)) == device
            given = [client.module.InferInput(f"INPUT{n}", [1, 16], "INT32") for n in (0, 1)]
            wanted = [client.output(f"OUTPUT{n}") for n in (0, 1)]
            given[0].set_data_from_numpy(COUNT)
            given[1].set_shared_memory("gpu", 64, offset=64)
            words = re.escape(IN_PLACE.format("gpu", "sums", device))
            with pytest.raises(tritonclient.InferenceServerException, match=words):
                await client.infer("sums", given, outputs=wanted)
            given[1].set_data_from_numpy(ONES)
            wanted[0].set_shared_memory("gpu", 64, offset=128)
            with pytest.raises(tritonclient.InferenceServerException, match=words):
                await client.infer("sums", given, outputs=wanted)
            assert not cuda.get_contents_as_numpy(region, np.int32, [4, 16])[2:].any()
            wanted[0].unset_shared_memory()
            result = await client.infer("sums", given, outputs=wanted)
            assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)
            await client.unregister_cuda_shared_memory("gpu")
            assert await client.told("get_cuda_shared_memory_status") in ([], {})
        assert all(gpus.readers(pid) == 0 for pid in served.workers)

    with client_library(gpus) as cuda:
        run(work(cuda))


def test_strings_are_not_read_from_a_gpu(http: Http, gpus: FakeGpus) -> None:
    assert register(http, "r", gpus.allocate(64)).status == 200
    body = {"inputs": [tensor("IN_BYTES", [1], datatype="BYTES", **place("r", 0, 8))]}
    answer = http.post("/v2/models/types/infer", body)
    assert (answer.status, answer.error) == (501, IN_PLACE.format("r", "types", 0))
    unregister(http, "r")


def test_a_decoupled_model_refuses_it_over_a_stream(served: Running, gpus: FakeGpus) -> None:
    at = gpus.allocate(64)
    at.put(struct.pack("<2i", 3, 4))
    with Http(served) as http:
        assert register(http, "numbers", at).status == 200
        asked = message("repeat", ("IN", "INT32", [1], None))
        for one, offset in ((asked.inputs[0], 4), (asked.outputs.add(name="OUT"), 16)):
            for name, value in place("numbers", offset, 4).items():
                one.parameters[name].MergeFrom(_parameter(value))
        messages = load("kserve_v2")
        with grpcio.insecure_channel(served.grpc) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            replies = [
                messages.ModelStreamInferResponse.FromString(raw)
                for raw in call(iter([asked.SerializeToString()]))
            ]
        assert [reply.error_message for reply in replies] == [IN_PLACE.format("numbers", "repeat", 0)]
        assert at.get(4, 16) == bytes(4)
        unregister(http, "numbers")


def _parameter(value: int | str) -> Any:
    made = load("kserve_v2").InferParameter()
    if isinstance(value, int):
        made.int64_param = value
    else:
        made.string_param = value
    return made


def test_triton_v1(served: Running, http: Http, gpus: FakeGpus) -> None:
    """Over HTTP and gRPC: the handle is the body, and one space of names holds both kinds of memory."""
    at = gpus.allocate(4096, device=1)
    control = "/api/sharedmemorycontrol"
    assert http.ask("POST", f"{control}/cudaregister/one/4096/1", at.handle).status == 200
    shown = http.ask("GET", f"{control}/status?format=binary")
    region = V1.SharedMemoryStatus.FromString(shown.body).shared_memory_region[0]
    assert (region.name, region.cuda_shared_memory.device_id, region.byte_size) == ("one", 1, 4096)
    there = 'shared_memory { name: "one" offset: %d byte_size: 64 }'
    inputs = "".join(f'input {{ name: "INPUT{n}" dims: 16 {there % (64 * n)} }} ' for n in (0, 1))
    header = f'batch_size: 1 {inputs}output {{ name: "OUTPUT0" {there % 128} }}'
    answer = http.ask("POST", "/api/infer/sums", b"", NV_InferRequest=header)
    assert "UNSUPPORTED" in answer.headers["nv-status"]
    assert IN_PLACE.format("one", "sums", 1) in answer.headers["nv-status"]
    assert http.ask("POST", f"{control}/unregister/one").status == 200

    def ask(channel: Any, name: str, request: Any, kind: str) -> Any:
        raw = channel.unary_unary(V1_SERVICE + name)(request.SerializeToString())
        return getattr(V1, kind).FromString(raw)

    with grpcio.insecure_channel(served.grpc) as channel:
        asked = V1.SharedMemoryControlRequest()
        asked.register.name, asked.register.byte_size = "two", 4096
        asked.register.cuda_shared_memory.raw_handle = at.handle
        for device, words in ((2, "failed to register CUDA shared memory region 'two'"), (1, "")):
            asked.register.cuda_shared_memory.device_id = device
            reply = ask(channel, "SharedMemoryControl", asked, "SharedMemoryControlResponse")
            assert reply.request_status.msg == words
        infer = V1.InferRequest(model_name="sums", model_version=-1)
        infer.meta_data.batch_size = 1
        for n, target in enumerate(
            (infer.meta_data.input.add, infer.meta_data.input.add, infer.meta_data.output.add)
        ):
            one = target(name=("INPUT0", "INPUT1", "OUTPUT1")[n])
            one.shared_memory.name, one.shared_memory.offset, one.shared_memory.byte_size = "two", 64 * n, 64
        reply = ask(channel, "Infer", infer, "InferResponse")
        assert reply.request_status.msg == IN_PLACE.format("two", "sums", 1)
        asked.Clear()
        asked.unregister_all.SetInParent()
        reply = ask(channel, "SharedMemoryControl", asked, "SharedMemoryControlResponse")
        assert reply.request_status.code == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_id": 2},
        {"device_id": 2**40},
        {"byte_size": (8 << 30) + 1},
        {"byte_size": 2**64 - 1},
        {"byte_size": 0},
    ],
)
def test_what_no_gpu_has_is_not_registered(
    served: Running, http: Http, grpc: Grpc, gpus: FakeGpus, wrong: dict[str, Any]
) -> None:
    at = gpus.allocate(4096)
    answer = register(http, "bad", at, **wrong)
    assert (answer.status, answer.error) == (400, REFUSED)
    assert not leaks(served, answer)
    given = {"raw_handle": at.handle, "device_id": 0, "byte_size": 4096, **wrong}
    if isinstance(given["raw_handle"], dict):
        given["raw_handle"] = base64.b64decode(given["raw_handle"]["b64"])
    told = grpc.ask("CudaSharedMemoryRegister", name="bad", **given)
    assert (told.status, told.error) == (3, REFUSED)
    assert http.ask("GET", "/v2/cudasharedmemory/status").json() == []


def test_names(http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(64)
    assert register(http, "r", at).status == 200
    again = register(http, "r", at)
    assert (again.status, again.error) == (400, "shared memory region 'r' already in manager")
    other = http.ask("GET", "/v2/systemsharedmemory/region/r/status")
    text = "The region named 'r' is registered as CUDA shared memory, not system shared memory"
    assert (other.status, other.error) == (404, text)
    assert http.post("/v2/systemsharedmemory/region/r/unregister", {}).status == 200
    assert http.post("/v2/systemsharedmemory/unregister", {}).status == 200
    assert http.ask("GET", "/v2/cudasharedmemory/region/r/status").json()[0]["byte_size"] == 64
    assert register(http, "s", at).status == 200, "the same memory by another name"
    unregister(http, "r")
    assert http.ask("GET", "/v2/cudasharedmemory/region/r/status").status == 404
    assert http.post("/v2/models/sums/infer", sums("r")).status == 404
    unregister(http, "s")


@pytest.mark.parametrize(
    ("side", "changed", "status", "words"),
    [
        ("inputs", {"offset": 4096}, 400, "Invalid offset for"),
        ("inputs", {"offset": 4090}, 400, "Invalid offset + byte size"),
        ("inputs", {"offset": 2**64 - 64}, 400, "Invalid offset for"),
        ("inputs", {"byte_size": 2**64 - 64}, 400, "Invalid offset + byte size"),
        ("inputs", {"byte_size": 60}, 400, "for input 'INPUT0' for model 'sums'. Expected 64, got 60"),
        ("outputs", {"offset": 4096}, 400, "Invalid offset for"),
        ("inputs", {"byte_size": 0}, 400, "Invalid offset + byte size"),
        ("outputs", {"offset": 0, "byte_size": 0}, 400, "Invalid offset + byte size"),
        ("outputs", {"region": "x"}, 404, "Unable to find"),
    ],
)
def test_ranges(
    served: Running,
    http: Http,
    gpus: FakeGpus,
    side: str,
    changed: dict[str, Any],
    status: int,
    words: str,
) -> None:
    at = gpus.allocate(4096)
    assert register(http, "r", at).status == 200
    body = sums("r")
    body[side][0]["parameters"].update({f"shared_memory_{name}": given for name, given in changed.items()})
    answer = http.post("/v2/models/sums/infer", body)
    assert (answer.status, words in answer.error) == (status, True), answer.error
    assert not leaks(served, answer)
    assert http.post("/v2/models/sums/infer", sums("r")).status == 501
    unregister(http, "r")


def test_the_front_process_never_opens_the_driver(served: Running, http: Http, gpus: FakeGpus) -> None:
    assert register(http, "r", gpus.allocate(64)).status == 200
    assert "libcuda" not in Path(f"/proc/{served.pid}/maps").read_text()
    unregister(http, "r")


def test_without_a_gpu(models: Path, tmp_path: Path, gpus: FakeGpus) -> None:
    """The refusals are those of a server that knows no GPU, and after the first one no process is asked."""
    with Running(models, tmp_path / "log", "--allow-client-shm") as running, Http(running) as http:
        at = gpus.allocate(64)
        for _ in range(2):
            answer = register(http, "r", at)
            assert (answer.status, answer.error) == (400, REFUSED)
        answer = http.ask("POST", "/api/sharedmemorycontrol/cudaregister/r/64/0?format=binary", at.handle)
        assert b"GPUs not supported" in repr(answer.headers).encode()
