"""Load, poll, unload and reload against real folders and hooks that only record."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.repository.version import VersionState
from fastserve.settings import ModelEntry, PolicyChoice
from tests.repository.folders import Stage, remove_version, write_config, write_version

PAIR = """platform: "ensemble"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ { model_name: "step" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""
Scene = Callable[[Stage], Coroutine[Any, Any, None]]


def play(stage: Stage, scene: Scene) -> None:
    async def run() -> None:
        await stage.repository.open()
        try:
            await scene(stage)
        finally:
            await stage.repository.close()
        assert [v for m in stage.catalog.models.values() for v in m.available()] == []

    asyncio.run(run())


def test_serves_the_latest_version_and_follows_a_new_folder(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)

    async def scene(stage: Stage) -> None:
        assert stage.served("m") == [1]
        assert stage.catalog.available("m", None) is stage.catalog.available("m", 1)
        assert stage.catalog.available("m", 2) is None
        assert stage.catalog.available("other", None) is None
        write_version(tmp_path, "m", 2)
        await stage.repository.poll()
        assert stage.served("m") == [2]
        assert stage.hooks.events == [("load", "m", 1), ("load", "m", 2), ("unload", "m", 1)]
        assert stage.catalog.models["m"].versions[1].state is VersionState.END

    play(Stage(tmp_path), scene)


def test_a_failed_load_keeps_the_old_version_and_is_retried_with_back_off(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)

    async def scene(stage: Stage) -> None:
        stage.hooks.failing.add(("m", 2))
        write_version(tmp_path, "m", 2)
        await stage.repository.poll()
        failed = stage.catalog.models["m"].versions[2]
        assert stage.served("m") == [1]
        assert failed.state is VersionState.END
        assert failed.error is not None
        assert failed.error.message == "the model says no"
        tries = [stage.hooks.events.count(("load", "m", 2))]
        for _ in range(20):  # 1, 2, 4, 8, 16 seconds apart, then no more
            stage.clock.now += 1.0
            await stage.repository.poll()
            tries.append(stage.hooks.events.count(("load", "m", 2)))
        assert tries == [1, 2, 2, 3, 3, 3, 3, 4] + [4] * 7 + [5] * 6
        stage.clock.now += 1000
        await stage.repository.poll()
        await stage.repository.poll()
        assert stage.hooks.events.count(("load", "m", 2)) == 6  # the first try and load_retries of them

        stage.hooks.failing.clear()
        write_version(tmp_path, "m", 2, "class Model:\n    fixed = True\n")
        await stage.repository.poll()  # changed files are tried at once
        assert stage.served("m") == [2]
        assert stage.catalog.models["m"].error is None

    play(Stage(tmp_path), scene)


def test_a_changed_config_loads_a_fresh_instance_and_then_unloads_the_old_one(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)

    async def scene(stage: Stage) -> None:
        old = stage.catalog.available("m")
        write_config(tmp_path, "m", max_batch_size=8)
        await stage.repository.poll()
        new = stage.catalog.available("m")
        assert old is not None
        assert new is not None
        assert new is not old
        assert new.config.max_batch_size == 8
        assert old.state is VersionState.END
        assert stage.hooks.events == [("load", "m", 1), ("load", "m", 1), ("unload", "m", 1)]

        stage.hooks.failing.add(("m", 1))
        write_config(tmp_path, "m", max_batch_size=16)
        await stage.repository.poll()
        assert stage.catalog.available("m") is new
        error = stage.catalog.models["m"].error
        assert error is not None
        assert "the model says no" in error.message

        write_config(tmp_path, "m", max_batch_size=-1)
        await stage.repository.poll()
        assert stage.catalog.available("m") is new
        error = stage.catalog.models["m"].error
        assert error is not None
        assert (
            error.message == "model.yaml: max_batch_size: given -1, allowed: a whole number from 0 to 1048576"
        )

    play(Stage(tmp_path), scene)


def test_policy_and_labels_change_without_a_fresh_instance(tmp_path: Path) -> None:
    write_config(tmp_path, "m", version_policy="all")
    for number in (1, 2, 3):
        write_version(tmp_path, "m", number)

    async def scene(stage: Stage) -> None:
        assert stage.served("m") == [1, 2, 3]
        write_config(tmp_path, "m", version_policy={"specific": [1, 3]}, labels={"stable": 1, "canary": 3})
        await stage.repository.poll()
        assert stage.served("m") == [1, 3]
        assert stage.catalog.labelled("m", "canary") is stage.catalog.available("m", 3)
        assert stage.catalog.labelled("m", "nope") is None
        assert stage.catalog.labelled("other", "stable") is None
        write_config(tmp_path, "m", version_policy={"specific": [1, 3]}, labels={"stable": 2, "canary": 1})
        await stage.repository.poll()
        model = stage.catalog.models["m"]
        assert model.labels == {"stable": 1, "canary": 1}  # 2 is not available: the label stays
        assert model.error is not None
        assert model.error.message == (
            "Request to assign label to version 2 of model m, which is not currently available for inference"
        )
        assert [event for event in stage.hooks.events if event[0] == "load"] == [
            ("load", "m", 3),
            ("load", "m", 2),
            ("load", "m", 1),
        ]

    play(Stage(tmp_path), scene)


def test_a_new_label_may_wait_for_its_version_when_allowed(tmp_path: Path) -> None:
    write_config(tmp_path, "m", labels={"next": 2})
    write_version(tmp_path, "m", 1)

    async def scene(stage: Stage) -> None:
        assert stage.catalog.labelled("m", "next") is None
        write_version(tmp_path, "m", 2)
        await stage.repository.poll()
        assert stage.catalog.labelled("m", "next") is stage.catalog.available("m", 2)

    play(Stage(tmp_path, allow_labels_for_unavailable=True), scene)
    write_config(tmp_path, "m", labels={"next": 9})
    with pytest.raises(ServeError, match="assign label to version 9"):
        play(Stage(tmp_path), scene)


def test_removed_folders_are_unloaded_and_stay_listed(tmp_path: Path) -> None:
    write_config(tmp_path, "m", version_policy="all")
    write_version(tmp_path, "m", 1)
    write_version(tmp_path, "m", 2)

    async def scene(stage: Stage) -> None:
        remove_version(tmp_path, "m", 2)
        await stage.repository.poll()
        assert stage.served("m") == [1]
        shutil.rmtree(tmp_path / "m")
        await stage.repository.poll()
        assert stage.served("m") == []
        assert sorted(stage.catalog.models["m"].versions) == [1, 2]
        assert stage.catalog.models["m"].error is None

    play(Stage(tmp_path), scene)


def test_an_unreadable_root_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_config(root, "m")
    write_version(root, "m", 1)

    async def scene(stage: Stage) -> None:
        os.rename(root, tmp_path / "away")
        with pytest.raises(OSError):
            await stage.repository.poll()
        assert stage.served("m") == [1]

    play(Stage(root), scene)


def test_open_lists_every_failure_and_leaves_nothing_loaded(tmp_path: Path) -> None:
    write_config(tmp_path, "good")
    write_version(tmp_path, "good", 1)
    write_config(tmp_path, "bad", backend="caffe")
    write_version(tmp_path, "bad", 1)
    write_config(tmp_path, "empty")
    stage = Stage(tmp_path, load_models=("*", "absent"))
    with pytest.raises(ServeError) as fault:
        asyncio.run(stage.repository.open())
    assert fault.value.message.splitlines() == [
        "3 model(s) did not become available: absent: there is no such model in the repository",
        'bad: model.yaml: backend: given "caffe", '
        "allowed: python, onnx, torch, tensorflow, sklearn, xgboost, "
        "lightgbm, catboost, treelite, transformers, text, text_python or module:Class",
        "empty: no version that can be loaded: there is no folder with a number for its name, say 1",
    ]
    assert stage.served("good") == []
    assert stage.hooks.events == [("load", "good", 1), ("unload", "good", 1)]

    async def scene(stage: Stage) -> None:
        assert stage.served("good") == [1]

    play(Stage(tmp_path, keep_going=True), scene)


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: a folder that exists, or demo"):
        asyncio.run(Stage(tmp_path / "nowhere").repository.open())


def test_explicit_control_loads_and_unloads_by_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_config(tmp_path, name)
        write_version(tmp_path, name, 1)

    async def scene(stage: Stage) -> None:
        assert (stage.served("a"), stage.served("b")) == ([1], [])
        await stage.repository.load("b")
        await stage.repository.load("b")
        assert stage.hooks.events.count(("load", "b", 1)) == 1
        write_version(tmp_path, "b", 2)
        stage.hooks.failing.add(("b", 2))
        with pytest.raises(ServeError, match="b: version 2: the model says no"):
            await stage.repository.load("b")
        assert stage.served("b") == [1]
        stage.hooks.failing.clear()
        await stage.repository.load("b")  # a call by hand does not wait for a back-off
        assert stage.served("b") == [2]
        await stage.repository.unload("b")
        await stage.repository.unload("b")
        assert stage.served("b") == []
        await stage.repository.poll()
        assert (stage.served("a"), stage.served("b")) == ([1], [])

    play(Stage(tmp_path, model_control="explicit", load_models=("a",)), scene)


@pytest.mark.parametrize("name", ["nope", "..", ".", "../m", "m/../m", "/etc", "", "a\0b", "m/1", "x" * 129])
def test_names_from_clients_cannot_leave_the_repository(tmp_path: Path, name: str) -> None:
    write_config(tmp_path / "root", "m")
    write_version(tmp_path / "root", "m", 1)
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)

    async def scene(stage: Stage) -> None:
        for call in (stage.repository.load, stage.repository.unload):
            with pytest.raises(ServeError) as fault:
                await call(name)
            assert fault.value.kind is Kind.NOT_FOUND
            assert str(tmp_path) not in fault.value.message

    play(Stage(tmp_path / "root", model_control="explicit"), scene)


