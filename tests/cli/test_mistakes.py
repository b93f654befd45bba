"""Mistakes people make at first: each is answered with what is wrong and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fastserve.cli import main
from tests.running import Running, run_command

CONFIG = """
backend: python
inputs: {x: {dtype: float32, shape: [2]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
MODEL = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): return {"y": inputs["x"]}
"""
COMMAND = [sys.executable, "-m", "fastserve.cli"]
COMMANDS = main.list_commands(click.Context(main))


def write_model(root: Path, config: str = CONFIG, code: str = MODEL) -> Path:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text(config)
    (root / "m" / "1" / "model.py").write_text(code)
    return root


def refused(*arguments: str) -> str:
    """Return the last line of a start that must not succeed."""
    done = run_command("serve", *arguments)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def test_one_folder_too_deep(tmp_path: Path) -> None:
    root = write_model(tmp_path)
    said = "1 is one version of a model (it holds model.py); give the folder two above it"
    assert refused(str(root / "m" / "1")).endswith(said)
    (root / "m" / "model.yaml").unlink()
    assert "is one model (it holds 1/model.py); give the folder above it" in refused(str(root / "m"))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    said = refused(str(tmp_path / "model"))
    assert said.startswith(f'fastserve: repository: given "{tmp_path}/model", allowed: a folder that exists')
    assert said.endswith(f"; there is no {tmp_path}/model, did you mean {tmp_path}/models?")


def test_a_folder_without_models(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "notes").mkdir()
    command = [*COMMAND, "serve", "models", "--http", "127.0.0.1:0", "--grpc", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().decode() for _ in range(3)]
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert said[0].startswith("fastserve listens and is not ready: http://")
    assert said[1] == "no model is loaded; `fastserve check models` tells more\n"
    assert said[2].startswith("There is no model in models: a model is a folder such as models/NAME, with")


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("1/model.py", "model.py", "model.py lies beside the version folders: move it"),
        ("1", "v1", "v1/model.py: a version's folder has a number for its name, say 1"),
        ("model.yaml", "1/model.yaml", "model.yaml lies in version folder 1: move it up"),
        ("1/model.py", "1/net.py", "rename it to m/1/model.py"),
    ],
)
def test_a_file_in_the_wrong_place(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    folder = write_model(tmp_path) / "m"
    (folder / right).rename(folder / wrong)
    result = CliRunner().invoke(main, ["check", "--no-load", str(tmp_path)])
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (MODEL.replace(", config", ""), "class 'Model' must take one argument: def __init__(self, config)"),
        (MODEL.replace(", inputs)", ")"), "run must take one argument: def run(self, inputs)"),
        (MODEL.replace("inputs):", "inputs, rows):"), "run must take one argument: def run(self, inputs)"),
    ],
)
def test_arguments_nobody_hands_over(tmp_path: Path, code: str, said: str) -> None:
    root = str(write_model(tmp_path, code=code))
    told = refused(root, "--http", "127.0.0.1:0", "--grpc", "off")
    assert f"m: version 1: {said}" in told


def test_flags_of_other_servers() -> None:
    told = refused("demo", "--port", "8080")
    where = "listeners are given as --listen HOST:PORT, or --http HOST:PORT and --grpc HOST:PORT"
    assert told == f"Error: No such option --port; {where}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_nobody_knows_ends_the_start(command: str) -> None:
    """Of every command, those that take another server's flags among them: none is dropped in silence."""
    done = run_command(command, "--no_such_flag=1")
    assert done.returncode not in (0, -9)
    assert "no_such_flag" in done.stdout + done.stderr


def test_a_model_the_server_does_not_have(tmp_path: Path) -> None:
    with Running(write_model(tmp_path / "models"), tmp_path / "log") as server:
        for command in (["infer", "n", "[[1, 2]]"], ["bench", "n", "-d", "0.1"]):
            result = CliRunner().invoke(main, [*command, "--url", f"http://{server.http}"])
            assert result.exit_code == 1
            assert "; the server has m" in result.output
        result = CliRunner().invoke(main, ["models", "--json", "--url", f"http://{server.http}"])
        assert [row["model"] for row in json.loads(result.stdout)] == ["m"]
