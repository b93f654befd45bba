"""Two simulated GPUs, and a server that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.devices.simulated import FakeGpus
from tests.dialects.kserve.client_rig import warm_up
from tests.faults.fixtures import OPTIONS, grpc, http, write_models
from tests.running import Running

__all__ = ["grpc", "http"]


@pytest.fixture(scope="package")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpus]:
    made = FakeGpus(tmp_path_factory.mktemp("gpus"))
    yield made
    assert made.broken == ""


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("devices") / "models")


@pytest.fixture(scope="package")
def served(gpus: FakeGpus, models: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        with gpus.here():  # what is started later by a test sees no GPU unless it says so
            running = stack.enter_context(Running(models, models.parent / "log", *OPTIONS))
        warm_up(running)
        yield running
