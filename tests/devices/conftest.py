"""Two simulated GPUs, and a server that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.devices.simulated import FakeGpus
from tests.dialects.kserve_v2 import client_models
from tests.dialects.kserve_v2.client_rig import warm_up
from tests.faults.rig import Grpc, Http
from tests.running import Running

OPTIONS = ("--model-control", "explicit", "--load-model", "*", "--allow-client-shm", "--keep-going")


@pytest.fixture(scope="package")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> FakeGpus:
    return FakeGpus(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices") / "models"
    folder.mkdir()
    client_models.write_sums(folder)
    client_models.write_kinds(folder)
    client_models.write_streams(folder)
    return folder


@pytest.fixture(scope="package")
def served(gpus: FakeGpus, models: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        with gpus.here():  # what is started later by a test sees no GPU unless it says so
            running = stack.enter_context(Running(models, models.parent / "log", *OPTIONS))
        warm_up(running)
        yield running


@pytest.fixture
def http(served: Running) -> Iterator[Http]:
    with Http(served) as made:
        yield made


@pytest.fixture
def grpc(served: Running) -> Iterator[Grpc]:
    with Grpc(served) as made:
        yield made
