"""The ways of arrived_ways.py are what they say: known requests are read out of the socket, once each."""

from __future__ import annotations

import pytest

from fastserve.wire.arrived import Arrived
from tests.conformance.arrived_ways import Arriving
from tests.conformance.rig import Rig, is_right
from tests.conformance.ways import Way


def test_bodies_are_read_out_of_the_socket(rig: Rig, way: Way, form: str, path: str) -> None:
    """Nowhere else, not on the general path, and not where the cache may ask for the bytes again."""
    found: list[bool] = []
    read_into = Arrived.read_into

    def noting(body: Arrived, places: list[memoryview], skip: int = 0) -> bool:
        found.append(read_into(body, places, skip))
        return found[-1]

    async def work() -> None:
        rig.forget_learned()
        model = f"{form}-{path}"
        await rig.learn(way, model)
        line = await way.open(rig)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Arrived, "read_into", noting)
            for _ in range(3):
                rows = [rig.fresh() for _ in range(way.most_rows)]
                line.send(way.build(model, rows))
                assert is_right(await line.reply(), way, rows)
        arrives = isinstance(way, Arriving) and path == "fast" and form != "cached" and form in way.fast
        assert found == [True] * (3 * arrives)

    rig.run(work())
