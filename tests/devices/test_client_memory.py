"""Clients' memory on GPUs, through a real server and the official client: registered, read, written, closed.

The GPUs are simulated (`simulated`): which process opens which handle and where bytes go is real, that a
kernel could use them is not shown here.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import grpc as grpcio
import numpy as np
import pytest

from fastserve.protos import load
from tests import proc
from tests.devices.simulated import Allocation, FakeGpus, client_library
from tests.dialects.kserve_v2.client_rig import (
    BLOCKING,
    COUNT,
    FLAVOURS,
    ONES,
    connected,
    run,
    tritonclient,
)
from tests.faults.rig import Answer, Grpc, Http, leaks, message, tensor
from tests.running import Running, until

V1 = load("triton_v1")
V1_SERVICE = "/nvidia.inferenceserver.GRPCService/"
REFUSED = "failed to register shared memory region: invalid args"
TOO_SMALL = (
    "shared memory size specified with the request for output 'OUTPUT0' (32 bytes) should be at least 64 "
    "bytes to hold the results"
)


def ferry_of(served: Running) -> int:
    """The process that reads device memory; 0 while there is none."""
    for pid in served.workers:
        if proc.name_of(pid) == "fs:ferry":
            return pid
    return 0


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


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("model", ["sums", "simple"])
@pytest.mark.parametrize("device", [0, 1])
def test_the_official_client(served: Running, gpus: FakeGpus, flavour: str, model: str, device: int) -> None:
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
            for n in (0, 1):
                given[n].set_shared_memory("gpu", 64, offset=64 * n)
                wanted[n].set_shared_memory("gpu", 64, offset=128 + 64 * n)
            result = await client.infer(model, given, outputs=wanted)
            assert result.get_output("OUTPUT0") is not None
            found = cuda.get_contents_as_numpy(region, np.int32, [4, 16])
            assert np.array_equal(found[2:], np.concatenate([COUNT + ONES, COUNT - ONES]))
            wanted[0].unset_shared_memory()
            result = await client.infer(model, given, outputs=wanted[:1])
            assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)
            await client.unregister_cuda_shared_memory("gpu")
            assert await client.told("get_cuda_shared_memory_status") in ([], {})
        assert gpus.readers(ferry_of(served)) == 0

    with client_library(gpus) as cuda:
        run(work(cuda))


@pytest.mark.parametrize("flavour", BLOCKING)
def test_strings_and_large_tensors(served: Running, gpus: FakeGpus, flavour: str) -> None:
    """More than the ferry carries at a time; and what has to be looked at before a model gets it."""
    floats = np.random.default_rng(3).random(5 << 20, np.float32)
    texts = np.array([b"one", b"", b"\xff\0" * 40], dtype=object)

    async def work(cuda: Any) -> None:
        large, small = (cuda.create_shared_memory_region(n, 40 << 20, 0) for n in ("large", "small"))
        packed = tritonclient.serialize_byte_tensor(texts)
        cuda.set_shared_memory_region(large, [floats])
        cuda.set_shared_memory_region(small, [packed])
        async with connected(flavour, served) as client:
            for name, region in (("large", large), ("small", small)):
                await client.register_cuda_shared_memory(name, cuda.get_raw_handle(region), 0, 40 << 20)
            given = [client.module.InferInput("IN_FP32", [floats.size], "FP32")]
            given += [client.module.InferInput("IN_BYTES", [3], "BYTES")]
            given[0].set_shared_memory("large", floats.nbytes)
            given[1].set_shared_memory("small", len(packed.item()))
            wanted = [client.output("OUT_FP32"), client.output("OUT_BYTES")]
            wanted[0].set_shared_memory("large", floats.nbytes, offset=20 << 20)
            wanted[1].set_shared_memory("small", 4096, offset=4096)
            await client.infer("types", given, outputs=wanted)
            found = cuda.get_contents_as_numpy(large, np.float32, [2, floats.size])
            assert np.array_equal(found[1], floats)
            given[1].set_shared_memory("small", len(packed.item()) - 1)
            with pytest.raises(tritonclient.InferenceServerException, match="incomplete string data"):
                await client.infer("types", given, outputs=wanted)
            await client.unregister_cuda_shared_memory()

    with client_library(gpus) as cuda:
        run(work(cuda))


def test_a_decoupled_model_over_a_stream(served: Running, gpus: FakeGpus) -> None:
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
        assert [reply.error_message for reply in replies] == [""] * len(replies)
        assert at.get(4, 16) != bytes(4)
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
    at.put(COUNT.tobytes() + ONES.tobytes())
    control = "/api/sharedmemorycontrol"
    assert http.ask("POST", f"{control}/cudaregister/one/4096/1", at.handle).status == 200
    shown = http.ask("GET", f"{control}/status?format=binary")
    region = V1.SharedMemoryStatus.FromString(shown.body).shared_memory_region[0]
    assert (region.name, region.cuda_shared_memory.device_id, region.byte_size) == ("one", 1, 4096)
    there = 'shared_memory { name: "one" offset: %d byte_size: 64 }'
    inputs = "".join(f'input {{ name: "INPUT{n}" dims: 16 {there % (64 * n)} }} ' for n in (0, 1))
    header = f'batch_size: 1 {inputs}output {{ name: "OUTPUT0" {there % 128} }}'
    answer = http.ask("POST", "/api/infer/sums", b"", NV_InferRequest=header)
    assert (answer.status, at.get(64, 128)) == (200, (COUNT + ONES).tobytes())
    assert http.ask("POST", f"{control}/unregister/one").status == 200

    def ask(channel: Any, name: str, request: Any, kind: str) -> Any:
        raw = channel.unary_unary(V1_SERVICE + name)(request.SerializeToString())
        return getattr(V1, kind).FromString(raw)

    with grpcio.insecure_channel(served.grpc) as channel:
        asked = V1.SharedMemoryControlRequest()
        asked.register.name, asked.register.byte_size = "two", 4096
        asked.register.cuda_shared_memory.raw_handle = at.handle
        for device, words in ((0, "failed to register CUDA shared memory region 'two'"), (1, "")):
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
        assert (reply.request_status.code, list(reply.raw_output)) == (1, [b""])
        assert at.get(64, 128) == (COUNT - ONES).tobytes()
        asked.Clear()
        asked.unregister_all.SetInParent()
        reply = ask(channel, "SharedMemoryControl", asked, "SharedMemoryControlResponse")
        assert reply.request_status.code == 1
    assert gpus.readers(ferry_of(served)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"raw_handle": {"b64": base64.b64encode(bytes(64)).decode()}},
        {"raw_handle": {"b64": base64.b64encode(b"\xff" * 64).decode()}},
        {"device_id": 1},
        {"device_id": 2},
        {"device_id": 2**40},
        {"byte_size": 4097},
        {"byte_size": 2**64 - 1},
        {"byte_size": 0},
    ],
)
def test_what_cannot_be_opened_is_not_registered(
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
    assert gpus.readers(ferry_of(served)) == 0


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
        ("outputs", {"byte_size": 32}, 500, TOO_SMALL),
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
    assert http.post("/v2/models/sums/infer", sums("r")).status == 200
    unregister(http, "r")


def test_a_region_that_is_unregistered_under_a_running_request(
    served: Running, http: Http, gpus: FakeGpus, models: Path
) -> None:
    """The request keeps what it holds; the memory is given back when it ends, the name is free at once."""
    at, held, found = gpus.allocate(4096), models / "held", []
    at.put(struct.pack("<i", 5))
    assert register(http, "r", at).status == 200
    asked = {
        "inputs": [tensor("IN", [1], **place("r", 0, 4))],
        "outputs": [{"name": "OUT", "parameters": place("r", 1024, 4)}],
    }
    with Http(served) as waiting:
        thread = threading.Thread(target=lambda: found.append(waiting.post("/v2/models/held/infer", asked)))
        thread.start()
        until((held / "began").exists, "the model runs")
        unregister(http, "r")
        assert http.post("/v2/models/sums/infer", sums("r")).status == 404
        assert gpus.readers(ferry_of(served)) == 1
        assert register(http, "r", gpus.allocate(64)).status == 200
        (held / "go").touch()
        thread.join()
    (held / "go").unlink()
    assert (found[0].status, at.get(4, 1024)) == (200, struct.pack("<i", 5))
    until(lambda: gpus.readers(ferry_of(served)) == 1, "the first region is closed")
    unregister(http, "r")
    until(lambda: gpus.readers(ferry_of(served)) == 0, "the second as well")


def test_the_ferry_dies_with_regions_open(served: Running, http: Http, gpus: FakeGpus) -> None:
    """Whoever waits hears of it; the regions are there when the next one is."""
    at = gpus.allocate(4096)
    at.put(COUNT.tobytes() + ONES.tobytes())
    assert register(http, "r", at).status == 200
    before = ferry_of(served)
    os.kill(before, signal.SIGSTOP)
    found: list[Answer] = []
    with Http(served) as waiting:
        thread = threading.Thread(
            target=lambda: found.append(waiting.post("/v2/models/sums/infer", sums("r")))
        )
        thread.start()
        assert http.ask("GET", "/v2/health/live").status == 200, "nobody else waits for it"
        os.kill(before, signal.SIGKILL)
        thread.join()
    if found[0].status != 200:  # else it was asked only after the kill
        assert found[0].status == 503
        words = "killed by SIGKILL|its process has ended"  # while it answers, or just before it is asked
        assert re.search(f"device memory cannot be reached: ({words})", found[0].error), found[0].error
        assert not leaks(served, found[0])
    assert http.post("/v2/models/sums/infer", sums("r")).status == 200
    assert at.get(64, 1024) == (COUNT + ONES).tobytes()
    assert ferry_of(served) not in (0, before)
    unregister(http, "r")


@pytest.mark.parametrize(("code", "stays"), [(2, True), (700, False)])
def test_copies_that_fail(served: Running, http: Http, gpus: FakeGpus, code: int, stays: bool) -> None:
    """A fault that a context survives, and one that it does not: after that one another process goes on."""
    at = gpus.allocate(4096)
    at.put(COUNT.tobytes() + ONES.tobytes())
    assert register(http, "r", at).status == 200
    before = ferry_of(served)
    gpus.fail_with(code)
    try:
        answer = http.post("/v2/models/sums/infer", sums("r"))
    finally:
        gpus.fail_with(0)
    assert (answer.status, "CUDA_ERROR_" in answer.error) == (503, True)
    assert answer.error.startswith("shared memory region 'r' cannot be used: cuMemcpyDtoH")
    assert not leaks(served, answer)
    until(lambda: (ferry_of(served) == before) is stays, "the ferry ends, or does not")
    assert http.post("/v2/models/sums/infer", sums("r")).status == 200
    unregister(http, "r")


def test_memory_that_its_client_has_freed(http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    at.put(COUNT.tobytes() + ONES.tobytes())
    assert register(http, "r", at).status == 200
    at.free(early=True)
    assert http.post("/v2/models/sums/infer", sums("r")).status == 200, "it is open here still"
    unregister(http, "r")
    assert register(http, "r", at).error == REFUSED


def test_a_driver_that_tells_no_range_of_lent_memory(http: Http, gpus: FakeGpus) -> None:
    """Then the last byte is looked at: a size beyond the allocation is refused all the same."""
    at = gpus.allocate(4096)
    gpus.set("shy")
    try:
        for nbytes, status in ((4097, 400), (1 << 40, 400), (4096, 200)):
            assert register(http, "shy", at, byte_size=nbytes).status == status
    finally:
        gpus.set("shy", on=False)
    unregister(http, "shy")
    at.free()


def test_the_front_process_never_opens_the_driver(served: Running, http: Http, gpus: FakeGpus) -> None:
    assert register(http, "r", gpus.allocate(64)).status == 200
    assert "libcuda" not in Path(f"/proc/{served.pid}/maps").read_text()
    assert "libcuda" in Path(f"/proc/{ferry_of(served)}/maps").read_text()
    unregister(http, "r")


def test_the_ferry_goes_with_the_server(gpus: FakeGpus, models: Path, tmp_path: Path) -> None:
    with gpus.here(), Running(models, tmp_path / "log", "--allow-client-shm") as running:
        with Http(running) as http:
            assert register(http, "r", gpus.allocate(64)).status == 200
        ferry = ferry_of(running)
    assert not Path(f"/proc/{ferry}").exists()


def test_without_a_gpu(models: Path, tmp_path: Path, gpus: FakeGpus) -> None:
    """The refusals are those of a server that knows no GPU, and after the first one no process is asked."""
    with Running(models, tmp_path / "log", "--allow-client-shm") as running, Http(running) as http:
        at = gpus.allocate(64)
        for _ in range(2):
            answer = register(http, "r", at)
            assert (answer.status, answer.error) == (400, REFUSED)
            until(lambda: ferry_of(running) == 0, "the process that looked is gone")
        answer = http.ask("POST", "/api/sharedmemorycontrol/cudaregister/r/64/0?format=binary", at.handle)
        assert b"GPUs not supported" in repr(answer.headers).encode()
