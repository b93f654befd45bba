"""The response cache: a model's earlier answers to the same inputs (`_ext.response_cache` keeps it).

The key holds the version itself (never a namesake loaded later), each input with name, dtype, shape and
bytes, the requested outputs, and the parameters where the model sees whole requests. A request that equals
one under way waits for it, up to its own deadline. Errors are neither kept nor shared: if the one under way
fails, or its client leaves, one that waits runs and the others wait for that one; after LEADERS of them in
vain each runs by itself. A fast path that has the inputs in memory looks them up by itself:

    found = stage.find(stage.head(sorts, outputs), memory)
    an Entry: a hit; None: an equal one is under way; a Miss: to be run in the stage's queue, then
    miss.keep(form, memory) if that went well, and miss.close() in any case

Several front processes share one table (`CacheMemory`), and each answers hits by itself. A request waits for
an equal one within its front only: those that come to several fronts at once run once in each.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count

from fastserve._ext.response_cache import (
    ENTRY_BYTES,
    WHOLE_BYTES,
    Counts,
    Entry,
    Miss,
    ResponseCache,
    SharedResponseCache,
    lay_out_shared,
    shared_bytes,
)
from fastserve.backends.registry import find_backend
from fastserve.engine.batch_queue import BatchQueue, queued_too_long
from fastserve.engine.counters import RequestCounters
from fastserve.engine.engine import Engine, Scheduler
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse, by_name
from fastserve.tensor import DTYPE_BY_CODE, Tensor
from fastserve.util.memory import make_shared_file, map_shared_file

__all__ = [
    "ENTRY_BYTES",
    "WHOLE_BYTES",
    "CacheKeys",
    "CacheMemory",
    "CacheStage",
    "CachedScheduler",
    "Entry",
    "InputForm",
    "Miss",
    "OutputForm",
    "ResponseCache",
    "keep_response",
    "respond",
]
MOST_HEADS = 256
LEADERS = 3
"""Equal requests that one waits for, each after the one before has left no answer. They run one after the
other, so that is how long requests wait for a model that fails, or whose answers the cache does not hold."""
Memory = bytes | bytearray | memoryview
InputForm = tuple[str, int, tuple[int, ...], int]  # name, dtype code, shape and bytes of an input
OutputForm = tuple[tuple[str, int, tuple[int, ...]], ...]  # name, dtype code and shape of every output
_NONE: Mapping[str, object] = {}
_numbers = count()


class CacheMemory:
    """The table of a server's response cache, for all its front processes. Made by their owner; `fd` goes to
    the others."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = make_shared_file("fastserve-cache", shared_bytes(capacity))
        with map_shared_file(self.fd) as memory:
            lay_out_shared(memory, capacity, int.from_bytes(os.urandom(8), "little"))

    def open(self) -> ResponseCache:
        """Return the cache of this process."""
        return open_shared_cache(self.fd, self.capacity)

    def close(self) -> None:
        """Close the descriptor; who has opened the cache keeps its memory."""
        os.close(self.fd)


def open_shared_cache(fd: int, capacity: int) -> ResponseCache:
    """Open the cache whose memory another process has made; the descriptor stays the caller's."""
    return SharedResponseCache(map_shared_file(fd), capacity)


class CacheStage:
    """The cache of one version as a fast path sees it, before its queue."""

    __slots__ = ("_cache", "_counts", "head", "queue")

    def __init__(self, queue: BatchQueue, cache: ResponseCache, keys: CacheKeys, counts: Counts) -> None:
        self.queue = queue
        self.head = keys.head
        self._cache, self._counts = cache, counts

    def find(self, head: bytes, memory: Sequence[Memory]) -> Entry | Miss | None:
        """Return an Entry (a hit), a Miss (run it and keep the answer), or None (an equal one runs)."""
        return self._cache.find(head, memory, self._counts)


