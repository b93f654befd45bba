"""A version is loaded anew, one unloaded, under requests: each is answered, and nothing of it stays here."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from tests.conformance.rig import FileId, Rig, file_id
from tests.conformance.scenarios import Asked, Case
from tests.conformance.ways import UNKNOWN, Way


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Memory that is only let go of by a collection of garbage is not let go of."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by_this_process() -> set[FileId]:
    """All files that it has mapped or open."""
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            _, _, _, device, number, *_ = line.split()
            major, minor = device.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(number)))
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(file_id(os.stat(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def test_under_requests(rig: Rig, way: Way) -> None:
    """One model is loaded anew, another is unloaded."""
    anew, ends = "columns-fast", "cached-fast"

    async def under_requests() -> None:
        asked: list[Asked] = []
        async with AsyncExitStack() as stack:
            for slot, model in enumerate((anew, ends)):
                case = Case(rig, way, model, 2 * slot)
                asked.append(await stack.enter_async_context(case.running()))
                asked.append(await case.send())
                await case.waiting(1)
            changing = [asyncio.ensure_future(rig.reload(anew))]
            changing.append(asyncio.ensure_future(rig.server.repository.unload(ends)))
            await asyncio.sleep(0)
        for one in asked:
            assert await one.is_right()
        await asyncio.gather(*changing)

    async def work() -> None:
        if rig.server.catalog.available(ends) is None:  # since the test of another way failed
            await rig.server.repository.load(ends)
        for model in (anew, ends):
            await rig.learn(way, model, 2)
        was = {rig.memory(anew), rig.memory(ends)}
        assert was <= held_by_this_process()
        await under_requests()
        await rig.until(lambda: not was & held_by_this_process())
        answer = await way.ask(rig, way.build(ends, [rig.fresh()]))
        assert way.is_told(answer, UNKNOWN), answer
        await rig.server.repository.load(ends)
        for model in (anew, ends):
            await rig.learn(way, model)
            assert await Case(rig, way, model).is_well()

    rig.run(work())
