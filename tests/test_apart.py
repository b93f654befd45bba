"""Large work goes to a thread, one piece at a time, and is outlasted by whoever asked for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from fastserve.apart import APART_BYTES, Apart


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def where() -> int:
    return threading.get_ident()


def test_only_what_is_large_leaves_the_thread() -> None:
    async def work() -> None:
        apart, here = Apart(), where()
        assert await apart(APART_BYTES - 1, where) == here
        assert await apart(APART_BYTES, where) != here

    run(work())


@pytest.mark.parametrize("nbytes", [0, APART_BYTES])
def test_what_goes_wrong_is_raised(nbytes: int) -> None:
    def fail(text: str, *, more: str) -> None:
        raise KeyError(text + more)

    async def work() -> None:
        with pytest.raises(KeyError, match="ab"):
            await Apart()(nbytes, fail, "a", more="b")

    run(work())


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
        apart, slow = Apart(), Slow()
        tasks = [asyncio.ensure_future(apart(APART_BYTES, slow.work)) for _ in range(4)]
        while not slow.began.is_set():
            await asyncio.sleep(0)
        assert await apart(1, where) == where()
        slow.go.set()
        await asyncio.gather(*tasks)
        assert (slow.most, slow.ended) == (1, 4)

    run(work())


def test_a_caller_that_is_cancelled_waits_for_the_end() -> None:
    """What the work looks at is the caller's to give back. Cancelling twice changes nothing."""

    async def work() -> None:
        apart, slow = Apart(), Slow()
        task = asyncio.ensure_future(apart(APART_BYTES, slow.work))
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
        assert await apart(APART_BYTES, where) != where()

    run(work())
