"""The response cache: what a model answered to the same inputs before, least recently used out first.

The key holds the version itself (never a namesake loaded later), each input with name, dtype, shape and
bytes, and the outputs asked for. Small inputs are in the key as they are, so that nothing can collide; larger
ones by a hash. A request that finds its like under way waits for it. Errors are never kept, nor shared.

A miss may cost a tiny request next to nothing, hence: the key is one bytes object, which hashes once; entries
are tuples of plain values, which the garbage collector need not look at; nobody waits, nothing is made to
wait on. A hot door that has the inputs in memory asks by itself:

    key = content_key(door.keys.head(sorts, outputs), memory)
    entry = door.look(key)                       a hit, or:
    if door.enter(key): ...run it...; door.keep(key, form, memory); door.leave(key)
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
Memory = bytes | bytearray | memoryview
Sort = tuple[str, int, tuple[int, ...], int]  # name, dtype code, shape and bytes of an input
Form = tuple[tuple[str, int, tuple[int, ...]], ...]  # name, dtype code and shape of every output
# What is kept: form, data of every output, parameters as items, bytes in all
Entry = tuple[Form, tuple[bytes, ...], tuple[tuple[str, object], ...], int]
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

    def get(self, key: bytes) -> Entry | None:
        """What is kept under the key, which is now the most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(
        self,
        key: bytes,
        form: Form,
        memory: Iterable[Memory],
        parameters: tuple[tuple[str, object], ...] = (),
    ) -> None:
        """Keep a copy, unless it alone is larger than everything may be."""
        data = tuple(map(bytes, memory))
        size = ENTRY_BYTES + len(key) + sum(map(len, data))
        if size > self.capacity or key in self._entries:
            return
        self._entries[key] = form, data, parameters, size
        self.used += size
        while self.used > self.capacity:
            self.used -= self._entries.popitem(last=False)[1][3]
            self.evictions += 1

    def forget(self, prefix: bytes) -> None:
        """A version is gone, and its answers with it."""
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self.used -= self._entries.pop(key)[3]


