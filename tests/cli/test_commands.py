"""`fastserve --help`, `infer`, `models`: what is sent, what is printed, and the words of failures."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from fastserve.cli import COMMANDS, main
from fastserve.cli.client import request_body
from tests.cli.standin import serving


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as found:
        yield found


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=stdin, prog_name="fastserve")


def test_help_names_every_command_without_importing_one() -> None:
    code = "import sys, fastserve.cli as c; c.main(['--help'], standalone_mode=False); print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert "fastserve.cli.bench" not in done.stdout
    assert "'numpy'" not in done.stdout


@pytest.mark.parametrize("name", ["infer", "bench", "models"])
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"\n  fastserve {name}" in result.output


def test_unknown_command() -> None:
    result = run("infre")
    assert result.exit_code == 2
    assert "No such command 'infre'; did you mean infer?" in result.output
    assert "there are serve, run, new, models, check" in run("frobnicate").output


def test_infer_prints_a_line_per_row(url: str) -> None:
    result = run("infer", "double", "[[1, 2, 3], [4, 5, 6]]", "--url", url)
    assert result.output == "[2, 4, 6]\n[8, 10, 12]\n"
    assert result.exit_code == 0


def test_infer_reads_standard_input_and_prints_raw(url: str) -> None:
    result = run("infer", "double", "--raw", "--url", url, stdin='{"instances": [[1, 1, 1]]}')
    assert json.loads(result.output) == {"predictions": [[2, 2, 2]]}


def test_infer_tells_the_servers_own_words(url: str) -> None:
    result = run("infer", "broken", "[1]", "--url", url)
    assert result.exit_code == 1
    assert "500: it broke" in result.output


def test_infer_refuses_what_is_not_json(url: str) -> None:
    result = run("infer", "double", "[1, 2", "--url", url)
    assert result.exit_code == 2
    assert "not JSON" in result.output


def test_nobody_there() -> None:
    with socket.socket() as taken:  # bound and not listening: refused for sure
        taken.bind(("127.0.0.1", 0))
        result = run("infer", "double", "[1]", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert result.exit_code == 1
    assert "Is the server running?" in result.output


def test_request_body() -> None:
    assert request_body([1, 2], "predict", None) == {"instances": [1, 2]}
    assert request_body(1, "predict", None) == {"instances": [1]}
    assert request_body({"inputs": {"x": 1}}, "predict", "s") == {"inputs": {"x": 1}, "signature_name": "s"}
    assert request_body({"x": 1}, "classify", None) == {"examples": [{"x": 1}]}


def test_models_as_table_and_json(url: str) -> None:
    table = run("models", "--url", url).output.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [
        ["broken", "1", "AVAILABLE"],
        ["double", "1", "AVAILABLE"],
    ]
    listed = json.loads(run("models", "double", "--json", "--url", url).output)
    assert listed == [{"model": "double", "version": "1", "state": "AVAILABLE", "why": ""}]


def test_models_unknown(url: str) -> None:
    result = run("models", "nobody", "--url", url)
    assert result.exit_code == 1
    assert "the server knows no model nobody; it has broken, double" in result.output


def test_the_package_is_the_command() -> None:
    """`python -m fastserve` said that it is a package and cannot be executed."""
    run = [sys.executable, "-m", "fastserve", "--help"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Usage: fastserve ")