class CachedScheduler(Scheduler):
    """A cache in front of another scheduler."""

    def __init__(
        self,
        cache: ResponseCache,
        inner: Scheduler,
        counters: RequestCounters,
        number: int | None = None,
    ) -> None:
        """`number`: of the version's keys, in a front process that does not own the models."""
        self.inner = inner
        self.keys = CacheKeys(number)
        self.cache, self.counts = cache, counters.cached()
        self.died_with_it = inner.died_with_it

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        head, memory = self.keys.of(version, request)
        found = self.cache.find(head, memory, self.counts)
        for _ in range(LEADERS):
            if found is not None:
                break
            await self._until_left(self.cache.key(head, memory), request.deadline_ns)
            found = self.cache.find(head, memory, self.counts)
        if found is None:
            self.cache.count_miss(self.counts)
            return await self.inner.infer(engine, version, request)
        if isinstance(found, Entry):
            return respond(found)
        return await self._run(found, engine, version, request)

    def cache_stage(self) -> CacheStage | None:
        queue = self.inner.fast_queue()
        return None if queue is None else CacheStage(queue, self.cache, self.keys, self.counts)

    def pending(self) -> int:
        return self.inner.pending()

    async def drain(self) -> None:
        await self.inner.drain()

    def close(self) -> None:
        self.cache.forget(self.keys.prefix)
        self.inner.close()

    def cache_number(self) -> int | None:
        return self.keys.number

    def instance_lost(self, part: int) -> None:
        self.inner.instance_lost(part)

    def instance_back(self, part: int) -> None:
        self.inner.instance_back(part)

    async def _until_left(self, key: bytes, deadline_ns: int) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cache.wait(key, lambda: None if waiter.done() else waiter.set_result(None))
        left_s = max(deadline_ns - time.monotonic_ns(), 0) / 1e9 if deadline_ns else None
        await asyncio.wait([waiter], timeout=left_s)
        if not waiter.done():
            waiter.cancel()
            raise queued_too_long()

    async def _run(
        self, miss: Miss, engine: Engine, version: Version, request: InferRequest
    ) -> InferResponse:
        """Run the request once for all equal ones that arrive meanwhile."""
        try:
            response = await self.inner.infer(engine, version, request)
            keep_response(miss, response)
            return response
        finally:
            miss.close()


def keep_response(miss: Miss, response: InferResponse) -> None:
    """Copy a response into the cache."""
    told = list(response.in_order())
    form = tuple([(name, tensor.dtype.code, tensor.shape) for name, tensor in told])
    miss.keep(form, [tensor.data for _, tensor in told], tuple(response.parameters.items()))


def respond(entry: Entry) -> InferResponse:
    """Return a cached entry as a response; the cache keeps its memory."""
    outputs, repeated = by_name(
        [
            (name, Tensor(DTYPE_BY_CODE[code], shape, data))
            for (name, code, shape), data in zip(entry.form, entry.memory, strict=True)
        ]
    )
    return InferResponse(outputs, None, dict(entry.parameters), repeated=repeated)


class CacheKeys:
    """Cache keys of one loaded version, which begin with its number. Their beginnings are written once."""

    def __init__(self, number: int | None = None) -> None:
        self.number = next(_numbers) if number is None else number
        self.prefix = self.number.to_bytes(8, "big")
        self._heads: dict[tuple[object, ...], bytes] = {}

    def of(self, version: Version, request: InferRequest) -> tuple[bytes, list[Memory]]:
        """Return the head and the input memory that identify a request; id, priority and time do not."""
        inputs = request.inputs
        names = [name for name in version.inputs if name in inputs]
        if len(names) < len(inputs):
            names += sorted(inputs.keys() - names)
        sorts = tuple([_sort(name, inputs[name]) for name in names])
        seen = bool(request.parameters) and find_backend(version.config.backend).takes == "requests"
        head = self.head(sorts, request.outputs, request.parameters if seen else {})
        return head, [inputs[name].data for name in names]

    def head(
        self, sorts: tuple[InputForm, ...], outputs: tuple[str, ...], parameters: Mapping[str, object] = _NONE
    ) -> bytes:
        """Everything of a key but the bytes of the inputs, which are given in the model's own order. It tells
        how many there are of each: what follows it cannot be read two ways. `parameters` are those that the
        model sees."""
        told = blake2b(repr(sorted(parameters.items())).encode()).digest() if parameters else b""
        head = self._heads.get((sorts, outputs, told))
        if head is None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            text = repr((sorts, outputs, told) if told else (sorts, outputs)).encode()
            head = self._heads[sorts, outputs, told] = self.prefix + len(text).to_bytes(4, "big") + text
        return head


def _sort(name: str, tensor: Tensor) -> InputForm:
    data = tensor.data
    return name, tensor.dtype.code, tensor.shape, data.nbytes if isinstance(data, memoryview) else len(data)
