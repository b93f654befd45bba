"""A skip that is not listed fails its test, alone and beside others; a listed one is counted by its need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tests
from tests.skips import ALLOWED, ListedSkips

ROOT = Path(tests.__path__[0]).parent
SKIPPED = "import pytest\ndef test_it(): pytest.skip('nothing to run with')\n"
MODULE = "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n"
XFAIL = "import pytest\n@pytest.mark.xfail\ndef test_it(): assert 0\n"
CONSOLE = "tests/server/observability/test_console.py"


def suite(folder: Path, name: str, source: str, *more: str) -> tuple[int, str]:
    """The exit status and output of a run of one file, beside one whose test passes."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (folder / "test_good.py").write_text("def test_it(): pass\n")
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -p tests.forks -p no:cacheprovider -p tests.skips --import-mode=importlib\n"
    )
    # Plugins that nobody asks for take half of a start.
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *more, "test_good.py", name]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize(
    ("source", "why"), [(SKIPPED, "nothing to run with"), (MODULE, "no_such_module")], ids=["test", "module"]
)
def test_a_skip_that_is_not_listed_fails(tmp_path: Path, source: str, why: str, processes: str) -> None:
    status, output = suite(tmp_path, "test_other.py", source, "--forks", processes)
    assert status != 0, output
    assert "tests/skips.py does not list it" in output
    assert why in output


def test_it_fails_in_a_second_try_too(tmp_path: Path) -> None:
    status, output = suite(tmp_path, "test_other.py", SKIPPED, "-p", "tests.again", "--forks", "2")
    assert status != 0, output
    assert "Once more, alone" in output
    assert "RACE" not in output


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    assert suite(tmp_path, "test_other.py", XFAIL)[0] == 0


@pytest.mark.parametrize(
    ("missing", "status", "line", "processes"),
    [
        (None, 0, "SKIPPED 1: needs Chromium (make test-extras)", "0"),
        (None, 0, "SKIPPED 1: needs Chromium (make test-extras)", "2"),
        ({"chromium": "only root can"}, 0, "SKIPPED 1: needs Chromium (only root can)", "0"),
        ({"chromium": ""}, 1, "tests/skips.py does not list it", "2"),
    ],
    ids=["elsewhere", "elsewhere, two processes", "not to be had", "installed, two processes"],
)
def test_an_extra(tmp_path: Path, missing: object, status: int, line: str, processes: str) -> None:
    (tmp_path / "extras.json").write_text(json.dumps(missing))
    extras = [] if missing is None else ["--extras", "extras.json"]
    found, output = suite(tmp_path, CONSOLE, SKIPPED, "--forks", processes, *extras)
    assert found == status, output
    assert line in output


def test_the_list_names_tests_that_are_there() -> None:
    for allowed in ALLOWED:
        path, _, name = allowed.tests.partition("[")[0].partition("::")
        assert (ROOT / path).exists(), path
        assert f"def {name}" in (ROOT / path).read_text() if name else True, allowed.tests


def test_what_is_not_listed_has_no_reason() -> None:
    assert ListedSkips(None).reason("tests/net/test_flow.py::test_it") == ""
