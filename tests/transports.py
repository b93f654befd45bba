"""gRPC's two transports: what a test module imports to have each of its tests run on both.

    from tests.transports import both_transports as both_transports

Rigs ask `transport()` which one it is; without the import it is the server's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import pytest

Name = Literal["native", "grpcio"]
NAMES: tuple[Name, ...] = ("native", "grpcio")
_chosen: list[Name] = ["native"]


def transport() -> Name:
    """That of the test which is running."""
    return _chosen[-1]


@contextlib.contextmanager
def on_transport(name: Name) -> Iterator[None]:
    """For what a test does itself on one after the other."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


@pytest.fixture(params=NAMES, autouse=True)
def both_transports(request: pytest.FixtureRequest) -> Iterator[Name]:
    with on_transport(request.param):
        yield request.param
