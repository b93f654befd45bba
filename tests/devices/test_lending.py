"""Tensors that stay on the GPU: its workers open clients' handles themselves, no byte goes through the front.

The device is simulated (torch, on the CPU's memory), and so is the driver: who opens what, which rows are
copied from where, and what becomes of them when a batch fails is real.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests import proc
from tests.backends.models import FLOAT, helper, save, value
from tests.devices.simulated import Allocation, FakeGpus, client_library
from tests.devices.test_client_memory import IN_PLACE, place, register, unregister
from tests.dialects.kserve.client_rig import connected, run, warm_up
from tests.faults.rig import Answer, Http, leaks, tensor
from tests.running import WITH_SIMULATED_DEVICES, Running, until

pytest.importorskip("torch")
pytest.importorskip("tritonclient.utils")

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
    def forward(self, x, y):
        if bool((x == 13).any()):
            raise ValueError("the model does not like 13")
        return {"sum": x + y, "difference": x - y}
"""
TENSORS = """
class Model:
    def __init__(self, config):
        pass
    def run(self, inputs):
        x, y = inputs["x"], inputs["y"]
        return {"sum": x + y, "difference": x - y}
"""
ROW = 64
WIDE = {"dtype": "float32", "shape": [16]}


@pytest.fixture(scope="module")
def lending(gpus: FakeGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("lending") / "models"
    for name, more in (("near", {"devices": "simulated"}), ("far", {})):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(MODEL)
        config = {
            "backend": "torch",
            "max_batch_size": 8,
            "allowed_batch_sizes": [4, 8],
            "inputs": {"x": WIDE, "y": WIDE},
            "outputs": {"sum": WIDE, "difference": WIDE},
            **more,
        }
        if name == "near":
            config["max_queue_delay_us"] = 20_000  # so that requests of several clients meet in a batch
        (folder / name / "model.yaml").write_text(yaml.safe_dump(config))
    write_onnx(folder / "onnx")
    (folder / "tensors" / "1").mkdir(parents=True)
    (folder / "tensors" / "1" / "model.py").write_text(TENSORS)
    config = {**config, "backend": "python", "devices": "simulated", "device_tensors": True}
    (folder / "tensors" / "model.yaml").write_text(yaml.safe_dump(config))
    with ExitStack() as stack:
        with gpus.here():
            server = Running(
                folder, folder.parent / "log", "--allow-client-shm", module=WITH_SIMULATED_DEVICES
            )
            running = stack.enter_context(server)
        warm_up(running)
        yield running


def write_onnx(folder: Path) -> None:
    """Write a model of the sums as an ONNX graph."""
    nodes = [helper.make_node(op, ["x", "y"], [name]) for op, name in (("Add", "sum"), ("Sub", "difference"))]
    sides = [[value(name, FLOAT, ["n", 16]) for name in side] for side in (("x", "y"), ("sum", "difference"))]
    version_dir = save(folder.parent.parent / "made", nodes, *sides)
    folder.mkdir()
    version_dir.rename(folder / "1")
    config = {"backend": "onnx", "devices": "simulated", "max_batch_size": 8}
    (folder / "model.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def http(lending: Running) -> Iterator[Http]:
    with Http(lending) as made:
        yield made


def worker_of(served: Running, model: str) -> int:
    for pid in served.workers:
        if f"fs:{model}/" in proc.name_of(pid):
            return pid
    raise AssertionError(f"no worker of {model}")


def rows(*values: float) -> np.ndarray[Any, Any]:
    return np.repeat(np.array(values, np.float32)[:, None], 16, axis=1)


def asked(
    name: str, count: int, *, x: int = 0, y: int = 512, to: int = 1024, size: int = 0
) -> dict[str, Any]:
    """Both inputs and an output in a region; the other output is in the reply."""
    nbytes = count * ROW
    return {
        "inputs": [
            tensor("x", [count, 16], datatype="FP32", **place(name, 0, nbytes)),
            tensor("y", [count, 16], datatype="FP32", **place(name, 512, nbytes)),
        ],
        "outputs": [
            {"name": "sum", "parameters": place(name, 1024, size or nbytes)},
            {"name": "difference"},
        ],
    }


def fill(at: Allocation, x: Any, y: Any) -> None:
    at.put(x.tobytes())
    at.put(y.tobytes(), 512)


def answer_of(at: Allocation, count: int) -> Any:
    return np.frombuffer(at.get(count * ROW, 1024), np.float32).reshape(count, 16)


def other_of(answer: Answer) -> Any:
    found = next(one for one in answer.json()["outputs"] if one["name"] == "difference")
    return np.array(found["data"], np.float32).reshape(-1, 16)


@pytest.mark.parametrize("model", ["near", "onnx", "tensors"])
def test_rows_never_leave_the_device(lending: Running, http: Http, gpus: FakeGpus, model: str) -> None:
    at, worker = gpus.allocate(4096), worker_of(lending, model)
    assert gpus.readers(worker) == 0
    x, y = rows(1, 2, 3), rows(10, 20, 30)
    fill(at, x, y)
    assert register(http, "r", at).status == 200
    gpus.fail_with(700)  # whatever the driver would copy now fails
    try:
        answer = http.post(f"/v2/models/{model}/infer", asked("r", 3))
    finally:
        gpus.fail_with(0)
    assert answer.status == 200, answer.error
    assert np.array_equal(answer_of(at, 3), x + y)
    assert np.array_equal(other_of(answer), x - y)
    assert gpus.readers(worker) == 1
    for _ in range(3):
        assert http.post(f"/v2/models/{model}/infer", asked("r", 3)).status == 200
    assert gpus.readers(worker) == 1, "a handle is opened once"
    unregister(http, "r")
    until(lambda: gpus.readers(worker) == 0, "the worker lets go of it as well")
    assert http.post(f"/v2/models/{model}/infer", asked("r", 3)).status == 404


def test_batches_of_a_device_are_counted(lending: Running, http: Http, gpus: FakeGpus) -> None:
    def counted() -> bool:
        page = http.ask("GET", "/metrics").body.decode()
        found = [line for line in page.splitlines() if line.startswith("fastserve_device_batches_total{")]
        return any('model="near"' in line and float(line.rpartition(" ")[2]) > 0 for line in found)

    at = gpus.allocate(4096)
    fill(at, rows(1), rows(2))
    assert register(http, "r", at).status == 200
    assert http.post("/v2/models/near/infer", asked("r", 1)).status == 200
    until(counted, "the worker has told of them")
    page = http.ask("GET", "/metrics").body.decode()
    assert 'fastserve_device_staged{model="near",version="1"} 0' in page
    assert 'fastserve_device_batches_total{model="far"' not in page
    unregister(http, "r")


def test_a_worker_on_a_cpu_refuses_them(lending: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    fill(at, rows(1, 2), rows(5, 6))
    assert register(http, "r", at).status == 200
    answer = http.post("/v2/models/far/infer", asked("r", 2))
    assert (answer.status, answer.error) == (501, IN_PLACE.format("r", "far", 0))
    assert gpus.readers(worker_of(lending, "far")) == 0
    unregister(http, "r")


def test_memory_on_another_device_is_refused(lending: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096, device=1)
    fill(at, rows(1), rows(5))
    assert register(http, "r", at).status == 200
    answer = http.post("/v2/models/near/infer", asked("r", 1))
    assert (answer.status, answer.error) == (501, IN_PLACE.format("r", "near", 1))
    assert gpus.readers(worker_of(lending, "near")) == 0
    unregister(http, "r")


def test_requests_of_all_kinds_in_one_batch(lending: Running, http: Http, gpus: FakeGpus) -> None:
    """Some rows come from one client's memory, some from another's, some from the columns."""
    memory = [gpus.allocate(4096) for _ in range(3)]
    for number, at in enumerate(memory):
        fill(at, rows(number, number + 1), rows(100, 200))
        assert register(http, f"r{number}", at).status == 200
    found: dict[int, Answer] = {}
    plain = {
        "inputs": [
            {"name": name, "shape": [1, 16], "datatype": "FP32", "data": [value] * 16}
            for name, value in (("x", 7.0), ("y", 8.0))
        ]
    }

    def ask(number: int) -> None:
        with Http(lending) as one:
            body = asked(f"r{number}", 2) if number < 3 else plain
            found[number] = one.post("/v2/models/near/infer", body)

    for _ in range(5):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {answer.status for answer in found.values()} == {200}
        for number, at in enumerate(memory):
            assert np.array_equal(answer_of(at, 2), rows(number + 100, number + 201))
            assert np.array_equal(other_of(found[number]), rows(number - 100, number - 199))
        for number in (3, 4):
            assert np.array_equal(other_of(found[number]), rows(-1))
    page = http.ask("GET", "/metrics").body.decode()
    sizes = [
        line for line in page.splitlines() if line.startswith('fastserve_batch_rows_bucket{model="near"')
    ]
    assert float(sizes[0].rpartition(" ")[2]) < float(sizes[-1].rpartition(" ")[2]), "some met in a batch"
    for number in range(3):
        unregister(http, f"r{number}")


def test_a_request_that_the_model_refuses_fails_alone(lending: Running, http: Http, gpus: FakeGpus) -> None:
    good, bad = gpus.allocate(4096), gpus.allocate(4096)
    fill(good, rows(1, 2), rows(3, 4))
    fill(bad, rows(1, 13), rows(3, 4))
    found: dict[str, Answer] = {}
    for name, at in (("good", good), ("bad", bad)):
        assert register(http, name, at).status == 200

    def ask(name: str) -> None:
        with Http(lending) as one:
            found[name] = one.post("/v2/models/near/infer", asked(name, 2))

    for _ in range(3):
        good.put(bytes(128), 1024)
        threads = [threading.Thread(target=ask, args=(name,)) for name in ("good", "bad")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (found["good"].status, found["bad"].status) == (200, 500)
        assert "does not like 13" in found["bad"].error
        assert not leaks(lending, found["bad"])
        assert np.array_equal(answer_of(good, 2), rows(4, 6))
        assert np.array_equal(other_of(found["good"]), rows(-2, -2))
    for name in ("good", "bad"):
        unregister(http, name)


def test_memory_that_cannot_be_opened_any_more(lending: Running, http: Http, gpus: FakeGpus) -> None:
    """Freed by its client between registering it and the worker's first look: that request alone fails."""
    at = gpus.allocate(4096)
    assert register(http, "r", at).status == 200
    at.free(early=True)
    answer = http.post("/v2/models/near/infer", asked("r", 2))
    assert answer.status == 503, (answer.status, answer.body[:200])
    words = "region 'r' cannot be used: client memory on the GPU cannot be opened: cuIpcOpenMemHandle"
    assert words in answer.error
    assert not leaks(lending, answer)
    unregister(http, "r")
    at = gpus.allocate(4096)
    fill(at, rows(1), rows(2))
    assert register(http, "r", at).status == 200
    assert http.post("/v2/models/near/infer", asked("r", 1)).status == 200
    unregister(http, "r")


def test_room_that_is_too_small_is_never_written(lending: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    fill(at, rows(1, 2), rows(3, 4))
    assert register(http, "r", at).status == 200
    answer = http.post("/v2/models/near/infer", asked("r", 2, size=127))
    assert (answer.status, "should be at least 128 bytes" in answer.error) == (500, True)
    assert at.get(128, 1024) == bytes(128)
    unregister(http, "r")


def test_a_range_that_is_not_aligned_is_refused(lending: Running, http: Http, gpus: FakeGpus) -> None:
    """A kernel that touched such an address would end the context, and the worker: by a client's offset."""
    at = gpus.allocate(4096)
    assert register(http, "r", at).status == 200
    for side, offset in (("inputs", 1), ("outputs", 1026)):
        body = asked("r", 2)
        body[side][0]["parameters"]["shared_memory_offset"] = offset
        answer = http.post("/v2/models/near/infer", body)
        assert (answer.status, answer.error) == (501, IN_PLACE.format("r", "near", 0))
    unregister(http, "r")


def test_a_worker_that_dies_with_memory_open(lending: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    fill(at, rows(1, 2), rows(3, 4))
    assert register(http, "r", at).status == 200
    assert http.post("/v2/models/near/infer", asked("r", 2)).status == 200
    before = worker_of(lending, "near")
    os.kill(before, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{before}").exists(), "it is gone")
    until(lambda: http.post("/v2/models/near/infer", asked("r", 2)).status == 200, "another is there", 30.0)
    assert np.array_equal(answer_of(at, 2), rows(4, 6))
    assert worker_of(lending, "near") != before
    unregister(http, "r")


def test_memory_that_is_taken_back_while_a_worker_loads(lending: Running, http: Http, gpus: FakeGpus) -> None:
    """It has nothing open, and is not asked: it would take that for the arena it waits for, and end."""
    at, before = gpus.allocate(4096), worker_of(lending, "near")
    os.kill(before, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{before}").exists(), "it is gone")
    log = lending.log
    told = len(log.read_text())
    until(lambda: came_and_went(http, at), "another is there", 60.0)
    fill(at, rows(1, 2), rows(3, 4))
    assert register(http, "r", at).status == 200
    assert http.post("/v2/models/near/infer", asked("r", 2)).status == 200
    unregister(http, "r")
    assert "could not be restarted" not in log.read_text()[told:]


def came_and_went(http: Http, at: Allocation) -> bool:
    assert register(http, "r", at).status == 200
    unregister(http, "r")
    return http.ask("GET", "/v2/models/near/ready").status == 200


@pytest.mark.parametrize("flavour", ["http", "grpc"])
def test_the_official_client(lending: Running, gpus: FakeGpus, flavour: str) -> None:
    async def work(cuda: Any) -> None:
        region = cuda.create_shared_memory_region("gpu", 4096, 0)
        cuda.set_shared_memory_region(region, [rows(1, 2, 3, 4), rows(5, 6, 7, 8)])
        async with connected(flavour, lending) as client:
            await client.register_cuda_shared_memory("gpu", cuda.get_raw_handle(region), 0, 4096)
            given = [client.module.InferInput(name, [4, 16], "FP32") for name in ("x", "y")]
            wanted = [client.output(name) for name in ("sum", "difference")]
            for n in (0, 1):
                given[n].set_shared_memory("gpu", 256, offset=256 * n)
                wanted[n].set_shared_memory("gpu", 256, offset=512 + 256 * n)
            await client.infer("near", given, outputs=wanted)
            found = cuda.get_contents_as_numpy(region, np.float32, [16, 16])
            assert np.array_equal(found[8:12], rows(6, 8, 10, 12))
            assert np.array_equal(found[12:], rows(-4, -4, -4, -4))
            await client.unregister_cuda_shared_memory("gpu")

    with client_library(gpus) as cuda:
        run(work(cuda))
    until(lambda: gpus.readers(worker_of(lending, "near")) == 0, "nothing is open any more")
