"""Runs whole requests: an InferRequest in, an InferResponse out, for any version, by its scheduler."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from fastserve.codec.text import Heard, Info, Run, TextNote
from fastserve.engine.scheduler import TensorFace, scheduler_of
from fastserve.engine.text import TextScheduler
from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse


class Engine:
    """Runs requests on the versions of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tensors: TensorFace | None = None

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Run one request. The caller releases the response.

        Raises ServeError: INVALID_ARGUMENT for inputs the version does not take, UNAVAILABLE when
        its queue is full or it is going away, DEADLINE_EXCEEDED, and what the model raised.
        """
        return await scheduler_of(version).infer(self, version, request)

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request whose responses come one by one; none, one or many. The caller releases each, and
        closes the generator when it leaves early: that cancels the request. For a model that is not
        decoupled it is the one response of `infer`.

        An error that other responses may follow is a response with `error`. Raises ServeError, now, at the
        first look or later, for what ends the stream: as `infer`, or the worker died.
        """
        return scheduler_of(version).stream(self, version, request)

    def text_info(self, version: Version) -> Info | None:
        """What its text engine says of itself; None for a model that generates no text."""
        return version.text

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> Run:
        """Start one sequence on a text model: `ids` is the prompt, empty where `note.text` is. `heard` gets
        its records as they come, the last one in any case: cancelled, timed out or failed too.

        Raises ServeError, and `heard` is never called: RESOURCE_EXHAUSTED or UNAVAILABLE when it cannot wait
        anywhere, INVALID_ARGUMENT for a prompt that no place has room for.
        """
        scheduler = scheduler_of(version)
        if not isinstance(scheduler, TextScheduler):
            raise ServeError(Kind.UNIMPLEMENTED, f"model '{version.model}' generates no text")
        return scheduler.generate(ids, note, heard)
