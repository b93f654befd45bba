"""The server the official clients share, the answers to the captured cases, and the log level each test gets
back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.conftest import Belongings
from tests.dialects.kserve.replay import Answers, replay
from tests.running import Running, until

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = (
    "--model-control", "explicit", "--load-model", "*", "--allow-client-shm",
    "--admin-file-overrides", "--admin-log-settings",
)  # fmt: skip


@pytest.fixture(scope="package")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """One server for all cases of both halves: it takes longer to start than to answer them."""
    return uvloop.run(replay(tmp_path_factory.mktemp("probe")))


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """The logging call of this dialect sets the level of the whole package."""
    logger = logging.getLogger("fastserve")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `client_models`."""
    from tests.dialects.kserve.client_models import write_all

    folder = tmp_path_factory.mktemp("clients") / "models"
    folder.mkdir()
    write_all(folder)
    return folder


@pytest.fixture(scope="package")
def shared_server(models: Path) -> Iterator[Running]:
    """Every model of `client_models`."""
    from tests.dialects.kserve.client_rig import warm_up

    with Running(models, models.parent / "log", *OPTIONS) as running:
        warm_up(running)
        yield running


@pytest.fixture
def served(shared_server: Running, request: pytest.FixtureRequest) -> Iterator[Running]:
    """The shared server; a test leaves neither it nor the clients with more than there was."""
    ours, holds = Belongings.count(), shared_server.holds()
    yield shared_server

    def has_given_back() -> bool:
        if not ours.gained():
            return True
        gc.collect()  # an error that was raised holds its channel in a circle
        return False

    # Channels close their sockets a moment after close() has returned.
    if not request.node.get_closest_marker("lingers"):
        until(has_given_back, "the client gives everything back")
    shared_server.settles(holds)
