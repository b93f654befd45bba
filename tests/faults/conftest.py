"""One server for all tests of this package: no test may affect the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Belongings
from tests.dialects.kserve import client_models
from tests.faults.fixtures import OPTIONS, grpc, http, write_models
from tests.faults.rig import Grpc, Http
from tests.running import Running, until

__all__ = ["grpc", "http"]
ADMIN = ("--admin-file-overrides", "--admin-log-settings")


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("faults") / "models")
    client_models.write_triton(folder, "odd", client_models.SIMPLE, client_models.PAIR + "max_batchsize: 8\n")
    return folder


@pytest.fixture(scope="package")
def shared_server(models: Path) -> Iterator[Running]:
    with Running(models, models.parent / "log", *OPTIONS, *ADMIN) as running:
        with Http(running) as warm, Grpc(running) as rpc:
            warm.ask("GET", "/v2")
            rpc.ask("ServerLive")
        yield running


@pytest.fixture
def served(shared_server: Running, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A test leaves the server alive, with the workers and descriptors it had, and with no new error in its
    log unless it is marked `logs_errors`."""
    ours, holds = Belongings.count(), shared_server.holds()
    yield shared_server
    assert shared_server.alive, shared_server.log.read_text()
    until(lambda: not ours.gained(), "the client gives everything back")
    shared_server.settles(holds, errors=bool(request.node.get_closest_marker("logs_errors")))


@pytest.fixture
def held(models: Path) -> Iterator[Path]:
    """The folder where `held` says that it `began`, and that its caller has `left`; `go` lets it answer."""
    folder = models / "held"
    yield folder
    for name in ("began", "left", "go"):
        (folder / name).unlink(missing_ok=True)
