"""Requests that turn out to need no place fill no queue: a hit in the cache, a body that is wrong."""

from __future__ import annotations

from tests.conformance.models import MAX_BATCH, QUEUE_ROWS
from tests.conformance.rig import Rig, is_right
from tests.conformance.ways import Way

TIMES = 2 * QUEUE_ROWS // MAX_BATCH + 1


def test_beside_a_busy_worker(rig: Rig, way: Way, form: str) -> None:
    model = f"{form}-fast"

    async def work() -> None:
        await rig.learn(way, model, 2)
        rig.forget_seen(model)
        rows = [rig.fresh() for _ in range(min(way.most_rows, MAX_BATCH))]
        whole = way.build(model, rows)
        assert is_right(await way.ask(rig, whole), way, rows)
        with rig.holding(model):
            held, waits, value = await way.open(rig), await way.open(rig), rig.fresh_hold()
            held.send(way.build(model, [value], slot=1))
            await rig.until_running(model, value)
            for _ in range(TIMES):
                answer = await way.ask(rig, way.cut(whole))
                assert answer.status != way.status("OK")
                assert "queue" not in answer.text
                assert form != "cached" or is_right(await way.ask(rig, whole), way, rows)
            assert rig.queue(model).ring.rows_left() == QUEUE_ROWS
            row = [rig.fresh()]
            waits.send(way.build(model, row))
            await rig.until(lambda: rig.queue(model).waiting == 2)
        assert is_right(await waits.reply(), way, row)
        await held.reply()

    rig.run(work())
