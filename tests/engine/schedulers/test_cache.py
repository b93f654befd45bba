"""The response cache: what is the same, what is kept and for how long, and who waits for whom."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.engine.counters import counters_of, counts_of
from fastserve.engine.engine import SCHEDULER, scheduler_of
from fastserve.engine.schedulers.cache import (
    ENTRY_BYTES,
    LEADERS,
    WHOLE_BYTES,
    CachedScheduler,
    CacheKeys,
    CacheMemory,
    ResponseCache,
)
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.request import InferRequest
from fastserve.tensor import DTYPES, Tensor
from tests.engine.fakes import Answers, House, array, ints, io, run


@pytest.fixture(params=["one process", "shared"], autouse=True)
def kind(request, monkeypatch):
    """Both kinds of cache: of one front process, and of several."""
    if request.param == "shared":
        monkeypatch.setattr(f"{__name__}.make_cache", make_shared)


def make_cache(capacity):
    return ResponseCache(capacity)


def make_shared(capacity):
    memory = CacheMemory(capacity)
    try:
        return memory.open()
    finally:
        memory.close()


class Stage:
    def __init__(self, compute, capacity=1 << 20):
        self.house, self.inner, self.cache = House(), Answers(compute), make_cache(capacity)
        self.house.schedulers.append(self.inner)
        self.version = self.put()

    def put(self, name="m", number=1):
        triton = {"input": [io("a", -1)], "output": [io("b", -1)], "max_batch_size": 8}
        version = self.house.put(name, triton, None, number)
        SCHEDULER.put(version, CachedScheduler(self.cache, self.inner, counters_of(version)))
        return version

    async def ask(self, *values, version=None, outputs=()):
        request = InferRequest({"a": ints(*values)}, outputs)
        response = await self.house.engine.infer(version or self.version, request)
        try:
            return array(response.outputs["b"]).ravel().tolist()
        finally:
            response.release()


def double(x):
    return {"b": x["a"] * 2}


def test_hits_are_copies_and_ids_do_not_matter():
    async def work():
        at = Stage(double)
        assert [await at.ask(3) for _ in range(3)] == [[6]] * 3
        assert len(at.inner.asked) == 1
        assert at.house.all_released()
        counts = counts_of(at.version)
        assert (counts.cache_hit.count, counts.cache_miss.count) == (at.cache.hits, at.cache.misses) == (2, 1)
        assert counts.cache_hit.ns > 0
        assert counts.cache_miss.ns > 0
        assert counts.success == counts.cache_hit, "nothing else was answered by a queue"
        await at.ask(4)
        await at.ask(3, outputs=("b",))
        await at.ask(3, version=at.put(number=2))
        assert len(at.inner.asked) == 4

    run(work())


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 2000))
def test_keys_are_the_same_for_the_same_and_no_other(left, right, pad):
    cache, keys, version = (
        ResponseCache(1),
        CacheKeys(),
        House().put("m", {"input": [io("a", -1)], "output": [io("b", -1)]}, None),
    )

    def key(data):
        tensor = Tensor(DTYPES["uint8"], (len(data),), memoryview(data))
        request = InferRequest({"a": tensor}, request_id=str(len(left)), priority=pad)
        return cache.key(*keys.of(version, request))

    left, right = left + bytes(pad), right + bytes(pad)
    assert (key(left) == key(right)) == (left == right)
    other = cache.key(*keys.of(version, InferRequest({"a": Tensor(DTYPES["int8"], (len(left),), left)})))
    assert other != key(left)


def test_the_least_recently_used_goes_first():
    async def work():
        at = Stage(double, capacity=3 * (ENTRY_BYTES + 60))
        for value in (1, 2, 3, 1, 4):  # 4 takes the place of 2
            await at.ask(value)
        assert (len(at.cache), at.cache.evictions) == (3, 1)
        at.inner.asked.clear()
        for value in (1, 3, 4):
            await at.ask(value)
        assert not at.inner.asked
        await at.ask(2)
        assert len(at.inner.asked) == 1
        await at.ask(*range(2000))  # larger than everything
        assert 0 < at.cache.used <= at.cache.capacity
        scheduler_of(at.version).close()
        assert (len(at.cache), at.cache.used) == (0, 0)

    run(work())


def test_one_runs_and_its_likes_wait():
    async def work():
        go = asyncio.Event()

        async def slow(x):
            await go.wait()
            return double(x)

        at = Stage(slow)
        asking = [asyncio.ensure_future(at.ask(5)) for _ in range(4)]
        await asyncio.sleep(0)
        asking[1].cancel()
        go.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [f for f in found if f == [10]] == [[10]] * 3
        assert len(at.inner.asked) == 1
        assert at.house.all_released()

    run(work())


@pytest.mark.parametrize("how", ["error", "cancel"])
def test_errors_and_clients_that_leave_are_not_shared(how):
    async def work():
        go, first = asyncio.Event(), True

        async def fail_once(x):
            nonlocal first
            mine, first = first, False
            await go.wait()
            if mine:
                raise ServeError(Kind.INTERNAL, "kaboom")
            return double(x)

        at = Stage(fail_once)
        leader = asyncio.ensure_future(at.ask(5))
        others = [asyncio.ensure_future(at.ask(5)) for _ in range(3)]
        await asyncio.sleep(0)
        if how == "cancel":
            leader.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else ServeError):
            await leader
        assert await asyncio.gather(*others) == [[10]] * 3
        assert await at.ask(5) == [10]
        assert len(at.inner.asked) == 2, "one of those that waited ran, and for all of them"
        assert at.house.all_released()

    run(work())


@pytest.mark.parametrize("asked", [4, 64])
def test_a_model_that_fails_is_not_waited_for_without_end(asked):
    async def work():
        running = most = 0

        async def fail(x):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            raise ServeError(Kind.INTERNAL, "kaboom")

        at = Stage(fail)
        found = await asyncio.gather(*(at.ask(5) for _ in range(asked)), return_exceptions=True)
        assert [str(one) for one in found] == ["kaboom"] * asked
        assert len(at.inner.asked) == asked
        assert most == max(asked - LEADERS, 1), "the first ones after each other, the rest at once"
        assert not at.cache.waiting()

    run(work())


def test_who_waits_has_its_own_deadline():
    async def work():
        go = asyncio.Event()

        async def slow(x):
            await go.wait()
            return double(x)

        at = Stage(slow)
        leader = asyncio.ensure_future(at.ask(5))
        await asyncio.sleep(0)
        for deadline_ns in (1, time.monotonic_ns() + 20_000_000):
            with pytest.raises(DeadlineError) as fault:
                await at.house.engine.infer(at.version, InferRequest({"a": ints(5)}, deadline_ns=deadline_ns))
            assert fault.value.queued
        go.set()
        assert await leader == [10]
        assert len(at.inner.asked) == 1

    run(work())


def test_parameters_count_where_the_model_sees_them():
    keys, told = CacheKeys(), []
    for backend in ("python", "triton_python"):
        version = House().put("m", {"input": [io("a", -1)], "output": [io("b", -1)]}, None)
        version.config = msgspec.structs.replace(version.config, backend=backend)
        requests = [InferRequest({"a": ints(5)}, parameters=one) for one in ({}, {"k": 1}, {"k": 2})]
        told.append(len({keys.of(version, request)[0] for request in requests}))
    assert told == [1, 3]


@pytest.mark.parametrize("nbytes", [0, 8, WHOLE_BYTES, WHOLE_BYTES + 1])
def test_memory_has_the_key_of_the_request_it_came_from(nbytes):
    """However an input came, and in whatever order."""
    keys, data = CacheKeys(), bytes(range(256)) * 5
    version = House().put("m", {"input": [io("x", -1), io("a", -1)], "output": [io("b", -1)]}, None)
    tensors = {name: Tensor(DTYPES["uint8"], (1, nbytes), data[:nbytes]) for name in ("a", "x")}
    sorts = tuple((name, DTYPES["uint8"].code, (1, nbytes), nbytes) for name in ("x", "a"))
    cache = ResponseCache(1)
    ours = cache.key(keys.head(sorts, ("b",)), [memoryview(bytearray(data[:nbytes]))] * 2)
    assert ours == cache.key(*keys.of(version, InferRequest(tensors, ("b",))))
    assert ours != cache.key(*keys.of(version, InferRequest(tensors)))
    assert ours != cache.key(*CacheKeys().of(version, InferRequest(tensors, ("b",))))


def test_parameters_are_kept_too():
    async def work():
        at = Stage(double)
        answer = at.inner.infer

        async def with_parameters(engine, version, request):
            response = await answer(engine, version, request)
            response.parameters = {"said": 1}
            return response

        at.inner.infer = with_parameters
        for _ in range(2):
            response = await at.house.engine.infer(at.version, InferRequest({"a": ints(3)}))
            assert response.parameters == {"said": 1}
            response.release()
        assert len(at.inner.asked) == 1

    run(work())
