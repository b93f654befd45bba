"""Large work goes to a thread, one piece at a time, and is outlasted by whoever asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest

from fastserve.util.offload import OFFLOAD_BYTES, Offload


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def where() -> int:
    return threading.get_ident()


def test_only_what_is_large_leaves_the_thread() -> None:
    async def work() -> None:
        offload, here = Offload(), where()
        assert await offload(OFFLOAD_BYTES - 1, where) == here
        assert await offload(OFFLOAD_BYTES, where) != here

    run(work())


@pytest.mark.parametrize("nbytes", [0, OFFLOAD_BYTES])
def test_what_goes_wrong_is_raised(nbytes: int) -> None:
    def fail(text: str, *, more: str) -> None:
        raise KeyError(text + more)

    async def work() -> None:
        with pytest.raises(KeyError, match="ab"):
            await Offload()(nbytes, fail, "a", more="b")

    run(work())


class Body:
    """Something that a weak reference can watch."""


def test_arguments_of_failed_work_are_freed_without_a_collection() -> None:
    def fail(body: Body) -> None:
        raise ValueError(type(body))

    async def refuse(body: Body) -> None:
        with contextlib.suppress(ValueError):
            await Offload()(OFFLOAD_BYTES, fail, body)

    async def work() -> None:
        body = Body()
        watched = weakref.ref(body)
        await refuse(body)
        del body
        await asyncio.get_running_loop().run_in_executor(None, where)  # the thread forgets the work before
        assert watched() is None

    gc.disable()
    try:
        run(work())
    finally:
        gc.enable()


class Slow:
    """Work that ends when it is let go, and knows how many were at it at once."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.at_once = self.most = self.ended = 0

    def work(self) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.began.set()
        assert self.go.wait(60)
        self.at_once -= 1
        self.ended += 1


def test_one_at_a_time_while_the_loop_goes_on() -> None:
    async def work() -> None:
        offload, slow = Offload(), Slow()
        tasks = [asyncio.ensure_future(offload(OFFLOAD_BYTES, slow.work)) for _ in range(4)]
        while not slow.began.is_set():
            await asyncio.sleep(0)
        assert await offload(1, where) == where()
        slow.go.set()
        await asyncio.gather(*tasks)
        assert (slow.most, slow.ended) == (1, 4)

    run(work())


def test_a_caller_that_is_cancelled_waits_for_the_end() -> None:
    """Memory that the work looks at is the caller's to give back. Cancelling twice changes nothing."""

    async def work() -> None:
        offload, slow = Offload(), Slow()
        task = asyncio.ensure_future(offload(OFFLOAD_BYTES, slow.work))
        while not slow.began.is_set():
            await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow.ended == 1
        assert await offload(OFFLOAD_BYTES, where) != where()

    run(work())
