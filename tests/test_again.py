"""Two more tries tell races from faults, and excuse no process that died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tests

ROOT = Path(tests.__path__[0]).parent
RACING = """
import pathlib
def test_races():
    before = pathlib.Path(__file__).with_name("before")
    lost, _ = not before.exists(), before.touch()
    assert not lost
"""
RACING_TWICE = """
import pathlib
def test_races():
    before = pathlib.Path(__file__).with_name("before")
    with before.open("a") as file:
        file.write("x")
    assert before.read_text() == "xxx"
"""
AT_FAULT = "def test_is_at_fault(): assert 0\n"
DYING = "import os\ndef test_dies(): os._exit(3)\ndef test_is_never_run(): assert 0\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_is_at_fault(n): assert 0\n"
GOOD = "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_is_good(n): pass\n"


@pytest.mark.parametrize(
    ("sources", "status", "again", "race"),
    [
        ([RACING, GOOD], 0, True, True),
        ([RACING_TWICE, GOOD], 0, True, True),
        ([AT_FAULT, GOOD], 1, True, False),
        ([RACING, AT_FAULT], 1, True, False),
        ([DYING, GOOD], 1, False, False),
        (["def test_no", GOOD], 2, False, False),
        (["def test_no", RACING], 2, False, False),
        ([MANY, GOOD], 1, False, False),
    ],
    ids=[
        "a race",
        "a race lost twice",
        "a fault",
        "both",
        "a process dies",
        "unreadable",
        "unreadable beside a race",
        "many",
    ],
)
def test_what_failed_among_others(
    tmp_path: Path, sources: list[str], status: int, again: bool, race: bool
) -> None:
    for number, source in enumerate(sources):
        (tmp_path / f"test_{number}.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.again", "-p", "tests.forks", "--forks", "2"]
    # Plugins that nobody asks for take half of a start.
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("Once more, alone" in done.stdout, "RACE, to be mended" in done.stdout) == (again, race), (
        done.stdout
    )
    if race:
        assert done.stdout.endswith("passed alone):\n  test_0.py::test_races\n")
