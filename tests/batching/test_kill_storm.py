"""Hardening I7: workers killed at random moments under load. Everybody is answered, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.workers.group import Backoff
from tests.batching import models
from tests.batching.test_batched_service import Service

SIGNALS = (signal.SIGKILL, signal.SIGSEGV)
LONGEST_S = 30.0


async def storm(kills: int, callers: int, seed: int) -> tuple[int, int]:
    """Callers that ask again and again while workers die; (answered well, answered with an error)."""
    rng = random.Random(seed)
    well = badly = 0
    kinds: set[Kind] = set()
    async with Service(models.Echo, size=4, timeout=0.0005, instances=2) as service:
        killing = True

        async def call(first: int) -> None:
            nonlocal well, badly
            number = first
            while killing:
                try:
                    answer: Any = await asyncio.wait_for(service.do_one(number), LONGEST_S)
                except ServeError as error:
                    kinds.add(error.kind)
                    badly += 1
                    await asyncio.sleep(0.001)
                else:
                    assert answer[0] == number, "another caller's answer"
                    well += 1
                number += callers

        tasks = [asyncio.ensure_future(call(n)) for n in range(callers)]
        for _ in range(kills):
            await asyncio.sleep(rng.random() * 0.05)
            while not service._group.alive:  # a worker that is back answers who still waits
                await asyncio.sleep(0.01)
            os.kill(rng.choice([pid for pid in service._group.pids if pid]), rng.choice(SIGNALS))
        while not service._group.alive or well <= callers:  # on a busy machine nobody was answered so far
            await asyncio.sleep(0.01)
        killing = False
        await asyncio.gather(*tasks)
        assert await service.settled()
        queue = service._batcher.queue
        assert (queue.waiting, queue.unreleased) == (0, 0)
        assert kinds <= {Kind.UNAVAILABLE}
    return well, badly


def test_workers_die_under_load():
    well, _ = asyncio.run(asyncio.wait_for(storm(6, 16, 3), 60))
    assert well > 16


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(20))
def test_workers_die_under_load_for_long(monkeypatch, seed):
    # Waits that double would reach 30 s: the storm would be a calm, and longer than a caller waits.
    monkeypatch.setattr(Backoff, "cap_s", 0.2)
    well, _ = asyncio.run(asyncio.wait_for(storm(30, 32, seed), 600))
    assert well > 32
