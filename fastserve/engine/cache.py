"""The response cache: what a model answered to the same inputs before, least recently used out first.

The key holds the version itself (never a namesake loaded later), each input with dtype, shape and bytes,
and the outputs asked for. Small inputs are in the key as they are, so that nothing can collide; larger ones
by a hash. A request that finds its like under way waits for it. Errors are never kept, nor shared.

A miss may cost a tiny request next to nothing, hence: the key is one bytes object, which hashes once; entries
are tuples of plain values, which the garbage collector need not look at; nobody waits, nothing is made to
wait on.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from hashlib import blake2b
from itertools import count

from fastserve.engine.counts import Tally
from fastserve.engine.door import Door, Runs
from fastserve.engine.engine import run_on_lane
from fastserve.engine.lane import Lane
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import DTYPE_BY_CODE, Tensor

# Below this a copy is cheaper than a hash (blake2b: 1 us and 1 ns a byte), and exact.
WHOLE_BYTES = 1024
ENTRY_BYTES = 512  # what an entry costs beside its tensors
MOST_HEADS = 256
# After as many, one lookup in so many is timed and stands for all: the clock costs as much as the lookup.
TIMED = 16
# (name, dtype code, shape, bytes) of every output; parameters as items; bytes in all
Kept = tuple[tuple[str, int, tuple[int, ...], bytes], ...]
Entry = tuple[Kept, tuple[tuple[str, object], ...], int]
_numbers = count()


class ResponseCache:
    """At most `capacity` bytes of responses, of every model that has one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.evictions = self.hits = self.misses = 0
        self.lookup_ns = self.insertion_ns = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> InferResponse | None:
        """The response kept under the key, which is now the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        outputs = {name: Tensor(DTYPE_BY_CODE[code], shape, data) for name, code, shape, data in entry[0]}
        return InferResponse(outputs, None, dict(entry[1]))

    def put(self, key: bytes, response: InferResponse) -> None:
        """Keep a copy, unless it alone is larger than everything may be."""
        size = ENTRY_BYTES + len(key)
        kept = []
        for name, tensor in response.outputs.items():
            data = bytes(tensor.data)
            size += len(data)
            kept.append((name, tensor.dtype.code, tensor.shape, data))
        if size > self.capacity or key in self._entries:
            return
        self._entries[key] = tuple(kept), tuple(response.parameters.items()), size
        self.used += size
        while self.used > self.capacity:
            self.used -= self._entries.popitem(last=False)[1][2]
            self.evictions += 1

    def forget(self, prefix: bytes) -> None:
        """A version is gone, and its answers with it."""
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self.used -= self._entries.pop(key)[2]


class CachedDoor(Door):
    """The door of a version with a cache, before its lane or its other door."""

    def __init__(self, cache: ResponseCache, inner: Lane | Door, tally: Tally) -> None:
        self.inner = inner
        self._cache, self._tally = cache, tally
        self._lookups = 0
        self._keys = Keys()
        self._running: dict[bytes, list[asyncio.Future[None]]] = {}

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        self._lookups += 1
        weight = _weight(self._lookups)
        began_ns = time.monotonic_ns() if weight else 0
        key = self._keys.of(request)
        kept = self._cache.get(key)
        if weight:
            self._count_lookup(weight * (time.monotonic_ns() - began_ns), hit=kept is not None)
        while kept is None:
            running = self._running.get(key)
            if running is None:
                return await self._run(key, engine, version, request)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            running.append(waiter)
            await waiter
            kept = self._cache.get(key)
            if kept is None:  # it failed, or was too large: each for itself then
                return await self._ask(engine, version, request)
        self._tally.hit.count += 1
        self._cache.hits += 1
        return kept

    def _count_lookup(self, took_ns: int, *, hit: bool) -> None:
        self._cache.lookup_ns += took_ns
        (self._tally.hit if hit else self._tally.miss).ns += took_ns
        self._tally.last_ns = time.monotonic_ns()

    def _keep(self, key: bytes, response: InferResponse) -> None:
        weight = _weight(self._tally.miss.count)
        began_ns = time.monotonic_ns() if weight else 0
        self._cache.put(key, response)
        took_ns = weight * (time.monotonic_ns() - began_ns) if weight else 0
        self._cache.insertion_ns += took_ns
        self._tally.miss.ns += took_ns

    async def drain(self) -> None:
        if isinstance(self.inner, Door):
            await self.inner.drain()

    def close(self) -> None:
        self._cache.forget(self._keys.prefix)
        if isinstance(self.inner, Door):
            self.inner.close()

    async def _run(self, key: bytes, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        """Ask for everybody who comes with the same meanwhile."""
        waiters = self._running[key] = []
        try:
            response = await self._ask(engine, version, request)
            self._keep(key, response)
            return response
        finally:
            del self._running[key]
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def _ask(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        self._tally.miss.count += 1
        self._cache.misses += 1
        if isinstance(self.inner, Door):
            return await self.inner.infer(engine, version, request)
        return await run_on_lane(self.inner, version, request)


def _weight(number: int) -> int:
    """How many the number-th of its kind stands for when it is timed; 0: it is not."""
    return 1 if number <= TIMED else 0 if number % TIMED else TIMED


class Keys:
    """The keys of one loaded version. What requests of a model have in common is written once."""

    def __init__(self) -> None:
        self.prefix = next(_numbers).to_bytes(8, "big")
        self._heads: dict[tuple[object, ...], bytes] = {}

    def of(self, request: InferRequest) -> bytes:
        """What makes two requests the same. Their ids, priorities and times do not."""
        inputs = request.inputs
        if len(inputs) == 1:
            for name, tensor in inputs.items():
                return self._head(name, tensor, request.outputs) + _content(tensor)
        parts = [
            self._head(name, inputs[name], request.outputs) + _content(inputs[name])
            for name in sorted(inputs)
        ]
        return self.prefix + b"".join(parts)

    def _head(self, name: str, tensor: Tensor, outputs: tuple[str, ...]) -> bytes:
        """Everything but the bytes, and how many there are: what follows it cannot be read two ways."""
        sort = (name, tensor.dtype.code, tensor.shape, outputs, len(tensor.data))
        head = self._heads.get(sort)
        if head is None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            text = repr(sort).encode()
            head = self._heads[sort] = self.prefix + len(text).to_bytes(4, "big") + text
        return head


def _content(tensor: Tensor) -> bytes | memoryview | bytearray:
    data = tensor.data
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    return data if size <= WHOLE_BYTES else blake2b(data).digest()
