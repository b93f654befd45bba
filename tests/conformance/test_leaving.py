"""A client that leaves, at every step: nothing stays taken, and the next one is answered.

That of one that waits is in `scenarios.py`.
"""

from __future__ import annotations

from tests.conformance.rig import Rig, is_right
from tests.conformance.steps import at
from tests.conformance.ways import Way


def test_before_its_request_is_whole(rig: Rig, way: Way, form: str, path: str) -> None:
    model = f"{form}-{path}"

    async def work() -> None:
        await rig.learn(way, model)
        line = await way.open(rig)
        line.begin(way.build(model, [rig.fresh()]))
        rows = [rig.fresh()]
        assert is_right(await way.ask(rig, way.build(model, rows, slot=1)), way, rows)
        line.leave()

    rig.run(work())


def test_while_it_is_answered(rig: Rig, way: Way, form: str, path: str) -> None:
    model = f"{form}-{path}"

    async def work(moment: str) -> None:
        await rig.learn(way, model, 2)
        leaver, other = await way.open(rig), await way.open(rig)
        with at(moment, leaver.leave, times=1) as armed:
            leaver.send(way.build(model, [rig.fresh()]))
            await rig.until(lambda: armed.hits)
        rows = [rig.fresh()]
        other.send(way.build(model, rows, slot=1))
        assert is_right(await other.reply(), way, rows)
        other.leave()

    for moment in ("read", "write", "release"):
        rig.run(work(moment))


def test_while_it_runs_the_model_is_told(rig: Rig, way: Way, form: str, path: str) -> None:
    """By `fastserve.cancelled_rows()` and Triton's `request.is_cancelled()`."""
    model = f"{form}-{path}"

    async def work() -> None:
        await rig.learn(way, model)
        held = rig.fresh_hold()
        with rig.holding(model):
            leaver = await way.open(rig)
            leaver.send(way.build(model, [held]))
            await rig.until_running(model, held)
            leaver.leave()
            await rig.until_told(model, held)

    rig.run(work())
