"""Models within a memory budget, over real folders and hooks that only record."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.repository.residency import Residency
from fastserve.repository.version import VersionState
from fastserve.util.model_demand import ModelDemand
from tests.repository.folders import Stage, write_config, write_version

PAIR = """platform: "ensemble"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [ { model_name: "a" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""
WAIT_S = 60.0
Scene = Callable[[Stage], Coroutine[Any, Any, None]]


def models(root: Path, *names: str, **config: Any) -> None:
    for name in names:
        write_config(root, name, **config)
        write_version(root, name, 1)


def play(stage: Stage, scene: Scene) -> None:
    async def run() -> None:
        await stage.repository.open()
        try:
            await asyncio.wait_for(scene(stage), WAIT_S)
        finally:
            await stage.repository.close()
        assert [v for m in stage.catalog.models.values() for v in m.available()] == []
        assert residency(stage).waiters.count == 0

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; `play` ends what never comes."""
    while not true():
        await asyncio.sleep(0.001)


def stage(root: Path, most: int = 2, **settings: Any) -> Stage:
    """A repository with room for `most` models."""
    return Stage(root, memory_budget=f"{most * 64 + 32}MiB", keep_alive_s=1.0, **settings)


def residency(stage: Stage) -> Residency:
    assert stage.repository.residency is not None
    return stage.repository.residency


def loaded(stage: Stage) -> list[str]:
    return sorted(name for name in stage.catalog.models if stage.served(name))


async def want(stage: Stage, name: str) -> None:
    """Ask for a model as a request does, and let its keep-alive pass."""
    stage.clock.now += 2.0
    await stage.repository.want(name)
    stage.hooks.last_used[name] = stage.clock.now
    stage.clock.now += 2.0


def test_the_start_loads_as_many_as_there_is_room_for(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c", "d")

    async def scene(stage: Stage) -> None:
        assert loaded(stage) == ["a", "b"]
        cold = stage.catalog.models["c"]
        assert [(v.state, v.dormant) for v in cold.versions.values()] == [(VersionState.START, True)]
        assert stage.catalog.ready("c")
        assert stage.catalog.ready("c", 1)
        assert not stage.catalog.ready("c", 2)
        with pytest.raises(ModelDemand, match="c"):
            stage.catalog.explain_absence("c")
        stage.catalog.explain_absence("a")
        stage.catalog.explain_absence("nobody")

    play(stage(tmp_path), scene)


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c", "d")

    async def scene(stage: Stage) -> None:
        await want(stage, "a")
        await want(stage, "c")
        assert loaded(stage) == ["a", "c"]
        assert stage.catalog.ready("b")
        await want(stage, "a")
        await want(stage, "b")
        assert loaded(stage) == ["a", "b"]
        assert residency(stage).evictions == {"b": 1, "c": 1}
        assert residency(stage).used <= residency(stage).budget

    play(stage(tmp_path), scene)


def test_what_another_load_needs_stays(tmp_path: Path) -> None:
    """As steps of an ensemble that is being loaded: they are not in use yet, nor pinned."""
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        await want(stage, "a")
        await want(stage, "b")
        with residency(stage)._hold(["a"]):
            await want(stage, "c")
            assert loaded(stage) == ["a", "c"]
        await want(stage, "b")
        assert loaded(stage) == ["b", "c"]

    play(stage(tmp_path), scene)


def test_keep_loaded_stay(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")
    models(tmp_path, "p", pin=True)

    async def scene(stage: Stage) -> None:
        for name in ("a", "b", "c", "a"):
            await want(stage, name)
            assert loaded(stage) == sorted([name, "p"])
        assert stage.hooks.events.count(("load", "p", 1)) == 1

    play(stage(tmp_path), scene)


def test_keep_loaded_leave_no_room_for_others(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        assert loaded(stage) == ["b", "c"]
        await want(stage, "a")  # there is no saying what it takes before it was loaded
        assert residency(stage).used > residency(stage).budget
        stage.clock.now += 5.0
        await residency(stage).look()
        await until(lambda: loaded(stage) == ["b", "c"])
        with pytest.raises(ServeError, match="needs 64 MiB beside 128 MiB of models that stay") as caught:
            await stage.repository.want("a")
        assert caught.value.kind is Kind.UNAVAILABLE
        assert caught.value.retry_after_s

    play(stage(tmp_path, keep_loaded=("b", "c")), scene)


def test_no_model_in_use_is_unloaded(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        stage.clock.now += 5.0
        stage.hooks.used |= {"a", "b"}
        asked = asyncio.ensure_future(stage.repository.want("c"))
        await asyncio.sleep(0.3)
        assert not asked.done()
        assert loaded(stage) == ["a", "b"]
        stage.hooks.used.discard("b")
        await asked
        assert loaded(stage) == ["a", "c"]

        asked = asyncio.ensure_future(stage.repository.want("b"))
        await asyncio.sleep(0.3)
        assert not asked.done()  # c has come just now, and a is in use
        stage.clock.now += 100.0
        stage.hooks.used |= {"c"}
        with pytest.raises(ServeError, match="no room for model b: every model in memory is in use"):
            await asked

    play(stage(tmp_path), scene)


def test_many_requests_share_one_load(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        stage.clock.now += 5.0
        gate = stage.hooks.gates["c", 1] = asyncio.Event()
        asked = [asyncio.ensure_future(stage.repository.want("c")) for _ in range(64)]
        await until(lambda: residency(stage).waiters.count == 64)
        with pytest.raises(ServeError, match="64 requests wait for models") as caught:
            await stage.repository.want("c")
        assert caught.value.kind is Kind.UNAVAILABLE
        gate.set()
        await asyncio.gather(*asked)
        assert stage.hooks.events.count(("load", "c", 1)) == 1

    play(stage(tmp_path, load_waiting=64), scene)


def test_a_request_waits_for_a_load_no_longer_than_its_time(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        stage.clock.now += 5.0
        gate = stage.hooks.gates["c", 1] = asyncio.Event()
        with pytest.raises(ServeError, match=r"model c was not loaded within 0\.1 s"):
            await stage.repository.want("c")
        gate.set()
        await stage.repository.want("c")
        assert stage.hooks.events.count(("load", "c", 1)) == 1

    play(stage(tmp_path, load_wait_s=0.1), scene)


def test_a_failed_load_answers_all_and_backs_off(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        stage.clock.now += 5.0
        stage.hooks.failing.add(("c", 1))
        asked = [stage.repository.want("c") for _ in range(16)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert {str(error) for error in told} == {"model c could not be loaded: version 1: the model says no"}
        for _ in range(5):
            with pytest.raises(ServeError, match="the model says no") as caught:
                await stage.repository.want("c")
            assert caught.value.retry_after_s
        assert stage.hooks.events.count(("load", "c", 1)) == 1
        assert not stage.catalog.ready("c")
        assert residency(stage).used <= residency(stage).budget
        assert len(loaded(stage)) == 1  # one has made room

        stage.hooks.failing.clear()
        stage.clock.now += 2.0
        await stage.repository.want("c")
        assert "c" in loaded(stage)
        assert stage.catalog.models["c"].error is None

    play(stage(tmp_path), scene)


def test_an_abandoned_load_unloads_nobody(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        stage.hooks.used |= {"a", "b"}
        asked = asyncio.ensure_future(stage.repository.want("c"))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        stage.hooks.used.clear()
        stage.clock.now += 5.0
        await asyncio.sleep(0.3)
        assert loaded(stage) == ["a", "b"]
        assert stage.hooks.events.count(("load", "c", 1)) == 0

    play(stage(tmp_path), scene)


def test_an_ensemble_comes_with_its_steps_and_goes_before_them(tmp_path: Path) -> None:
    models(tmp_path, "b", "c", "a")
    (tmp_path / "pair" / "1").mkdir(parents=True)
    (tmp_path / "pair" / "config.pbtxt").write_text(PAIR)

    async def scene(stage: Stage) -> None:
        await want(stage, "b")
        await want(stage, "c")
        assert loaded(stage) == ["b", "c"]
        assert stage.catalog.ready("pair")
        await want(stage, "pair")
        assert {"a", "pair"} <= set(loaded(stage))
        stage.hooks.events.clear()
        await want(stage, "c")
        await want(stage, "b")
        assert loaded(stage) == ["b", "c"]
        gone = [event for event in stage.hooks.events if event[0] == "unload" and event[1] in ("a", "pair")]
        assert gone == [("unload", "pair", 1), ("unload", "a", 1)]
        assert stage.catalog.ready("pair")

    play(stage(tmp_path), scene)


def test_folders_that_change_while_their_model_is_not_in_memory(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c", "d")

    async def scene(stage: Stage) -> None:
        cold = stage.catalog.models["d"]
        write_version(tmp_path, "d", 2)
        await stage.repository._apply_watched(stage.repository._layout.scan()["d"])
        assert {n: v.dormant and v.state.name for n, v in cold.versions.items()} == {1: "END", 2: "START"}
        write_config(tmp_path, "d", max_batch_size=-1)
        await stage.repository._apply_watched(stage.repository._layout.scan()["d"])
        assert not stage.catalog.ready("d")
        write_config(tmp_path, "d", version_policy="all")
        await stage.repository._apply_watched(stage.repository._layout.scan()["d"])
        stage.clock.now += 5.0
        await stage.repository.want("d")
        assert stage.served("d") == [1, 2]

    play(stage(tmp_path, 3), scene)


def test_models_that_have_grown_are_unloaded(tmp_path: Path) -> None:
    models(tmp_path, "a", "b")

    async def scene(stage: Stage) -> None:
        await want(stage, "a")
        stage.clock.now += 5.0
        stage.hooks.sizes["a"] = 120 << 20
        await residency(stage).look()
        await until(lambda: loaded(stage) == ["a"])
        assert residency(stage).used == 120 << 20

    play(stage(tmp_path), scene)


def test_clients_load_and_unload_within_the_budget(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c", "d")

    async def scene(stage: Stage) -> None:
        assert loaded(stage) == []
        for name in ("a", "b", "c"):
            await stage.repository.load(name)
            stage.clock.now += 2.0
        assert loaded(stage) == ["b", "c"]
        await stage.repository.want("a")
        assert loaded(stage) == ["a", "c"]
        await stage.repository.unload("b")
        await stage.repository.unload("a")
        assert not stage.catalog.ready("a")
        assert not stage.catalog.ready("b")
        assert not stage.catalog.ready("d")
        stage.catalog.explain_absence("a", "b", "d")  # nobody may want what clients have unloaded

    play(stage(tmp_path, model_control="explicit"), scene)


def test_a_look_at_unchanged_folders_makes_no_model_young_and_loads_nothing(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        for name in ("a", "b"):
            await want(stage, name)
        events = list(stage.hooks.events)
        applied: list[str] = []
        apply = stage.repository._reconciler.apply

        async def note(folder: Any, **options: Any) -> list[str]:
            applied.append(folder.name)
            return await apply(folder, **options)

        stage.repository._reconciler.apply = note  # type: ignore[method-assign]
        laid: list[str] = []
        residency(stage).lay_down = lambda folder: laid.append(folder.name)  # type: ignore[method-assign]
        ages = {name: one.since_s for name, one in residency(stage)._residents.items()}
        await look(stage)
        assert (applied, laid) == (["a", "b"], [])
        assert stage.hooks.events == events
        assert {name: one.since_s for name, one in residency(stage)._residents.items()} == ages

    play(stage(tmp_path), scene)


def test_a_look_sees_a_model_that_is_not_in_memory_change(tmp_path: Path) -> None:
    models(tmp_path, "a", "b", "c")

    async def scene(stage: Stage) -> None:
        write_version(tmp_path, "c", 2)
        await look(stage)
        assert [v.number for v in stage.catalog.models["c"].versions.values() if v.dormant] == [1, 2]
        shutil.rmtree(tmp_path / "c")
        await look(stage)
        assert not stage.catalog.models["c"].on_demand

    play(stage(tmp_path), scene)


async def look(stage: Stage) -> None:
    """Look at the folders as the watch does, and apply the changes."""
    repository = stage.repository
    repository._start_changes(repository._layout.scan())
    await asyncio.gather(*repository._tasks)
