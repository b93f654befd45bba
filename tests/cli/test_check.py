"""`fastserve check`: the report on the terminal, and the exit code scripts rely on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import uvloop
from click.testing import CliRunner, Result

from fastserve.cli import main
from fastserve.settings import Settings, list_fields
from tests.running import run_command

STARTS_PROCESSES = True  # models are loaded to be checked
uvloop.run(asyncio.sleep(0))  # libuv opens its pipe with the process's first loop, for good


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["check", *args], prog_name="fastserve")


@pytest.mark.usefixtures("logs_as_before")
def test_demo_is_fine() -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "digits: version 1" in result.output
    assert "half_plus_two: version 123" in result.output
    assert "3 model(s) were loaded, 0 with problems" in result.output


@pytest.mark.usefixtures("logs_as_before")
def test_a_broken_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "model.yaml").write_text("backend: pyton\n")
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert (
        'backend: given "pyton", allowed: python, onnx, torch, tensorflow, sklearn, xgboost, lightgbm, '
        "catboost, treelite, transformers, text, text_python or module:Class" in result.output
    )


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
    assert run("--no-load", "--config", str(config)).exit_code == 0
    config.write_text("reposytory: demo\n")
    result = run("--no-load", "--config", str(config))
    assert result.exit_code == 1
    assert "reposytory: unknown field" in result.output


CONFIG = """
backend: python
inputs: {x: {dtype: float32, shape: [2]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
GOOD = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): return {"y": inputs["x"]}
"""
# What files alone do not show; each fails a load.
FAULTS = {
    "raises": (CONFIG, GOOD.replace("pass", "raise ValueError('no weights')"), "ValueError: no weights"),
    "missing": (CONFIG, "import no_such_module\n" + GOOD, "No module named 'no_such_module'"),
    "norun": (
        CONFIG,
        "class Model:\n    def __init__(self, config): pass\n",
        "has no method run(self, inputs)",
    ),
    "quits": (CONFIG, "import os\n" + GOOD.replace("pass", "os._exit(3)"), "exit code 3"),
}
BOTH = {
    "syntax": (CONFIG, "def broken(:\n", "SyntaxError: invalid syntax (model.py, line 1)"),
    "noclass": (CONFIG, "x = 1\n", "model.py has no class 'Model'"),
    "nothing": (CONFIG, "", "no version that can be loaded; version 1: no model.py"),
    "field": (CONFIG.replace("outputs", "output"), GOOD, "output: unknown field, did you mean outputs?"),
    "nomodel": ("", GOOD, "there is a model.py and no model.yaml beside the version folders"),
}


def write(folder: Path, models: dict[str, tuple[str, str, str]]) -> str:
    for name, (config, code, _) in models.items():
        (folder / name / "1").mkdir(parents=True)
        if config:
            (folder / name / "model.yaml").write_text(config)
        if code:
            (folder / name / "1" / "model.py").write_text(code)
    return str(folder)


def problems(text: str) -> dict[str, str]:
    """The problem lines of a report by model."""
    found, name = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.partition(":")[0]
        elif line.startswith("  PROBLEM: "):
            found[name] = line.removeprefix("  PROBLEM: ")
    return found


def test_check_finds_what_the_load_finds(tmp_path: Path) -> None:
    models = {**FAULTS, **BOTH, "good": (CONFIG, GOOD, "")}
    folder = write(tmp_path / "models", models)
    checked = run_command("check", folder)
    assert checked.returncode == 1
    found = problems(checked.stdout)
    assert sorted(found) == sorted({**FAULTS, **BOTH})
    assert all(models[name][2] in told for name, told in found.items()), found
    assert "1 model(s) were loaded, 9 with problems" in checked.stdout
    assert checked.stderr.count("ValueError: no weights") >= 1, "the traceback is shown"
    served = run_command("serve", folder, "--http", "127.0.0.1:0", "--grpc", "off")
    assert served.returncode == 1
    for name, told in found.items():
        assert f"{name}: {told}" in served.stderr, "the same words"


def test_files_alone_show_less_in_the_same_words(tmp_path: Path) -> None:
    result = run("--no-load", write(tmp_path / "models", {**FAULTS, **BOTH}))
    assert result.exit_code == 1
    found = problems(result.output)
    assert sorted(found) == sorted(BOTH)
    assert all(BOTH[name][2] in told for name, told in found.items()), found


def test_no_code_runs_without_a_load(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    code = f"open({str(trace)!r}, 'w')\n" + GOOD
    assert run("--no-load", write(tmp_path / "models", {"m": (CONFIG, code, "")})).exit_code == 0
    assert not trace.exists()


def test_settings_come_first_with_where_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "fastserve.yaml"
    config.write_text("repository: demo\npoll_s: 5\n")
    monkeypatch.setenv("FASTSERVE_CONFIG", str(config))
    monkeypatch.setenv("FASTSERVE_FRONTENDS", "2")
    monkeypatch.setenv("FASTSERVE_PORT", "tcp://10.0.0.1:8000")  # a service of this name
    result = run("--no-load", "--http", "127.0.0.1:9=tfserving")
    assert result.exit_code == 0, result.output
    head, _, rest = result.output.partition("\n\n")
    assert head.splitlines() == [
        "settings",
        f"  repository: demo  ({config})",
        f"  poll_s: 5.0  ({config})",
        "  http: 127.0.0.1:9=tfserving  (flag)",
        "  grpc: 127.0.0.1:8001  (default)",
        "  frontends: 2  (FASTSERVE_FRONTENDS)",
        f"  {len(list_fields(Settings)) - 5} others have their defaults (--all)",
    ]
    assert rest.startswith("digits: version 1")
    assert "  limits.body_bytes: 134217728  (default)" in run("--no-load", "--all").output


def test_the_number_of_front_processes_is_worked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve.server.sizing.usable_cores", lambda: 8)
    folder = write(tmp_path, {"m": (CONFIG + "instances: 2\n", GOOD, "")})
    head = run("--no-load", folder, "--frontends", "auto").output.partition("\n\n")[0].splitlines()
    assert "  frontends: auto  (flag)" in head
    assert "  frontends auto: 6 front processes, 8 cores less 2 for workers" in head
    monkeypatch.setenv("FASTSERVE_FRONTENDS", "auto")
    told = json.loads(run("--no-load", "--json", folder).output)
    assert told["front_processes"] == 6
    assert told["settings"]["frontends"] == {
        "value": "auto", "source": "environment", "origin": "FASTSERVE_FRONTENDS",
    }  # fmt: skip


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERVE_REPOSITORY", "demo")
    told = json.loads(run("--no-load", "--json").output)
    assert (told["ok"], told["loaded"], sorted(told["models"])) == (
        True,
        False,
        ["digits", "half_plus_two", "scribe"],
    )
    assert told["models"]["digits"]["versions"] == [1]
    given = {"value": "demo", "source": "environment", "origin": "FASTSERVE_REPOSITORY"}
    assert told["settings"]["repository"] == given
    assert told["settings"]["http"] == {"value": ["127.0.0.1:8000"], "source": "default"}


def test_an_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERVE_" + "FRONTEND", "2")
    result = run("demo", "--no-load")
    assert result.exit_code == 1
    assert "FRONTEND: unknown variable, did you mean FASTSERVE_FRONTENDS?" in result.output


@pytest.mark.usefixtures("logs_as_before")
def test_one_model_by_its_file(tmp_path: Path) -> None:
    """As `fastserve serve` takes it; the name is told, and a pickle wants its flag."""
    file = Path(__file__).parents[2] / "examples/onnx/digits/1/model.onnx"
    result = run(str(file), "--name", "figures")
    assert result.exit_code == 0, result.output
    assert "figures: version 1" in result.output
    assert "outputs: scores float32[10], digit int64[]" in result.output
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04N.")
    assert "a.pkl is a pickle" in run(str(tmp_path / "a.pkl")).output
    assert "allowed: with one model" in run("demo", "--name", "x").output
