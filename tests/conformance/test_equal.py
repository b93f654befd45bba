"""The fast path and the general one give equal bytes, and a fast path takes what it is there for."""

from __future__ import annotations

import re

from tests.conformance.models import OWN, PATHS, WRONG
from tests.conformance.rig import Rig, is_right
from tests.conformance.ways import Sent, Way

# Every error has an id of its own.
REQUEST_ID = re.compile(rb"(?i)(x-request-id: )[0-9a-f-]+")


def without_id(raw: bytes) -> bytes:
    return REQUEST_ID.sub(rb"\1...", raw)


def of_slow(raw: bytes) -> bytes:
    return without_id(raw).replace(b"-slow", b"-fast")


def good_ones(way: Way, model: str) -> list[Sent]:
    given = [[1.0], [2.0], [3.0, -1.5], [float(n) for n in range(way.most_rows)]]
    return [way.build(model, rows, id=id) for rows in given if len(rows) <= way.most_rows for id in ("", "7")]


def wrong_ones(way: Way, model: str, form: str) -> list[Sent]:
    return [
        way.build(model, [1.0], name="other"),
        way.build(model, [1.0], columns=3),
        way.cut(way.build(model, [1.0])),
        way.build(model, [WRONG]),
        way.build(model, [OWN]) if form in ("whole", "cached") else way.build(model, []),
        way.build(model, [1.0] * 9),
    ]


def test_both_paths_answer_alike(rig: Rig, way: Way, form: str) -> None:
    models = [f"{form}-{path}" for path in PATHS]

    async def work() -> None:
        line = await way.open(rig)
        for fast, slow in zip(*(good_ones(way, model) for model in models), strict=True):
            line.send(slow)
            wanted = await line.reply()
            assert wanted.status == way.status("OK"), wanted
            for _ in range(3):
                line.send(fast)
                assert (await line.reply()).raw == of_slow(wanted.raw)
        line.leave()
        for fast, slow in zip(*(wrong_ones(way, model, form) for model in models), strict=True):
            wanted = await way.ask(rig, slow)
            for _ in range(2):
                found = await way.ask(rig, fast)
                assert (found.status, without_id(found.raw)) == (wanted.status, of_slow(wanted.raw)), (
                    found,
                    wanted,
                )
                assert found.text == wanted.text.replace("-slow", "-fast")

    rig.run(work())


def test_the_fast_path_takes_what_it_has_met(rig: Rig, way: Way, form: str) -> None:
    async def work() -> None:
        fast, slow = f"{form}-fast", f"{form}-slow"
        rig.forget_learned()  # what an endpoint knows is bounded, and other tests have asked it since
        await rig.learn(way, fast)
        for model, takes in ((fast, form in way.fast), (slow, False)):
            before, rows = rig.general, [5.0]
            assert is_right(await way.ask(rig, way.build(model, rows)), way, rows)
            assert (rig.general == before) == takes

    rig.run(work())
