"""`fastserve models` against a real server with models that never loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from fastserve.cli import main
from tests.running import Running

CONFIG = """
backend: python
inputs: {x: {dtype: float32, shape: []}}
outputs: {y: {dtype: float32, shape: []}}
"""
GOOD = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): return {"y": inputs["x"]}
"""
FAILS = GOOD.replace("pass", "raise ValueError('no weights')")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    for name, config, code in [
        ("good", CONFIG, GOOD),
        ("fails", CONFIG, FAILS),
        ("typo", CONFIG.replace("outputs", "output"), GOOD),
        ("empty", CONFIG, ""),
    ]:
        version = folder / "models" / name / "1"
        version.mkdir(parents=True)
        (folder / "models" / name / "model.yaml").write_text(config)
        if code:
            (version / "model.py").write_text(code)
    with Running(folder / "models", folder / "log", "--keep-going") as running:
        yield running


def run(server: Running, *args: str) -> Result:
    return CliRunner().invoke(
        main, ["models", *args, "--url", f"http://{server.http}"], prog_name="fastserve"
    )


def test_models_that_never_loaded_are_shown_with_the_reason(server: Running) -> None:
    result = run(server, "--json")
    assert result.exit_code == 0, result.output
    rows = {row["model"]: row for row in json.loads(result.stdout)}
    assert {name: (row["version"], row["state"]) for name, row in rows.items()} == {
        "good": ("1", "AVAILABLE"),
        "fails": ("1", "END"),
        "typo": ("-", "NOT_LOADED"),
        "empty": ("-", "NOT_LOADED"),
    }
    assert rows["good"]["why"] == ""
    assert "ValueError: no weights" in rows["fails"]["why"]
    assert rows["typo"]["why"].startswith(
        "model.yaml: output: unknown field, did you mean outputs? allowed: "
    )
    assert "no model.py" in rows["empty"]["why"]


def test_the_table_names_each(server: Running) -> None:
    result = run(server)
    assert "404" not in result.output
    assert [line.split()[:3] for line in result.stdout.splitlines()] == [
        ["MODEL", "VERSION", "STATE"],
        ["empty", "-", "NOT_LOADED"],
        ["fails", "1", "END"],
        ["good", "1", "AVAILABLE"],
        ["typo", "-", "NOT_LOADED"],
    ]


def test_a_model_there_is_none_of(server: Running) -> None:
    result = run(server, "god")
    assert result.exit_code == 1
    assert "the server knows no model god; it has empty, fails, good, typo" in result.output
