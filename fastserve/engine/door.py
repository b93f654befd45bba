"""What may stand before a version's lane: a door decides when and how its requests get in.

A plain version has no door: `version.lane` is the Lane itself and nobody stands between. Everything that
schedules (sequences, priorities, ensembles, a cache) is a Door in that same place, so that a path which
knows lanes only cannot walk past it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Protocol

from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse


class Runs(Protocol):
    """The engine as a door sees it."""

    catalog: Catalog

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Run one request on any version."""


class Door(ABC):
    """One version's way of taking requests."""

    @abstractmethod
    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        """Run one request; the caller releases the response. Raises ServeError."""

    async def stream(
        self, engine: Runs, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        """The request's responses one by one; its only one, unless a door knows better."""
        yield await self.infer(engine, version, request)

    def pending(self) -> int:
        """Requests that wait here, before any lane knows them."""
        return 0

    @abstractmethod
    async def drain(self) -> None:
        """Return when nobody waits behind this door. The lane behind it is drained by itself."""

    @abstractmethod
    def close(self) -> None:
        """Whoever still waits is told that the version is gone."""
