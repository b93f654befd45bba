"""`batching_params.pbtxt` in a version's folder, as TensorFlow Serving reads it when a flag asks for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fastserve.repository.model_config import ModelConfig
from fastserve.settings import ModelEntry
from tests.repository.folders import Stage, write_config, write_version

FILE = "batching_params.pbtxt"
PARAMETERS = (
    "max_batch_size { value: 64 } batch_timeout_micros { value: 250 } allowed_batch_sizes: 8 "
    "allowed_batch_sizes: 64 max_enqueued_batches { value: 2 } pad_variable_length_inputs: true"
)


def make(root: Path, **config: object) -> None:
    write_config(root, "m", version_policy="all", **config)
    for number in (1, 2):
        write_version(root, "m", number)
    (root / "m" / "2" / FILE).write_text(PARAMETERS)


def config_of(stage: Stage, number: int) -> ModelConfig:
    version = stage.catalog.available("m", number)
    assert version is not None
    return version.config


@pytest.mark.parametrize("named", [True, False])
def test_each_version_has_its_own(tmp_path: Path, named: bool) -> None:
    make(tmp_path, max_batch_size=16, max_queue_delay_us=9)
    entry = ModelEntry(name="m", base_path=str(tmp_path / "m"), labels={"canary": 2})
    where = {"repository": "", "models": (entry,)} if named else {}
    stage = Stage(tmp_path, version_batching=True, **where)

    async def scene() -> None:
        await stage.repository.open()
        one, two = config_of(stage, 1), config_of(stage, 2)
        assert (one.max_batch_size, one.max_queue_delay_us, one.mixed_shapes) == (16, 9, "group")
        assert (two.max_batch_size, two.max_queue_delay_us, two.mixed_shapes) == (64, 250, "pad")
        assert (two.allowed_batch_sizes, two.max_queue_rows) == ([8, 64], 128)
        assert (stage.catalog.labelled("m", "canary") is not None) == named
        stage.hooks.events.clear()
        await stage.repository.poll()
        assert stage.hooks.events == []
        (tmp_path / "m" / "2" / FILE).unlink()
        await stage.repository.poll()
        assert stage.hooks.events == [("load", "m", 2), ("unload", "m", 2)]
        assert config_of(stage, 2).max_batch_size == 16
        await stage.repository.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batch_size { value: }", "Error parsing text-format tensorflow.serving.BatchingParameters"),
        (
            "max_batch_size { value: 8 } allowed_batch_sizes: 4",
            "Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8",
        ),
        (
            "max_batch_size { value: -3 }",
            "batching_params.pbtxt: input_batch_size_limit must be positive; was -3",
        ),
    ],
)
def test_one_that_cannot_be_used_fails_its_version_alone(tmp_path: Path, text: str, words: str) -> None:
    make(tmp_path)
    (tmp_path / "m" / "2" / FILE).write_text(text)
    stage = Stage(tmp_path, version_batching=True, keep_going=True)

    async def scene() -> None:
        await stage.repository.open()
        assert stage.served("m") == [1]
        failed = stage.catalog.models["m"].versions[2].error
        assert failed is not None
        assert words in failed.message
        await stage.repository.close()

    asyncio.run(scene())


def test_it_is_read_only_where_it_is_asked_for_and_where_there_are_batches(tmp_path: Path) -> None:
    async def scene(stage: Stage, size: int) -> None:
        await stage.repository.open()
        assert config_of(stage, 2).max_batch_size == size
        await stage.repository.close()

    make(tmp_path)
    asyncio.run(scene(Stage(tmp_path), 32))
    make(tmp_path, max_batch_size=0)
    asyncio.run(scene(Stage(tmp_path, version_batching=True), 0))


def test_sizes_of_the_model_are_not_those_of_a_version_that_names_none(tmp_path: Path) -> None:
    make(tmp_path, max_batch_size=16, allowed_batch_sizes=[4, 16])
    (tmp_path / "m" / "2" / FILE).write_text("max_batch_size { value: 64 }")
    stage = Stage(tmp_path, version_batching=True)

    async def scene() -> None:
        await stage.repository.open()
        assert config_of(stage, 1).allowed_batch_sizes == [4, 16]
        assert config_of(stage, 2).max_batch_size == 64
        assert config_of(stage, 2).allowed_batch_sizes is None
        await stage.repository.close()

    asyncio.run(scene())
