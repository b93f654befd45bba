"""`App.to_repository`: the folders that it writes are served by `fastserve serve`, with equal answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.app.apps import RunningApp, write_app

APP = """
    import os
    from helper.words import HELLO


    @fastserve.model(path="/v1/greet")
    def greet(name: str, times: int = 1) -> dict:
        return {"text": f"{HELLO} {name}! " * times}


    @fastserve.model(batch=8)
    def scale(x: fastserve.Array["float32", 2]) -> fastserve.Array["float32", 2]:
        return x * 3


    @fastserve.model
    def count(to: int):
        for number in range(to):
            yield number


    @fastserve.model(name="twice", version=1, path="/twice/1")
    def twice_1(value: int):
        return value * 2


    @fastserve.model(name="twice", version=2, path="/twice/2")
    def twice_2(value: int):
        return value * 4


    if os.environ.get("WRITE_TO"):
        fastserve.App().to_repository(os.environ["WRITE_TO"])
"""
ASKED: list[tuple[str, Any]] = [
    ("/v1/greet", {"name": "Ann", "times": 2}),
    ("/v1/greet", {"name": 5}),
    ("/greet", {"name": "Ann"}),
    ("/scale", {"x": [[1, 2], [3, 4]]}),
    ("/scale", {"x": [1]}),
    ("/count", {"to": 3}),
    ("/twice/1", {"value": 3}),
    ("/twice/2", {"value": 3}),
    ("/v1/models/scale:predict", {"instances": [[1, 2]]}),
]


class RunningRepository(RunningApp):
    """`fastserve serve DIR`."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        super().__init__(folder, log, *options)
        self._command[self._command.index("run")] = "serve"


def write(folder: Path, text: str, to: str) -> subprocess.CompletedProcess[str]:
    """Run a script that writes itself as a repository."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WRITE_TO": to}
    command = [sys.executable, str(write_app(folder, text))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)


def test_a_written_repository_answers_as_the_script(tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "helper").mkdir(parents=True)
    (app / "helper/__init__.py").touch()
    (app / "helper/words.py").write_text("HELLO = 'Hello'\n")
    done = write(app, APP, "../models")
    assert done.returncode == 0, done.stderr
    with RunningApp(app / "app.py", tmp_path / "log") as server:
        said = [server.post(*asked) for asked in ASKED]
    assert [status for status, _, _ in said] == [200, 400, 404, 200, 400, 200, 200, 200, 200]
    app.rename(tmp_path / "gone")
    (tmp_path / "models/broken").mkdir()
    (tmp_path / "models/broken/model.yaml").write_text("backend: script\n: [")
    with RunningRepository(tmp_path / "models", tmp_path / "log.2", "--keep-going") as server:
        assert [server.post(*asked) for asked in ASKED] == said


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/mine").touch()
    done = write(
        tmp_path,
        "import os\n@fastserve.model\ndef f(): ...\nfastserve.App().to_repository(os.environ['WRITE_TO'])\n",
        "models",
    )
    assert (done.returncode, done.stderr) == (1, "fastserve: models is not empty\n")
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["mine"]
