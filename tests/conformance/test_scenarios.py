"""Every scenario, every way: clients are told, everything is given back, and what happened was counted."""

from __future__ import annotations

from tests.conformance import books
from tests.conformance.rig import Rig
from tests.conformance.scenarios import Case, Scenario
from tests.conformance.ways import Way


def test_it_is_played(rig: Rig, scenario: Scenario, way: Way, form: str, path: str) -> None:
    model = f"{form}-{path}"

    async def work() -> None:
        await rig.learn(way, model, 3)
        rig.forget_seen(model)
        before = books.read(rig, way.dialect, model)
        told = await scenario.play(Case(rig, way, model))
        rig.leave()
        await rig.settled()
        wanted = told.counted_of(form)
        found = books.read(rig, way.dialect, model) - before
        assert found == wanted, {
            key: (found[key], wanted[key]) for key in found | wanted if found[key] != wanted[key]
        }

    rig.run(work())