def test_load_is_refused_unless_control_is_explicit(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(ServeError) as fault:
            await stage.repository.load("m")
        assert fault.value.kind is Kind.UNAVAILABLE

    play(Stage(tmp_path), scene)


def test_reload_config_replaces_the_whole_list(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_config(tmp_path, name)
        for number in (1, 2):
            write_version(tmp_path, name, number)

    def entry(name: str, **more: Any) -> ModelEntry:
        return ModelEntry(name=name, base_path=str(tmp_path / name), **more)

    async def scene(stage: Stage) -> None:
        assert (stage.served("a"), stage.served("b")) == ([2], [])
        await stage.repository.reload_config(
            [entry("b", version_policy=PolicyChoice(specific=[1]), labels={"stable": 1})]
        )
        assert (stage.served("a"), stage.served("b")) == ([], [1])
        assert stage.catalog.labelled("b", "stable") is not None
        for entries, words in (
            ([entry("a"), entry("a")], "Illegal to list model a multiple times in config list"),
            ([ModelEntry(name="a", base_path="x")], "Expected model a to have an absolute path or URI"),
        ):
            with pytest.raises(ServeError, match=words) as fault:
                await stage.repository.reload_config(entries)
            assert fault.value.kind is Kind.INVALID_ARGUMENT
        with pytest.raises(ServeError, match="assign label to version 7"):
            await stage.repository.reload_config([entry("b", labels={"stable": 7})])
        assert stage.served("b") == [2]

    play(Stage(tmp_path, repository="", models=(entry("a"),)), scene)


def test_watching_finds_a_new_version_and_a_slow_load_holds_up_no_other_model(tmp_path: Path) -> None:
    for name in ("slow", "quick"):
        write_config(tmp_path, name)
        write_version(tmp_path, name, 1)

    async def scene(stage: Stage) -> None:
        seen = asyncio.Event()
        stage.catalog.on_change.append(
            lambda v: seen.set() if (v.model, v.number, v.state.name) == ("quick", 3, "AVAILABLE") else None
        )
        stage.hooks.gates["slow", 2] = asyncio.Event()
        write_version(tmp_path, "slow", 2)
        write_version(tmp_path, "quick", 2)
        while stage.served("quick") != [2]:
            await asyncio.sleep(0.001)
        write_version(tmp_path, "quick", 3)
        await asyncio.wait_for(seen.wait(), 60)
        assert stage.served("slow") == [1]
        stage.hooks.gates["slow", 2].set()
        while stage.served("slow") != [2]:
            await asyncio.sleep(0.001)

    play(Stage(tmp_path, model_control="poll", poll_s=0.01), scene)


def test_a_start_lists_its_models_first_and_an_ensemble_waits_for_its_own_steps_only(tmp_path: Path) -> None:
    for name in ("slow", "step"):
        write_config(tmp_path, name)
        write_version(tmp_path, name, 1)
    (tmp_path / "pair" / "1").mkdir(parents=True)
    (tmp_path / "pair" / "config.pbtxt").write_text(PAIR)
    stage = Stage(tmp_path, load_models=("slow", "pair"))
    stage.hooks.gates["slow", 1] = gate = asyncio.Event()
    told: list[object] = []
    stage.repository.on_listed = lambda: told.append(dict(stage.catalog.starting))
    stage.repository.on_settled = told.append

    async def start() -> None:
        opening = asyncio.ensure_future(stage.repository.open())
        while stage.served("pair") != [1]:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert told == [{"slow": False, "step": False, "pair": False}, "step", "pair"]
        stage.catalog.explain_absence("pair")
        with pytest.raises(ServeError, match="The server is starting: model slow is loading") as caught:
            stage.catalog.explain_absence("slow")
        assert (caught.value.kind, caught.value.retry_after_s) == (Kind.UNAVAILABLE, 1.0)
        gate.set()
        await opening
        assert (stage.served("slow"), stage.catalog.starting) == ([1], {})
        await stage.repository.close()

    asyncio.run(asyncio.wait_for(start(), 60))


def test_an_ensemble_whose_step_goes_while_it_loads_is_withdrawn(tmp_path: Path) -> None:
    write_config(tmp_path, "step")
    write_version(tmp_path, "step", 1)
    (tmp_path / "pair" / "1").mkdir(parents=True)
    (tmp_path / "pair" / "config.pbtxt").write_text(PAIR)

    async def scene(stage: Stage) -> None:
        stage.hooks.gates["pair", 1] = gate = asyncio.Event()
        loading = asyncio.ensure_future(stage.repository.load("pair"))
        while ("load", "pair", 1) not in stage.hooks.events:
            await asyncio.sleep(0.001)
        await stage.repository.unload("step")
        gate.set()
        await loading
        while stage.served("pair"):
            await asyncio.sleep(0.001)
        error = stage.catalog.models["pair"].versions[1].error
        assert str(error) == "ensemble 'pair' depends on 'step' which has no loaded version"

    play(Stage(tmp_path, model_control="explicit"), scene)


def test_closing_while_a_version_loads_ends_it(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)

    async def scene(stage: Stage) -> None:
        stage.hooks.gates["m", 2] = asyncio.Event()
        write_version(tmp_path, "m", 2)
        while ("load", "m", 2) not in stage.hooks.events:
            await asyncio.sleep(0.001)

    stage = Stage(tmp_path, model_control="poll", poll_s=0.01)
    play(stage, scene)
    assert stage.catalog.models["m"].versions[2].state is VersionState.END


def test_an_unexpected_fault_of_a_hook_tells_clients_only_its_type(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)
    stage = Stage(tmp_path)

    async def explode(version: object) -> None:
        raise RuntimeError(f"secret {tmp_path}")

    stage.hooks.load = explode  # type: ignore[method-assign,assignment]
    with pytest.raises(ServeError) as fault:
        asyncio.run(stage.repository.open())
    assert "version 1: Loading failed with RuntimeError." in fault.value.message
    assert str(tmp_path) not in fault.value.message
