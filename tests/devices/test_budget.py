"""Models that compete for a device's memory, through a server: who claims what, and when it is given back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.devices.simulated import FakeGpus
from tests.faults.rig import Http, tensor
from tests.running import Running, until

MODEL = """
import os

class Model:
    def __init__(self, config):
        if {fails}:
            raise RuntimeError("no weights")
    def run(self, inputs):
        x = inputs["x"]
        return {{"y": x * 0 + {answer}, "pid": x * 0 + os.getpid()}}
"""
ONE = {"dtype": "int32", "shape": [1]}


def write(models: Path, name: str, answer: int, megabytes: int, *, fails: bool = False, **more: Any) -> None:
    folder = models / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL.format(answer=answer, fails=fails))
    config = {
        **{"backend": "python", "max_batch_size": 8, "devices": "cuda:0", "device_memory_mb": megabytes},
        **{"inputs": {"x": ONE}, "outputs": {"y": ONE, "pid": ONE}, **more},
    }
    (models / name / "model.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    write(tmp_path / "models", "first", 1, 5000, shared_worker="gpu")
    write(tmp_path / "models", "second", 2, 5000, shared_worker="gpu")
    return tmp_path / "models"


@pytest.fixture
def http(gpus: FakeGpus, models: Path) -> Iterator[Http]:
    """Of a server whose GPU 0 has 8192 MB."""
    options = ("--model-control", "explicit", "--load-model", "first")
    with ExitStack() as stack:
        with gpus.here():
            running = stack.enter_context(Running(models, models.parent / "log", *options))
        yield stack.enter_context(Http(running))


def manage(http: Http, what: str, name: str) -> str:
    answer = http.post(f"/v2/repository/models/{name}/{what}", {})
    return "" if answer.status == 200 else str(answer.error)


def ask(http: Http, name: str, output: str = "y") -> int:
    """0 where it is not answered."""
    answer = http.post(f"/v2/models/{name}/infer", {"inputs": [tensor("x", [1, 1], [1])]})
    if answer.status != 200:
        return 0
    return int(next(one for one in answer.json()["outputs"] if one["name"] == output)["data"][0])


def test_who_does_not_fit_waits_for_room(http: Http, models: Path) -> None:
    refused = "its workers claim {} MB of GPU 0 (Fake GPU 0, 8.0 GiB) (device_memory_mb), of whose 8192 MB"
    assert refused.format(5000) in manage(http, "load", "second")
    assert (ask(http, "first"), ask(http, "second")) == (1, 0)

    write(models, "first", 10, 4000, shared_worker="gpu")  # beside the old one, until it has taken its place
    assert refused.format(4000) in manage(http, "load", "first")
    assert ask(http, "first") == 1
    write(models, "first", 11, 3000, shared_worker="gpu")
    assert manage(http, "load", "first") == ""
    assert ask(http, "first") == 11

    write(models, "second", 2, 5000, fails=True, shared_worker="gpu")
    until(lambda: "no weights" in manage(http, "load", "second"), "the old version has given its claim back")
    for _ in range(3):  # a load that fails claims nothing afterwards
        assert "no weights" in manage(http, "load", "second")
    write(models, "second", 2, 5000, shared_worker="gpu")
    assert manage(http, "load", "second") == ""
    assert (ask(http, "first"), ask(http, "second")) == (11, 2)

    before = ask(
        http, "first", "pid"
    )  # the process of both: what they claim outlives it, and is not claimed again
    assert ask(http, "second", "pid") == before
    os.kill(before, signal.SIGKILL)
    until(lambda: ask(http, "first") == 11 and ask(http, "second") == 2, "both are back", 60)
    assert ask(http, "first", "pid") == ask(http, "second", "pid") != before

    assert manage(http, "unload", "second") == ""
    write(models, "first", 12, 5192, shared_worker="gpu")  # all that is left beside the old one's 3000
    until(lambda: manage(http, "load", "first") == "", "the other has given its claim back")
    assert refused.format(5000) in manage(http, "load", "second")
    assert ask(http, "first") == 12
