"""The list of models in a file, looked at again: what is taken up, and what changes nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from fastserve.server.server import ModelsFile
from fastserve.settings import ModelEntry, TFServingOptions
from tests.repository.folders import Stage, write_config, write_version


def listing(root: Path, *names: str, more: str = "") -> str:
    entries = (f'config {{ name: "{name}" base_path: "{root / name}" {more} }}' for name in names)
    return f"model_config_list {{ {' '.join(entries)} }}"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    for name in ("a", "b"):
        write_config(tmp_path, name)
        for number in (1, 2):
            write_version(tmp_path, name, number)
    return Stage(tmp_path, repository="")


def test_what_the_file_says_is_served(tmp_path: Path, stage: Stage) -> None:
    file = tmp_path / "models.config"
    watch = ModelsFile(TFServingOptions(models_file=str(file), models_file_poll_s=60), stage.repository)

    async def look(text: str) -> tuple[list[int], list[int]]:
        file.write_text(text)
        await watch.look()
        return stage.served("a"), stage.served("b")

    async def scene() -> None:
        await stage.repository.open()
        assert await look(listing(tmp_path, "a")) == ([2], [])
        label = 'version_labels { key: "stable" value: 2 }'
        assert await look(listing(tmp_path, "a", "b", more=label)) == ([2], [2])
        assert stage.catalog.labelled("b", "stable") is not None
        policy = "model_version_policy { specific { versions: 1 } }"
        assert await look(listing(tmp_path, "b", more=policy)) == ([], [1])
        # A client has replaced the models since: the file takes them back at the next look.
        await stage.repository.reload_config(())
        assert stage.served("b") == []
        await watch.look()
        assert stage.served("b") == [1]
        loads = stage.hooks.events.count(("load", "b", 1))
        await watch.look()
        assert stage.hooks.events.count(("load", "b", 1)) == loads
        asked: list[object] = []
        stage.repository.reload_config = asked.append  # type: ignore[method-assign, assignment]
        await watch.look()
        assert asked == [], "a list that is served is not asked for again"
        await stage.repository.close()

    asyncio.run(scene())


def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(
    tmp_path: Path, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.config"
    watch = ModelsFile(TFServingOptions(models_file=str(file), models_file_poll_s=60), stage.repository)

    def told() -> list[str]:
        found = [record.message for record in caplog.records if record.name.endswith("server.server")]
        caplog.clear()
        return found

    async def scene() -> None:
        await stage.repository.open()
        file.write_text(listing(tmp_path, "a"))
        await watch.look()
        assert told() == [f"{file}: 1 models are asked for"]
        for text, words in (
            ("model_config_list { config { name: } }", "Error parsing text-format"),
            (listing(tmp_path, "b", "b"), "Illegal to list model b multiple times in config list"),
            (listing(Path("models"), "b"), "to have an absolute path or URI; got base_path()=models/b"),
            (listing(tmp_path, "b", more="model_version_policy { specific { versions: -1 } }"), "allowed"),
            (None, "No such file or directory"),
        ):
            file.unlink()
            if text is not None:
                file.write_text(text)
            for _ in range(2):
                await watch.look()
            assert stage.served("a") == [2]
            assert stage.served("b") == []
            (once,) = told()
            assert words in once
        await stage.repository.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(scene())


def test_lists_that_come_at_once_end_as_the_last_one_says(tmp_path: Path, stage: Stage) -> None:
    lists = [(ModelEntry(name=name, base_path=str(tmp_path / name)),) for name in ("a", "b")] * 5

    async def scene() -> None:
        await stage.repository.open()
        await asyncio.gather(*(stage.repository.reload_config(entries) for entries in lists))
        assert (stage.served("a"), stage.served("b")) == ([], [2])
        await stage.repository.close()

    asyncio.run(scene())
