"""Runs requests on versions: the Engine, and the Scheduler interface that every available version implements.

    response = await scheduler.infer(engine, version, request)    general path: any scheduler, any request
    queue = scheduler.fast_queue()                                fast path: a caller reserves rows by itself

A scheduler that decides when and how requests run (sequences, priorities, ensembles) has no fast queue; one
with a response cache offers `cache_stage()`, which a caller of the fast path has to ask first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from fastserve.codec.generation import GenerationRun, Heard, Info, TextNote
from fastserve.errors import Kind, ServeError, unsupported
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Attachment, Version
from fastserve.request import InferRequest, InferResponse
from fastserve.util.spans import RequestSpan, current_span

if TYPE_CHECKING:
    from fastserve._ext.fast_path import Account
    from fastserve.engine.batch_queue import BatchQueue
    from fastserve.engine.schedulers.cache import CacheStage


class TensorFace(Protocol):
    """Tensor requests to text models; implemented by the serving layer, which has the tokenizers."""

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Return the only response. Raises ServeError."""

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses."""


class Sampler(Protocol):
    """Draws requests on the fast path."""

    def draw(self) -> bool:
        """Return whether the next request is drawn, which the fast path then leaves to the general path."""


class Scheduler(ABC):
    """One version's way of taking requests."""

    @abstractmethod
    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        """Run one request; the caller releases the response. Raises ServeError."""

    async def stream(
        self, engine: Engine, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses of a request; by default, the one of `infer`."""
        yield await self.infer(engine, version, request)

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> GenerationRun:
        """Start one sequence of tokens, as `Engine.generate` says. Raises ServeError."""
        raise unsupported(f"model '{version.model}' generates no text")

    def fast_queue(self) -> BatchQueue | None:
        """Return the queue whose places a caller may reserve directly, each request answered once; None where
        the scheduler decides first."""
        return None

    def cache_stage(self) -> CacheStage | None:
        """Return the cache that a caller of the fast path asks before it reserves rows in its queue."""
        return None

    def cache_number(self) -> int | None:
        """Return the number of the version's cache keys; None for one without a cache."""
        return None

    def request_sampler(self) -> Sampler | None:
        """Return what draws requests for the version's log or shadow; None for one without."""
        return None

    def pending(self) -> int:
        """Return the number of requests that wait in the scheduler, before any queue has them."""
        return 0

    @property
    def busy(self) -> bool:
        """Return whether something would be lost or waited for if the version went now: requests under way
        that no queue shows, or the state of sequences."""
        return False

    async def drain(self) -> None:  # noqa: B027  (most schedulers need none of these)
        """Return when no request waits in the scheduler. Its queue is drained separately."""

    def close(self) -> None:  # noqa: B027
        """Fail the requests that still wait: the version is gone."""

    # Why what the queue of a dead instance still holds is not for the next worker; "" where it is.
    died_with_it = ""

    def instance_lost(self, part: int) -> None:  # noqa: B027
        """Handle the death of an instance's worker, whose state is lost."""

    def instance_back(self, part: int) -> None:  # noqa: B027
        """Handle the return of an instance: it has a worker again."""


class DelegatingScheduler(Scheduler):
    """A scheduler before another one, `inner`, which does all that a subclass does not."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.died_with_it = inner.died_with_it

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        return await self.inner.infer(engine, version, request)

    def stream(
        self, engine: Engine, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        return self.inner.stream(engine, version, request)

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> GenerationRun:
        return self.inner.generate(version, ids, note, heard)

    def fast_queue(self) -> BatchQueue | None:
        return self.inner.fast_queue()

    def cache_stage(self) -> CacheStage | None:
        return self.inner.cache_stage()

    def cache_number(self) -> int | None:
        return self.inner.cache_number()

    def request_sampler(self) -> Sampler | None:
        return self.inner.request_sampler()

    def pending(self) -> int:
        return self.inner.pending()

    @property
    def busy(self) -> bool:
        return self.inner.busy

    async def drain(self) -> None:
        await self.inner.drain()

    def close(self) -> None:
        self.inner.close()

    def instance_lost(self, part: int) -> None:
        self.inner.instance_lost(part)

    def instance_back(self, part: int) -> None:
        self.inner.instance_back(part)


SCHEDULER: Attachment[Scheduler] = Attachment(outlives=True)  # until its workers have stopped


def find_scheduler(version: Version) -> Scheduler | None:
    """Return the version's scheduler in this process; None before it has one and after it closed."""
    return SCHEDULER.get(version)


def scheduler_of(version: Version) -> Scheduler:
    """Return the version's scheduler in this process. Raises ServeError UNAVAILABLE when it has none."""
    scheduler = find_scheduler(version)
    if scheduler is None:
        raise ServeError(
            Kind.UNAVAILABLE, f"version {version.number} of model {version.model} is not available"
        )
    return scheduler


def fast_queue_of(version: Version) -> BatchQueue | None:
    """Return the fast queue of a version; None also when it has no scheduler."""
    scheduler = find_scheduler(version)
    return None if scheduler is None else scheduler.fast_queue()


def cache_stage_of(version: Version) -> CacheStage | None:
    """Return the cache stage of a version; None also when it has no scheduler."""
    scheduler = find_scheduler(version)
    return None if scheduler is None else scheduler.cache_stage()


def sampler_of(version: Version) -> Sampler | None:
    """Return what draws requests for a version's log or shadow; None also when it has no scheduler."""
    scheduler = find_scheduler(version)
    return None if scheduler is None else scheduler.request_sampler()


class Engine:
    """Runs requests on the versions of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tensors: TensorFace | None = None
        self.find_account: Callable[[str], Account | None] = lambda name: None
        """The account of an API key, by its name, for requests of other front processes."""
        self.send_span: Callable[[RequestSpan], None] | None = None
        """Takes the ended spans of models' calls to other models; None where requests are not traced."""

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Run one request. The caller releases the response.

        Raises ServeError: INVALID_ARGUMENT for inputs the version does not take, UNAVAILABLE when
        its queue is full or it is going away, DEADLINE_EXCEEDED, and what the model raised.
        """
        scheduler, span = scheduler_of(version), current_span()
        if span is None:
            return await scheduler.infer(self, version, request)
        with traced_run(span, version, request):
            return await scheduler.infer(self, version, request)

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request whose responses come one by one; none, one or many. The caller releases each, and
        closes the generator when it leaves early: that cancels the request. For a model that is not
        decoupled it is the one response of `infer`.

        An error that other responses may follow is a response with `error`. Raises ServeError, now, at the
        first look or later, for what ends the stream: as `infer`, or the worker died.
        """
        responses, span = scheduler_of(version).stream(self, version, request), current_span()
        return responses if span is None else _stream_traced(span, version, request, responses)

    def text_info(self, version: Version) -> Info | None:
        """Return the description of its text engine; None for a model that generates no text."""
        return version.text

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> GenerationRun:
        """Start one sequence on a text model: `ids` is the prompt, empty where `note.text` is. `heard` gets
        its records as they come, the last one in any case: cancelled, timed out or failed too.

        Raises ServeError, and `heard` is never called: RESOURCE_EXHAUSTED or UNAVAILABLE when it cannot wait
        anywhere, INVALID_ARGUMENT for a prompt that no place has room for.
        """
        return scheduler_of(version).generate(version, ids, note, heard)


@contextmanager
def traced_run(span: RequestSpan, version: Version, request: InferRequest) -> Iterator[None]:
    """Trace one run of a request on a version, which takes place within the block: below the run of which
    the request is a step, as its `trace` says."""
    above = request.trace
    run = request.trace = span.begin_run(version.model, version.number, above)
    if run is None:
        yield
        return
    try:
        yield
    except ServeError as fault:
        run.end(fault.message)
        raise
    except BaseException as error:  # its caller has left, or it is logged elsewhere: never its text here
        run.end(type(error).__name__)
        raise
    else:
        run.end()
    finally:
        request.trace = above


async def _stream_traced(
    span: RequestSpan,
    version: Version,
    request: InferRequest,
    responses: AsyncGenerator[InferResponse, None],
) -> AsyncGenerator[InferResponse, None]:
    with traced_run(span, version, request):
        async with aclosing(responses):
            async for response in responses:
                yield response
