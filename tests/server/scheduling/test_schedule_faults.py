"""Schedules under load and under faults, in a whole server: priorities, the rate limiter, ensembles."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import numpy as np
import pytest

from fastserve.engine.counters import counts_of
from fastserve.errors import DeadlineError, Kind, ServeError
from tests.server.rig import HOLD, KILL, Served, ask_one, release, run, seen, serving, write_model
from tests.server.scheduling import test_ensembles as ensembles
from tests.server.scheduling import test_priorities as priorities

RELAYED = True
LATE = """
  priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1000 } } }
input"""


def write_slow(folder: Path, config: str = priorities.CONFIG) -> Path:
    model = folder / "slow"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    (model / "1" / "model.py").write_text(priorities.SOURCE)
    return model


def test_late_ones_wait_behind_those_in_time(tmp_path: Path) -> None:
    folder = write_slow(tmp_path, priorities.CONFIG.replace("max_queue_size: 2 } }\ninput", "}" + LATE))

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = at.server.catalog.available("slow")
            assert version is not None
            order: list[int] = []
            asking = [asyncio.ensure_future(priorities.ask(at, 0, order))]
            await at.until((folder / "begun").exists)
            asking += [asyncio.ensure_future(priorities.ask(at, n, order, 1)) for n in (1, 2)]
            await at.until(lambda: counts_of(version).pending == 2)
            late = time.monotonic() + 0.05
            await at.until(lambda: time.monotonic() > late)
            asking += [asyncio.ensure_future(priorities.ask(at, n, order, p)) for n, p in ((3, 2), (4, 1))]
            await at.until(lambda: counts_of(version).pending == 4)
            (folder / "go").touch()
            await asyncio.gather(*asking)
            assert order[0] == 0
            assert order.index(4) < order.index(3), "a level above goes first"
            assert sorted(order) == [0, 1, 2, 3, 4], "late ones are not turned away"
            assert order.index(2) > order.index(1)
            assert counts_of(version).queue.ns > 2 * 50_000_000, "what two of them waited before their batch"

    run(work())


def test_everybody_is_answered_once_under_load(tmp_path: Path) -> None:
    """Levels, a queue that overflows, times that run out and clients that leave: the counts add up."""
    folder = write_slow(tmp_path, priorities.CONFIG.replace("max_queue_size: 2", "max_queue_size: 30"))
    (folder / "go").touch()
    rng = random.Random(5)

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = at.server.catalog.available("slow")
            assert version is not None

            async def one(number: int) -> str:
                order: list[int] = []
                timeout_us = rng.choice([0, 0, 500, 50_000_000])
                begun: list[int] = []

                async def asking() -> None:
                    begun.append(number)
                    await priorities.ask(at, number, order, rng.randrange(3), timeout_us)

                task = asyncio.ensure_future(asking())
                if rng.random() < 0.2:
                    asyncio.get_running_loop().call_later(rng.random() / 50, task.cancel)
                try:
                    await task
                except ServeError as error:
                    return error.message.removeprefix("[request id: <id_unknown>] ")
                except asyncio.CancelledError:
                    return "left" if begun else "never came"
                assert order == [number]
                return "answered"

            found: list[str] = []
            for first in range(0, 300, 60):
                found += await asyncio.gather(*(one(n) for n in range(first, first + 60)))
            await at.until(lambda: counts_of(version).pending == 0)
            await at.until(at.is_clean)
            full, late = "Exceeds maximum queue size", "Request timeout expired"
            assert (
                {"answered", "left", full, late}
                <= set(found)
                <= {"answered", "left", full, late, "never came"}
            )
            counts = counts_of(version)
            ends = {reason: took.count for reason, took in counts.failures.items()}
            refused, left = found.count(full) + found.count(late), found.count("left")
            served = counts.success.count
            if at.engine is at.server.front.engine:
                assert ends["REJECTED"] == refused
                assert served + ends["CANCELED"] == found.count("answered") + left
            else:  # a client may leave while its answer or its request is on its way
                assert 0 <= ends["REJECTED"] - refused <= left
                assert 0 <= served - found.count("answered") <= left
                assert served + ends["CANCELED"] + ends["REJECTED"] <= len(found)
            assert (ends["BACKEND"], ends["OTHER"]) == (0, 0)

    run(work())


LIMITED = """
backend: "python"
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 rate_limiter { resources [ { name: "r" count: 1 } ] } } ]
"""
DIES = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        if any(x.ravel()[0] < 0 for x in found):
            os._exit(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]) for x in found]
"""


