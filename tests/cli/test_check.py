"""`fastserve check`: the report on the terminal, and the exit code scripts rely on."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from fastserve.cli import main


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["check", *args], prog_name="fastserve")


def test_demo_is_fine() -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "digits: version 1" in result.output
    assert "half_plus_two: version 123" in result.output


def test_a_broken_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "model.yaml").write_text("backend: pyton\n")
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert 'backend: given "pyton", allowed: python, onnx or module:Class' in result.output


def test_no_such_folder(tmp_path: Path) -> None:
    result = run(str(tmp_path / "nothing"))
    assert result.exit_code == 1
    assert "a folder that exists, or demo" in result.output


def test_nothing_named() -> None:
    result = run()
    assert result.exit_code == 2
    assert "name the folder" in result.output


def test_config_file(tmp_path: Path) -> None:
    config = tmp_path / "fastserve.yaml"
    config.write_text("repository: demo\n")
    assert run("--config", str(config)).exit_code == 0
    config.write_text("reposytory: demo\n")
    result = run("--config", str(config))
    assert result.exit_code == 1
    assert "reposytory: unknown field" in result.output
