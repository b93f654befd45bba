"""The ways of arrived_ways.py are what they say: known requests are read out of the socket, once each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastserve.net.http1 import large_bodies
from fastserve.net.http1.large_bodies import ArrivedBody
from tests.conformance.arrived_ways import Arriving
from tests.conformance.rig import Rig, is_right
from tests.conformance.ways import Way


def test_bodies_are_read_out_of_the_socket(rig: Rig, way: Way, form: str, path: str) -> None:
    """Nowhere else, not on the general path, and not where the cache may ask for the bytes again."""
    found: list[bool] = []
    read_into = ArrivedBody.read_into

    def noting(body: ArrivedBody, places: list[memoryview], skip: int = 0) -> bool:
        found.append(read_into(body, places, skip))
        return found[-1]

    async def work() -> None:
        rig.forget_learned()
        model = f"{form}-{path}"
        await rig.learn(way, model)
        line = await way.open(rig)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArrivedBody, "read_into", noting)
            for _ in range(3):
                rows = [rig.fresh() for _ in range(way.most_rows)]
                line.send(way.build(model, rows))
                assert is_right(await line.reply(), way, rows)
        arrives = isinstance(way, Arriving) and path == "fast" and form != "cached" and form in way.fast
        assert found == [True] * (3 * arrives)

    rig.run(work())


def test_nobody_waits_for_a_body_that_is_on_its_way(rig: Rig, way: Way, form: str, path: str) -> None:
    """Apart from its head, and all but its end: no rows are kept for it, so that others' batches run."""
    if not isinstance(way, Arriving):  # the others have no such bodies
        return

    async def work() -> None:
        model = f"{form}-{path}"
        await rig.learn(way, model)
        slow, awaited = await way.open(rig), way.build(model, [rig.fresh()])
        fast = [await way.open(rig) for _ in range(8)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large_bodies, "SIP_BYTES", 1)
            slow.begin(awaited)
            for _ in range(3):
                rows = [rig.fresh() for _ in fast]
                for line, row in zip(fast, rows, strict=True):
                    line.send(way.build(model, [row]))
                for line, row in zip(fast, rows, strict=True):
                    assert is_right(await line.reply(), way, [row])
            slow.send(replace(awaited, data=awaited.data[-4:]))
            assert (await slow.reply()).status == way.status("OK")

    rig.run(work())
