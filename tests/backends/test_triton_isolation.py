"""One bad request in a list that execute() raised for: it fails, the others see fresh inputs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastserve.errors import ServeError
from tests.backends.triton_rig import entry, model, run, serving

NUMBERS = [1, 2, -1, 3, 4, -2, 5]


@pytest.mark.parametrize(
    ("more", "alone"),
    [({}, True), ({"parameters": {"isolate_failures": {"string_value": "false"}}}, False)],
)
def test_a_bad_request_fails_only_itself(tmp_path, more: dict[str, Any], alone: bool):
    ins, outs = [entry("IN", "TYPE_INT64", 1)], [entry("OUT", "TYPE_INT64", 1)]
    parameters = {name: value["string_value"] for name, value in more.get("parameters", {}).items()}

    async def work() -> None:
        async with serving(
            tmp_path, model("picky", ins, outs, max_batch_size=8, **more), parameters=parameters
        ) as at:
            first = asyncio.ensure_future(at.ask("picky", {"IN": [[1000]]}))
            lane = at.lane("picky")
            while lane.ring.pending() or not lane.waiting:
                await asyncio.sleep(0.001)
            asked = [at.ask("picky", {"IN": [[number]]}) for number in NUMBERS]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert (await first)["OUT"].tolist() == [[2000]]
            for number, answer in zip(NUMBERS, answers, strict=True):
                if number < 0 or not alone:
                    assert isinstance(answer, ServeError)
                    assert "a number below zero" in str(answer)
                else:
                    assert answer["OUT"].tolist() == [[2 * number]], "doubled once"

    run(work())
