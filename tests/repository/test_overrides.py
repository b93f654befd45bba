"""Loads that bring a config and files along."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.repository.layout import Override, Overrides
from tests.repository.folders import Stage, write_version

TENSOR = {"name": "IN", "data_type": "TYPE_BOOL", "dims": [-1]}
CONFIG: dict[str, Any] = {"backend": "python", "input": [TENSOR], "output": [{**TENSOR, "name": "OUT"}]}
MODEL = "class TritonPythonModel: pass\n"


def override(files: dict[str, bytes] | None = None, **changes: Any) -> Override:
    return Override(json.dumps({**CONFIG, **changes}), files or {})


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_config_holds_until_the_next_load(tmp_path: Path) -> None:
    write_version(tmp_path, "m", 1, MODEL)
    stage = Stage(tmp_path, model_control="explicit")

    async def steps() -> None:
        repository = stage.repository
        await repository.open()
        await repository.load("m")
        first = stage.catalog.models["m"].versions[1]
        await repository.load("m", override=override(instance_group=[{"count": 3}]))
        second = stage.catalog.models["m"].versions[1]
        assert (first.config.instances, second.config.instances) == (1, 3)
        with pytest.raises(ServeError) as unreadable:
            await repository.load("m", override=Override("{x"))
        assert unreadable.value.kind is Kind.NOT_FOUND
        assert stage.catalog.models["m"].versions[1] is second
        await repository.load("m")
        assert stage.catalog.models["m"].versions[1].config.instances == 1
        await repository.close()

    run(steps())


def test_files_make_a_model_that_is_not_on_disk(tmp_path: Path) -> None:
    stage = Stage(tmp_path, model_control="explicit")

    async def steps() -> None:
        repository = stage.repository
        await repository.open()
        with pytest.raises(ServeError, match=r"no model new"):
            await repository.load("new")
        await repository.load("new", override=override({"1/model.py": MODEL.encode(), "3/model.py": b""}))
        assert stage.served("new") == [3]
        first = stage.catalog.models["new"].versions[3].folder
        assert (first.parent / "1" / "model.py").read_text() == MODEL
        await repository.load("new", override=override({"3/model.py": MODEL.encode()}))
        second = stage.catalog.models["new"].versions[3].folder
        assert (first.exists(), second.exists()) == (False, True)
        stage.hooks.failing.add(("new", 3))
        with pytest.raises(ServeError):
            await repository.load("new", override=override({"3/model.py": b"broken"}))
        assert second.exists()  # what serves may still be restarted from it
        await repository.unload("new")
        assert not second.exists()
        await repository.close()

    run(steps())


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "1/../../x", "a\0b", ".", "x" * 600])
def test_paths_stay_inside(path: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: a path inside the model's folder"):
        Overrides().make("m", Override("{}", {path: b""}))
