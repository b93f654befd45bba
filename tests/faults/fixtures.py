"""Shared by the packages that send faults to a server: its models, and clients of the fixture `served`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dialects.kserve import client_models
from tests.faults.rig import Grpc, Http
from tests.running import Running

OPTIONS = ("--model-control", "explicit", "--load-model", "*", "--allow-client-shm", "--keep-going")


def write_models(folder: Path) -> Path:
    """Sums, all kinds of tensors, streams."""
    folder.mkdir()
    client_models.write_sums(folder)
    client_models.write_kinds(folder)
    client_models.write_streams(folder)
    return folder


@pytest.fixture
def http(served: Running) -> Iterator[Http]:
    with Http(served) as made:
        yield made


@pytest.fixture
def grpc(served: Running) -> Iterator[Grpc]:
    with Grpc(served) as made:
        yield made