class CachedDoor(Door):
    """The door of a version with a cache, before its lane or its other door."""

    def __init__(self, cache: ResponseCache, inner: Lane | Door, tally: Tally) -> None:
        self.inner = inner
        self.keys = Keys()
        self._cache, self._tally = cache, tally
        self._lookups = self._kept = 0
        # Keys under way, and whom to tell when they no longer are.
        self._running: dict[bytes, list[Callable[[], None]] | None] = {}

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        key = self.keys.of(version, request)
        entry = self.look(key)
        if entry is None and not self.enter(key):
            await self._until_left(key)
            entry = self._cache.get(key)
            if entry is None:  # it failed, was too large, or is under way again: each for itself then
                return await self._ask(engine, version, request)
            self._count_hit()
        if entry is None:
            return await self._run(key, engine, version, request)
        return respond(entry)

    def look(self, key: bytes) -> Entry | None:
        """What is kept under the key."""
        self._lookups += 1
        if self._lookups > TIMED and self._lookups % TIMED:
            entry = self._cache.get(key)
        else:
            entry = self._look_timed(key)
        if entry is not None:
            self._count_hit()
        return entry

    def enter(self, key: bytes) -> bool:
        """The key was not found and will now be run, until `leave`. False: its like is under way."""
        if key in self._running:
            return False
        self._running[key] = None
        self._count_miss()
        return True

    def keep(
        self,
        key: bytes,
        form: Form,
        memory: Iterable[Memory],
        parameters: tuple[tuple[str, object], ...] = (),
    ) -> None:
        """What was answered; copied."""
        self._kept += 1
        if self._kept > TIMED and self._kept % TIMED:
            self._cache.put(key, form, memory, parameters)
            return
        began_ns = time.monotonic_ns()
        self._cache.put(key, form, memory, parameters)
        took_ns = (1 if self._kept <= TIMED else TIMED) * (time.monotonic_ns() - began_ns)
        self._cache.insertion_ns += took_ns
        self._tally.miss.ns += took_ns

    def keep_response(self, key: bytes, response: InferResponse) -> None:
        """The same of a response."""
        outputs = response.outputs
        form = tuple([(name, tensor.dtype.code, tensor.shape) for name, tensor in outputs.items()])
        memory = [tensor.data for tensor in outputs.values()]
        self.keep(key, form, memory, tuple(response.parameters.items()))

    def leave(self, key: bytes) -> None:
        """It was answered, failed, or was given up."""
        for tell in self._running.pop(key) or ():
            tell()

    async def drain(self) -> None:
        if isinstance(self.inner, Door):
            await self.inner.drain()

    def close(self) -> None:
        self._cache.forget(self.keys.prefix)
        if isinstance(self.inner, Door):
            self.inner.close()

    def _look_timed(self, key: bytes) -> Entry | None:
        began_ns = time.monotonic_ns()
        entry = self._cache.get(key)
        now_ns = time.monotonic_ns()
        weight = 1 if self._lookups <= TIMED else TIMED
        self._cache.lookup_ns += weight * (now_ns - began_ns)
        self._tally.looked(now_ns - began_ns, weight, hit=entry is not None)
        self._tally.last_ns = now_ns
        return entry

    def _count_hit(self) -> None:
        self._tally.hit.count += 1
        self._cache.hits += 1

    def _count_miss(self) -> None:
        self._tally.miss.count += 1
        self._cache.misses += 1

    async def _until_left(self, key: bytes) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tellers = self._running[key]
        if tellers is None:
            tellers = self._running[key] = []
        tellers.append(lambda: None if waiter.done() else waiter.set_result(None))
        await waiter

    async def _run(self, key: bytes, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        """Ask for everybody who comes with the same meanwhile."""
        try:
            response = await self._pass(engine, version, request)
            self.keep_response(key, response)
            return response
        finally:
            self.leave(key)

    async def _ask(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        self._count_miss()
        return await self._pass(engine, version, request)

    async def _pass(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        if isinstance(self.inner, Door):
            return await self.inner.infer(engine, version, request)
        return await run_on_lane(self.inner, version, request)


def respond(entry: Entry) -> InferResponse:
    """What is kept as a response; its memory stays."""
    form, memory, parameters, _ = entry
    outputs = {
        name: Tensor(DTYPE_BY_CODE[code], shape, data)
        for (name, code, shape), data in zip(form, memory, strict=True)
    }
    return InferResponse(outputs, None, dict(parameters))


class Keys:
    """The keys of one loaded version. What requests of a model have in common is written once."""

    def __init__(self) -> None:
        self.prefix = next(_numbers).to_bytes(8, "big")
        self._heads: dict[tuple[object, ...], bytes] = {}

    def of(self, version: Version, request: InferRequest) -> bytes:
        """What makes two requests the same. Their ids, priorities and times do not."""
        inputs = request.inputs
        names = [name for name in version.inputs if name in inputs]
        if len(names) < len(inputs):
            names += sorted(inputs.keys() - names)
        sorts = tuple([_sort(name, inputs[name]) for name in names])
        return content_key(self.head(sorts, request.outputs), [inputs[name].data for name in names])

    def head(self, sorts: tuple[Sort, ...], outputs: tuple[str, ...]) -> bytes:
        """Everything of a key but the bytes of the inputs, which are given in the model's own order. It tells
        how many there are of each: what follows it cannot be read two ways."""
        head = self._heads.get((sorts, outputs))
        if head is None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            text = repr((sorts, outputs)).encode()
            head = self._heads[sorts, outputs] = self.prefix + len(text).to_bytes(4, "big") + text
        return head


def content_key(head: bytes, memory: Sequence[Memory]) -> bytes:
    """The key of requests with this head and these inputs."""
    key = head + b"".join(memory) if sum(map(len, memory)) <= WHOLE_BYTES else b""
    return key or head + b"".join([blake2b(data).digest() for data in memory])


def _sort(name: str, tensor: Tensor) -> Sort:
    data = tensor.data
    return name, tensor.dtype.code, tensor.shape, data.nbytes if isinstance(data, memoryview) else len(data)