def test_a_worker_that_dies_gives_its_resources_back(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(LIMITED)
        (tmp_path / name / "1" / "model.py").write_text(DIES)

    async def work() -> None:
        async with serving(tmp_path, rate_limit="execution_count") as at:
            asking = [
                asyncio.ensure_future(ask_one(at, "one", -1)),
                asyncio.ensure_future(ask_one(at, "two", 2)),
            ]
            found = await asyncio.gather(*asking, return_exceptions=True)
            assert isinstance(found[0], ServeError)
            assert (found[0].kind, found[1]) == (Kind.UNAVAILABLE, 2)
            assert await ask_one(at, "two", 3) == 3
            one = at.server.catalog.available("one")
            assert one is not None
            await at.until(lambda: at.server.host.alive(one) == 1)
            assert await ask_one(at, "one", 4) == 4
            await at.server.repository.unload("one")
            assert await ask_one(at, "two", 5) == 5

    run(work())


def write_two_steps(folder: Path) -> None:
    ensembles.write_ensemble(folder)
    write_model(folder, "twice")
    write_model(folder, "other", parameters={"add": 1})


async def ask_ensemble(at: Served, number: float, deadline_ns: int = 0) -> list[float]:
    version = at.server.catalog.available("ens")
    assert version is not None
    request = ensembles.request(number, 1.0)
    request.deadline_ns = deadline_ns
    response = await at.engine.infer(version, request)
    try:
        return np.frombuffer(response.outputs["y"].data, np.float32).tolist()
    finally:
        response.release()


def test_a_client_that_leaves_an_ensemble_stops_it_where_it_is(tmp_path: Path) -> None:
    write_two_steps(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            asking = asyncio.ensure_future(ask_ensemble(at, HOLD))
            await at.until(lambda: len(seen(tmp_path)) == 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await at.until(lambda: not any(getattr(at.engine, "holds", ())))  # until the owner knows
            release(tmp_path)
            assert await ask_ensemble(at, 1.0) == [5.0, 5.0]
            assert [2 * HOLD] not in seen(tmp_path), "the second step never ran for it"
            ends = {name: counts_of(at.server.catalog.available(name)).failures for name in ("ens", "twice")}
            assert ends["ens"]["CANCELED"].count == ends["twice"]["CANCELED"].count == 1

    run(work())


def test_a_deadline_holds_for_all_steps_together(tmp_path: Path) -> None:
    write_two_steps(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            with pytest.raises(DeadlineError, match="in ensemble 'ens', the model took longer"):
                await ask_ensemble(at, HOLD, time.monotonic_ns() + 200_000_000)
            passed = time.monotonic_ns()
            release(tmp_path)
            with pytest.raises(DeadlineError, match="in ensemble 'ens', "):
                await ask_ensemble(at, 1.0, passed)
            assert [2.0] not in seen(tmp_path), "the second step of the second one never ran"

    run(work())


def test_a_step_whose_worker_dies_ends_the_request_and_says_where(tmp_path: Path) -> None:
    write_two_steps(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            with pytest.raises(ServeError, match="in ensemble 'ens', the worker process died") as caught:
                await ask_ensemble(at, KILL)
            assert caught.value.kind is Kind.UNAVAILABLE
            twice = at.server.catalog.available("twice")
            assert twice is not None
            await at.until(lambda: at.server.host.alive(twice) == 1)
            assert await ask_ensemble(at, 2.0) == [9.0, 5.0]

    run(work())
