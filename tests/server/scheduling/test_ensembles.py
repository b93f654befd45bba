"""Ensembles in a whole server: real workers below, and models that come and go under them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.errors import ServeError
from fastserve.repository.version import VersionState
from fastserve.request import InferRequest
from fastserve.tensor import DTYPES, Tensor
from tests.server.rig import HOLD, Served, release, run, seen, serving, write_model

RELAYED = True
STEP = """
{ model_name: "%s" model_version: -1
  input_map { key: "x" value: "%s" } output_map { key: "y" value: "%s" } }
"""
CONFIG = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ %s ] }
"""
STEPS = (("twice", "x", "m"), ("other", "m", "y"))


def write_ensemble(folder: Path, steps: tuple[tuple[str, str, str], ...] = STEPS) -> None:
    (folder / "ens" / "1").mkdir(parents=True)
    (folder / "ens" / "config.pbtxt").write_text(CONFIG % ",".join(STEP % step for step in steps))


def request(*numbers: float) -> InferRequest:
    return InferRequest({"x": Tensor(DTYPES["float32"], (1, 2), np.array(numbers, np.float32).tobytes())})


async def ask(at: Served, name: str, *numbers: float) -> list[float]:
    version = at.server.catalog.available(name)
    assert version is not None
    response = await at.engine.infer(version, request(*numbers))
    try:
        return list(np.frombuffer(response.outputs["y"].data, np.float32))
    finally:
        response.release()


def test_an_ensemble_follows_its_models(tmp_path: Path) -> None:
    write_ensemble(tmp_path)
    write_model(tmp_path, "twice")
    write_model(tmp_path, "other", parameters={"add": 1})

    async def work() -> None:
        async with serving(tmp_path) as at:
            server = at.server
            assert await ask(at, "ens", 1.0, 2.0) == [5.0, 9.0]
            assert server.host.alive(server.catalog.available("ens")) == 1
            held = asyncio.ensure_future(ask(at, "ens", HOLD, 1.0))
            await at.until(lambda: len(seen(tmp_path)) == 3)
            going = asyncio.ensure_future(server.repository.unload("other"))
            await at.until(lambda: server.catalog.available("ens") is None)
            release(tmp_path)
            assert await held == [2 * 2 * HOLD + 1, 5.0]  # what was under way goes through all its steps
            await going
            ens = server.catalog.models["ens"].versions[1]
            await at.until(lambda: ens.state is VersionState.END)
            assert ens.error is not None
            assert ens.error.message == "ensemble 'ens' depends on 'other' which has no loaded version"
            await server.repository.load("other")
            await at.until(lambda: server.catalog.available("ens") is not None)
            assert await ask(at, "ens", 1.0, 2.0) == [5.0, 9.0]

    run(work())


@pytest.mark.parametrize("at_start", [True, False], ids=["at the start", "later"])
def test_loading_an_ensemble_loads_its_models(tmp_path: Path, at_start: bool) -> None:
    write_ensemble(tmp_path)
    for name in ("twice", "other", "apart"):
        write_model(tmp_path, name)

    async def work() -> None:
        async with serving(tmp_path, load_models=("ens",) if at_start else ()) as at:
            if not at_start:
                await at.server.repository.load("ens")
            assert await ask(at, "ens", 1.0, 2.0) == [4.0, 8.0]
            assert at.server.catalog.available("apart") is None

    run(work())


def test_unloading_an_ensemble_with_its_models_leaves_those_others_serve_with(tmp_path: Path) -> None:
    write_ensemble(tmp_path)
    write_model(tmp_path, "twice")
    write_model(tmp_path, "other")
    second = tmp_path / "second"
    (second / "1").mkdir(parents=True)
    (second / "config.pbtxt").write_text(CONFIG % (STEP % ("twice", "x", "y")))

    async def work() -> None:
        async with serving(tmp_path, load_models=("ens", "second")) as at:
            catalog = at.server.catalog
            await at.server.repository.unload("ens", composing=True)
            assert catalog.available("other") is None
            assert await ask(at, "second", 1.0, 2.0) == [2.0, 4.0]
            await at.server.repository.unload("second")
            assert catalog.available("twice") is not None
            await at.server.repository.load("ens")
            await at.server.repository.unload("ens", composing=True)
            assert [catalog.available(name) for name in ("ens", "twice", "other")] == [None] * 3

    run(work())


@pytest.mark.parametrize("started", [("*",), ("ens", "twice")], ids=["all", "by name"])
def test_unloading_an_ensemble_with_its_models_leaves_those_loaded_by_themselves(
    tmp_path: Path, started: tuple[str, ...]
) -> None:
    """At the start, or by a load of their own before the ensemble's. A load of one that is there already and
    unchanged leaves it as it came; so does Triton 2.51, which was asked."""
    write_ensemble(tmp_path)
    write_model(tmp_path, "twice")
    write_model(tmp_path, "other")

    async def work() -> None:
        async with serving(tmp_path, load_models=started) as at:
            repository, names = at.server.repository, ("ens", "twice", "other")

            async def unload(*left: str) -> None:
                await repository.unload("ens", composing=True)
                assert [name for name in names if at.server.catalog.available(name)] == [*left]

            await unload(*(("twice", "other") if started == ("*",) else ("twice",)))
            for name in names[1:]:
                if at.server.catalog.available(name):
                    await repository.unload(name)
            await repository.load("other")
            await repository.load("ens")  # brings one along
            await unload("other")
            await repository.load("ens")
            await unload("other")
            await repository.unload("other")
            await repository.load("ens")
            await repository.load("other")
            await unload()
            await repository.load("ens")
            write_model(tmp_path, "other", max_queue_delay_us=1)
            await repository.load("other")  # which is another one
            await unload("other")

    run(work())


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ((STEPS[0], ("no", "m", "y")), "depends on 'no' which has no loaded version"),
        ((STEPS[0], ("ens", "m", "y")), "circular dependency between ensembles: ens -> ens"),
    ],
)
def test_an_ensemble_that_cannot_be(tmp_path: Path, steps: Any, text: str) -> None:
    write_ensemble(tmp_path, steps)
    write_model(tmp_path, "twice")

    async def work() -> None:
        with pytest.raises(ServeError, match=text):
            async with serving(tmp_path):
                pass

    run(work())
