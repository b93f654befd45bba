"""`fastserve new NAME`: what it writes runs as it is written, and its own test passes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastserve.cli import main
from fastserve.cli.new import KINDS
from tests.app.apps import RunningApp
from tests.running import Running

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_runs_as_written(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "hello"
    done = CliRunner().invoke(main, ["new", str(folder), "--kind", kind])
    assert done.exit_code == 0, done.output
    listed = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    assert sorted(map(Path, done.output.split("\n\n")[0].splitlines())) == listed
    start, ask = re.search(r"```sh\n(.*)\n(.*)\n```", (folder / "README.md").read_text()).groups()  # type: ignore[union-attr]
    options = shlex.split(start, comments=True)
    assert options[0] == "fastserve"
    place, log = folder / options[2], tmp_path / "log"
    server = RunningApp(place, log, *options[3:]) if options[1] == "run" else Running(place, log)
    with server:
        asked = shlex.split(ask.replace("127.0.0.1:8000", server.http))
        said = subprocess.run([*asked, "-sS"], capture_output=True, text=True)
    assert ("Hello Ann" in said.stdout) or ("[3.0, 6.0, 9.0, 12.0]" in said.stdout), said
    # Plugins that nobody asks for take half of a start.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tested = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for name, said in ((str(tmp_path), "is not empty"), (str(tmp_path / "a b"), "NAME: given 'a b'")):
        done = CliRunner().invoke(main, ["new", name])
        assert (done.exit_code, said in done.output) == (1, True)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
