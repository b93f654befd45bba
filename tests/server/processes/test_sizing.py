"""frontends: auto: one rule, in the banner, and for what one front process alone can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastserve.metrics import Readiness
from fastserve.server.banner import banner_text
from fastserve.server.sizing import size_fronts
from fastserve.settings import Listener, Settings, load_settings
from tests.running import Running
from tests.server.rig import run, serving, write_model


def reason(folder: Path, cores: int, **settings: Any) -> tuple[int, str]:
    found = size_fronts(Settings(repository=str(folder), frontends="auto", **settings), cores)
    assert found.settings.front_count == found.settings.frontends
    return found.settings.front_count, found.reason.removeprefix("frontends auto: ")


@pytest.mark.parametrize(
    ("cores", "fronts", "why"),
    [
        (16, 10, "10 front processes, 16 cores less 6 for workers"),
        (7, 1, "1 front process, 7 cores less 6 for workers"),
        (2, 1, "1 front process, 2 cores less 6 for workers"),
        (1, 1, "1 front process, 1 core less 6 for workers"),
        (64, 16, "16 front processes, 64 cores less 6 for workers, at most 16"),
    ],
)
def test_cores_less_those_of_workers(tmp_path: Path, cores: int, fronts: int, why: str) -> None:
    write_model(tmp_path, "two", instances=2)
    write_model(tmp_path, "threads", threads=3)
    write_model(tmp_path, "any", threads=0)
    assert reason(tmp_path, cores) == (fronts, why)


def test_every_version_and_shared_workers_once(tmp_path: Path) -> None:
    write_model(tmp_path, "both", (1, 2), version_policy="all", instances=2)
    write_model(tmp_path, "a", shared_worker="all", instances=2)
    write_model(tmp_path, "b", shared_worker="all")
    assert reason(tmp_path, 16)[1] == "10 front processes, 16 cores less 6 for workers"


def test_models_that_are_loaded_later_count_as_one_worker(tmp_path: Path) -> None:
    write_model(tmp_path, "m", instances=4)
    write_model(tmp_path, "n", instances=2)
    explicit = {"model_control": "explicit"}
    assert reason(tmp_path, 8, **explicit)[0] == 7
    assert reason(tmp_path, 8, **explicit, load_models=("n",))[0] == 6
    assert reason(tmp_path, 8, **explicit, load_models=("*",))[0] == 2


def test_a_folder_that_cannot_be_read_is_the_starts_to_report(tmp_path: Path) -> None:
    assert reason(tmp_path / "nowhere", 4)[0] == 3


def test_a_number_is_taken_as_it_is(tmp_path: Path) -> None:
    settings = Settings(repository=str(tmp_path), frontends=5)
    assert size_fronts(settings, 2).settings is settings
    assert size_fronts(settings, 2).reason == ""


def test_what_one_process_alone_can_serve(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert reason(tmp_path, 8, in_process=True) == (1, "1 front process, in_process is kept in one")


def test_a_variable_of_the_environment_and_a_flag() -> None:
    assert load_settings(None, None, {"frontends": "auto"}).frontends == "auto"
    assert load_settings(None, {"frontends": "auto"}, {"frontends": "3"}).frontends == "auto"
    assert load_settings(None, {"frontends": "3"}, {"frontends": "auto"}).frontends == 3


def test_the_banner_says_the_number_and_why(tmp_path: Path) -> None:
    text = banner_text(
        Settings(), (Listener("127.0.0.1:1"),), (), Readiness(True), sizing="frontends auto: why"
    )
    assert text.splitlines()[1] == "frontends auto: why"


def test_a_server_has_that_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve.server.sizing.usable_cores", lambda: 3)
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends="auto") as served:
            assert len(served.links) == 1
            assert served.server.settings.frontends == 2
            assert await served.ask(2.0) == (200, [4.0])

    run(work())


def test_a_started_server_says_it(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    with Running(tmp_path / "models", tmp_path / "log", "--frontends", "auto") as server:
        assert server._process.stdout is not None
        assert server._process.stdout.readline().startswith(b"frontends auto: ")
