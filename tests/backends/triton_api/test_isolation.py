"""One bad request in a list that execute() raised for: it fails, the others see fresh inputs."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from fastserve.errors import ServeError
from tests.backends.triton_api.rig import Served, entry, model, run, serving, until

SLOW = 1000
NUMBERS = [1, 2, -1, 3, 4, -2, 5]


async def together(at: Served, name: str, numbers: list[int]) -> tuple[Any, list[Any]]:
    """Answers to a slow request, and to those that gather behind it."""
    first = asyncio.ensure_future(at.ask(name, {"IN": [[SLOW]]}))
    queue = at.queue(name)
    while queue.ring.pending() or not queue.waiting:
        await asyncio.sleep(0.001)
    asked = asyncio.gather(*(at.ask(name, {"IN": [[number]]}) for number in numbers), return_exceptions=True)
    await until(lambda: queue.waiting == 1 + len(numbers))
    (at.version(name).folder / "go").touch()
    return await first, await asked


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
            first, answers = await together(at, "picky", NUMBERS)
            assert first["OUT"].tolist() == [[2000]]
            for number, answer in zip(NUMBERS, answers, strict=True):
                if number < 0 or not alone:
                    assert isinstance(answer, ServeError)
                    assert "a number below zero" in str(answer)
                else:
                    assert answer["OUT"].tolist() == [[2 * number]], "doubled once"

    run(work())


def eager() -> dict[str, Any]:
    return model("eager", [entry("IN", "TYPE_INT64", 1)], [entry("OUT", "TYPE_INT64", 3)], max_batch_size=8)


def test_who_was_answered_before_is_not_run_again(tmp_path) -> None:
    """By its sender, before execute() raised for another."""

    async def work() -> None:
        async with serving(tmp_path, eager()) as at:
            _, (large, good, bad, other) = await together(at, "eager", [500, 1, -1, 2])
            assert large["OUT"].tolist() == [[500, 2, 1]]
            assert "a number below zero" in str(bad)
            for number, answer in ((1, good), (2, other)):
                assert isinstance(answer, dict)
                assert answer["OUT"][0, [0, 2]].tolist() == [number, 1]

    run(work())


def test_a_request_that_failed_alone_is_run_once(tmp_path) -> None:
    async def work() -> None:
        async with serving(tmp_path, eager()) as at:
            with pytest.raises(ServeError, match="a number below zero"):
                await at.ask("eager", {"IN": [[-1]]})
            found = await at.ask("eager", {"IN": [[3]]})
            np.testing.assert_array_equal(found["OUT"], [[3, 2, 0]])

    run(work())
