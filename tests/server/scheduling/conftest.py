"""Runs the tests of modules that set RELAYED as in the owner and through a relay."""

from __future__ import annotations

import pytest

from tests.server import rig
from tests.server.relayed import RelayedEngine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if getattr(metafunc.module, "RELAYED", False):
        metafunc.parametrize("asked_in", ["owner", "another front"], indirect=True)


@pytest.fixture(autouse=True)
def asked_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "owner") != "owner":
        monkeypatch.setattr(rig, "open_engine", RelayedEngine)
