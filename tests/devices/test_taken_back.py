"""Device memory that its client takes back: under a batch in flight, beside another model that has it open,
by one of its names.

The device and the driver are simulated; the models' workers open handles by themselves. Two of the models
share a process, as on a GPU they would share a context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests import proc
from tests.devices.simulated import Allocation, FakeGpus
from tests.devices.speakers import ALL, Speaker, Told, speaker
from tests.devices.test_client_memory import IN_PLACE
from tests.devices.test_lending import WIDE, answer_of, fill, rows, worker_of
from tests.dialects.kserve.client_rig import warm_up
from tests.faults.rig import Http
from tests.running import WITH_SIMULATED_DEVICES, Running, until

pytest.importorskip("torch")

HELD = 77.0
MODEL = """
import pathlib, time
import torch

class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.folder = pathlib.Path(__file__).parent.parent
    def forward(self, x, y):
        if bool((x == 77).any()):
            (self.folder / "began").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.001)
        return {"sum": x + y}
"""
WARMING = """
import pathlib, time
import torch

class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.folder = pathlib.Path(__file__).parent.parent
    def forward(self, x, y):
        (self.folder / "began").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.001)
        return {"sum": x + y}
"""
MODELS: dict[str, dict[str, Any]] = {
    "held": {"devices": "simulated"},
    "near": {"devices": "simulated", "shared_worker": "all"},
    "beside": {"devices": "simulated", "shared_worker": "all"},
    "far": {},
    "warming": {"devices": "simulated"},
}
LATER = ("warming",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taken") / "models"
    for name, more in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(WARMING if name == "warming" else MODEL)
        config = {
            "backend": "torch",
            "max_batch_size": 8,
            "inputs": {"x": WIDE, "y": WIDE},
            "outputs": {"sum": WIDE},
            **more,
        }
        (folder / name / "model.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def served(gpus: FakeGpus, models: Path) -> Iterator[Running]:
    options = ("--allow-client-shm", "--model-control", "explicit")
    loaded = [word for name in MODELS if name not in LATER for word in ("--load-model", name)]
    with ExitStack() as stack:
        with gpus.here():
            server = Running(models, models.parent / "log", *options, *loaded, module=WITH_SIMULATED_DEVICES)
            running = stack.enter_context(server)
        warm_up(running)
        yield running


@pytest.fixture(autouse=True)
def nothing_is_kept(served: Running) -> Iterator[None]:
    yield
    with Http(served) as http:
        assert http.post("/v2/cudasharedmemory/unregister", {}).status == 200


@pytest.fixture(params=ALL, ids="-".join)
def say(request: pytest.FixtureRequest, served: Running) -> Iterator[Speaker]:
    with speaker(*request.param, served) as made:
        yield made


@pytest.fixture
def other(request: pytest.FixtureRequest, served: Running) -> Iterator[Speaker]:
    """A second client of the same kind."""
    with speaker(*request.node.callspec.params["say"], served) as made:
        yield made


@pytest.fixture
def gate(models: Path) -> Iterator[Path]:
    """The model `held` waits in a batch with HELD in it, between these two files."""
    folder = models / "held"
    yield folder
    (folder / "go").touch()
    for name in ("began", "go"):
        (folder / name).unlink(missing_ok=True)


def lend(say: Speaker, gpus: FakeGpus, name: str = "r", device: int = 0) -> Allocation:
    at = gpus.allocate(4096, device)
    fill(at, rows(1, 2), rows(10, 20))
    told = say.register(name, at.handle, device, 4096)
    assert told.good, told
    return at


def good(told: Told) -> None:
    assert told.good, told


def closings(told: list[str]) -> list[str]:
    return [line for line in told if " close " in line]


def test_a_region_is_unregistered_under_a_batch_in_flight(
    served: Running, gpus: FakeGpus, say: Speaker, other: Speaker, gate: Path
) -> None:
    """Its client gets its answer; others get another region of the name, or none; and nothing is closed
    before the batch is over."""
    at = lend(say, gpus)
    fill(at, rows(HELD, 2), rows(10, 20))
    with gpus.handles() as told:
        asked = say.infer("held", "r", 2)
        until((gate / "began").exists, "the batch is on the device")
        good(other.unregister("r"))
        refused = other.infer("near", "r", 2).told()
        assert not refused.good
        assert "Unable to find shared memory region: 'r'" in refused.words
        again = lend(other, gpus)
        good(other.infer("near", "r", 2).told())
        assert not closings(told())
        (gate / "go").touch()
        good(asked.told())
        assert np.array_equal(answer_of(at, 2), rows(HELD + 10, 22))
        assert np.array_equal(answer_of(again, 2), rows(11, 22))
        until(lambda: closings(told()), "the worker has closed it")
        pids = [int(line.split()[0]) for line in closings(told())]
    assert pids == [worker_of(served, "held")]
    at.free()
    good(other.unregister("r"))
    again.free()


def test_its_client_leaves_and_takes_it_back(
    served: Running, gpus: FakeGpus, say: Speaker, other: Speaker, gate: Path
) -> None:
    """Nobody waits for the batch any more, and it is in flight still: unregistering waits for it."""
    at = lend(say, gpus)
    fill(at, rows(HELD, 2), rows(10, 20))
    asked = say.infer("held", "r", 2)
    until((gate / "began").exists, "the batch is on the device")
    asked.leave()
    found: list[Told] = []
    back = threading.Thread(target=lambda: found.append(other.unregister("r")))
    with Http(served) as http:
        back.start()
        until(lambda: http.ask("GET", "/v2/cudasharedmemory/status").json() == [], "the name is free")
    assert gpus.readers(worker_of(served, "held")) == 1
    (gate / "go").touch()
    back.join()
    good(found[0])
    at.free()  # which nobody has open


def test_two_models_of_one_process_have_it_open_once(
    served: Running, gpus: FakeGpus, say: Speaker, other: Speaker
) -> None:
    with gpus.handles() as told:
        at = lend(say, gpus)
        for _ in range(3):
            good(say.infer("near", "r", 2).told())
            good(other.infer("beside", "r", 2).told())
        assert np.array_equal(answer_of(at, 2), rows(11, 22))
        good(say.unregister("r"))
        at.free()
        pairs = [(line.split()[1], line.split()[3]) for line in told()]
    assert sorted(pairs) == [("close", "0"), ("open", "1")]


def test_a_region_by_two_names_is_open_until_the_last_is_gone(
    served: Running, gpus: FakeGpus, say: Speaker
) -> None:
    at = lend(say, gpus)
    good(say.register("s", at.handle, 0, 2048))
    with gpus.handles() as told:
        good(say.infer("near", "r", 2).told())
        good(say.unregister("r"))
        at.put(bytes(128), 1024)
        good(say.infer("near", "s", 2).told())
        assert np.array_equal(answer_of(at, 2), rows(11, 22))
        assert not closings(told())
        good(say.unregister("s"))
        assert len(closings(told())) == 1
    at.free()


def test_a_model_that_leaves_a_shared_process_closes_its_own(served: Running, gpus: FakeGpus) -> None:
    """The process lives on with what the other one has open."""
    with speaker("v2", "http", served) as say, Http(served) as http:
        first, both = lend(say, gpus, "first"), lend(say, gpus, "both")
        house = next(
            pid for pid in served.workers if "fs:shared" in proc.name_of(pid) or "all" in proc.name_of(pid)
        )
        for name, model in (("first", "beside"), ("both", "beside"), ("both", "near")):
            good(say.infer(model, name, 2).told())
        assert gpus.readers(house) == 2
        assert http.post("/v2/repository/models/beside/unload", {}).status == 200
        until(lambda: gpus.readers(house) == 1, "what it alone had open is closed")
        good(say.infer("near", "both", 2).told())
        for name in ("first", "both"):
            good(say.unregister(name))
        first.free()
        both.free()
        assert http.post("/v2/repository/models/beside/load", {}).status == 200


def test_nobody_waits_for_a_worker_that_warms_up(served: Running, gpus: FakeGpus, models: Path) -> None:
    """It has nothing open, and would hear of it when it is warm."""
    folder, told = models / "warming", len(served.log.read_text())
    loaded: list[int] = []
    with Http(served) as http, Http(served) as other, speaker("v2", "http", served) as say:
        load = threading.Thread(
            target=lambda: loaded.append(other.post("/v2/repository/models/warming/load", {}).status)
        )
        load.start()
        try:
            until((folder / "began").exists, "its worker warms up", 60)
            at = lend(say, gpus)
            good(say.infer("near", "r", 2).told())
            good(say.unregister("r"))
            assert http.ask("GET", "/v2/models/warming/ready").status != 200
            at.free()  # which nobody has open
        finally:
            (folder / "go").touch()
            load.join()
        at = lend(say, gpus)
        good(say.infer("warming", "r", 2).told())
        assert np.array_equal(answer_of(at, 2), rows(11, 22))
        good(say.unregister("r"))
        at.free()
        assert http.post("/v2/repository/models/warming/unload", {}).status == 200
    assert loaded == [200]
    assert "still have a client's GPU memory open" not in served.log.read_text()[told:]


# --- what is lent wrongly -------------------------------------------------------------------------------

V1_REFUSED = "failed to register CUDA shared memory region 'bad'"
V2_REFUSED = "failed to register shared memory region: invalid args"
V2_LENGTH = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
V1_LENGTH = "unexpected size for CUDA shared-memory handle, expecting 64 bytes"
# What is wrong with a registration, and the refusal where it is another than the usual one, by dialect.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "short": ({"handle": b"\xff" * 63}, {"v1": V1_LENGTH, "v2-http": V2_LENGTH}),
    "none": ({"handle": b""}, {"v1": V1_LENGTH, "v2-http": V2_LENGTH}),
    "no such device": ({"device": 2}, {}),
    "a terabyte": ({"nbytes": 1 << 40}, {}),
    "no bytes": ({"nbytes": 0}, {}),
}
# INVALID_ARGUMENT, what is too small for its output, UNAVAILABLE and UNIMPLEMENTED, as each of them has it.
CODES = {
    "v1-http": (400, 400, 400, 400),
    "v1-grpc": (5, 3, 6, 7),
    "v2-http": (400, 500, 503, 501),
    "v2-grpc": (3, 13, 14, 12),
}


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    """Which dialect `say` speaks, over what."""
    return "-".join(request.node.callspec.params["say"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_registration_that_no_gpu_can_have_is_refused_in_the_dialect_s_words(
    served: Running, gpus: FakeGpus, say: Speaker, way: str, fault: str
) -> None:
    at, (wrong, words) = gpus.allocate(4096), FAULTS[fault]
    usual = V1_REFUSED if way.startswith("v1") else V2_REFUSED
    expected = words.get(way) or words.get(way[:2]) or usual
    told = say.register("bad", **{"handle": at.handle, "device": 0, "nbytes": 4096, **wrong})
    assert told == Told(False, CODES[way][0], expected)
    refused = say.infer("near", "bad", 1).told()
    assert not refused.good
    assert "Unable to find shared memory region: 'bad'" in refused.words
    at.free()


@pytest.mark.parametrize("noise", [b"\0", b"\xff"])
def test_a_handle_that_is_none_is_refused_by_the_worker(say: Speaker, way: str, noise: bytes) -> None:
    good(say.register("r", noise * 64, 0, 4096))
    told = say.infer("near", "r", 2).told()
    words = "shared memory region 'r' cannot be used: client memory on the GPU cannot be opened: cuIpcOpen"
    assert (told.code, words in told.words) == (CODES[way][2], True)


@pytest.mark.parametrize("shy", [False, True])
def test_a_size_beyond_the_allocation_is_refused_by_the_worker(
    gpus: FakeGpus, say: Speaker, way: str, shy: bool
) -> None:
    """Whether the driver tells its range or not."""
    at = gpus.allocate(8192)
    good(say.register("r", at.handle, 0, 8192 + 4096))
    gpus.set("shy", on=shy)
    try:
        told = say.infer("near", "r", 2, to=8192 - 64).told()
        fine = say.infer("near", "r", 2, to=8192 - 128).told()
    finally:
        gpus.set("shy", on=False)
    words = f"shared memory region 'r' cannot be used: {8192 + 64} bytes of it are named, "
    assert (told.code, told.words.startswith(words)) == (CODES[way][0], True), told
    good(fine)
    good(say.unregister("r"))
    at.free()


def test_a_model_on_a_cpu_refuses_it(gpus: FakeGpus, say: Speaker, way: str) -> None:
    lend(say, gpus)
    assert say.infer("far", "r", 2).told() == Told(False, CODES[way][3], IN_PLACE.format("r", "far", 0))


def test_what_a_region_does_not_hold_is_not_used(gpus: FakeGpus, say: Speaker, way: str) -> None:
    at = gpus.allocate(4096)
    fill(at, rows(1, 2), rows(10, 20))
    good(say.register("r", at.handle, 0, 1024 + 127))
    told = say.infer("near", "r", 2).told()
    assert told == Told(False, CODES[way][0], "Invalid offset + byte size for shared memory region: 'r'")
    good(say.unregister("r"))
    good(say.register("r", at.handle, 0, 4096))
    told = say.infer("near", "r", 2, size=127).told()
    assert told.code == CODES[way][1]
    assert "for output 'sum' (127 bytes) should be at least 128 bytes" in told.words
    assert at.get(128, 1024) == bytes(128)
    good(say.infer("near", "r", 2, size=129).told())
    assert np.array_equal(answer_of(at, 2), rows(11, 22))


def test_memory_that_is_freed_before_a_worker_opens_it(gpus: FakeGpus, say: Speaker, way: str) -> None:
    at = lend(say, gpus)
    at.free(early=True)
    told = say.infer("near", "r", 2).told()
    assert told.code == CODES[way][2]
    assert "client memory on the GPU cannot be opened: cuIpcOpenMemHandle" in told.words
