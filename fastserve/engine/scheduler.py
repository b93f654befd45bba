"""How a version's requests get in: every available version has one Scheduler, the plain one included.

    response = await scheduler.infer(engine, version, request)    the general path: any scheduler, any request
    queue = scheduler.fast_queue()                                the fast path: a caller takes places itself

What decides when and how requests run (sequences, priorities, ensembles) has no fast queue; a cache has one
only for who asks it first. So nobody who knows queues alone can walk past a scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse

if TYPE_CHECKING:
    from fastserve.engine.batch_queue import BatchQueue
    from fastserve.engine.cache import CacheStage


class TensorFace(Protocol):
    """Requests of tensors to text models, read by whoever knows tokenizers: the serving floor."""

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Its one response. Raises ServeError."""

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Its responses, one by one."""


class Runs(Protocol):
    """The engine as a scheduler sees it."""

    catalog: Catalog
    tensors: TensorFace | None

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Run one request on any version."""


class Scheduler(ABC):
    """One version's way of taking requests."""

    @abstractmethod
    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        """Run one request; the caller releases the response. Raises ServeError."""

    async def stream(
        self, engine: Runs, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        """The request's responses one by one; its only one, unless a scheduler knows better."""
        yield await self.infer(engine, version, request)

    def fast_queue(self) -> BatchQueue | None:
        """The queue whose places a caller may take by itself, each request answered once; None where
        something else decides first."""
        return None

    def cache_stage(self) -> CacheStage | None:
        """What a caller of the fast path asks before it takes a place in the stage's queue."""
        return None

    def pending(self) -> int:
        """Requests that wait here, before any queue knows them."""
        return 0

    async def drain(self) -> None:  # noqa: B027  (most schedulers need none of these)
        """Return when nobody waits here. The queue behind it is drained by itself."""

    def close(self) -> None:  # noqa: B027
        """Whoever still waits is told that the version is gone."""

    # Why what the queue of a dead instance still holds is not for the next worker; "" where it is.
    died_with_it = ""

    def instance_lost(self, part: int) -> None:  # noqa: B027
        """The worker of that instance died, and what it knew with it."""

    def instance_back(self, part: int) -> None:  # noqa: B027
        """It has a worker again."""


def find_scheduler(version: Version) -> Scheduler | None:
    """The version's scheduler in this process; None when it has none yet, or any more."""
    scheduler = version.scheduler  # of no known type down there
    assert scheduler is None or isinstance(scheduler, Scheduler)
    return scheduler


def scheduler_of(version: Version) -> Scheduler:
    """The version's scheduler in this process. Raises ServeError UNAVAILABLE when it has none."""
    scheduler = find_scheduler(version)
    if scheduler is None:
        raise ServeError(
            Kind.UNAVAILABLE, f"version {version.number} of model {version.model} is not available"
        )
    return scheduler


def fast_queue_of(version: Version) -> BatchQueue | None:
    """The fast queue of a version; None also when it has no scheduler."""
    scheduler = find_scheduler(version)
    return None if scheduler is None else scheduler.fast_queue()


def cache_stage_of(version: Version) -> CacheStage | None:
    """The cache stage of a version; None also when it has no scheduler."""
    scheduler = find_scheduler(version)
    return None if scheduler is None else scheduler.cache_stage()
