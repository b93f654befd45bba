"""Tests run in forked processes: each once, told as they are, with nothing of another's in their way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tests
from tests.forks import Shares

ROOT = Path(tests.__path__[0]).parent
COLLECTED = """
import os, pathlib
with (pathlib.Path(__file__).parent / "collected").open("a") as file:
    file.write("once ")
"""
SHARED = """
import os, pathlib, pytest
@pytest.fixture(scope="package")
def server():
    here = pathlib.Path(__file__).parent
    (here / f"up-{os.getpid()}").touch()
    yield os.getpid()
    (here / f"up-{os.getpid()}").rename(here / f"down-{os.getpid()}")
"""
USES = "import os\ndef test_a(server): assert server == os.getpid()\ndef test_b(server): pass\n"
NAMED = """
import os
def test_folder_and_output(tmp_path, capfd):
    print("said in a test")
    assert capfd.readouterr().out == "said in a test\\n"
    (tmp_path.parent / f"of-{os.getpid()}").touch()
    assert [one.name for one in tmp_path.parent.glob("of-*")] == [f"of-{os.getpid()}"]
"""
OUTCOMES = """
import pytest, warnings
def test_good(): pass
def test_bad(): print("what it wrote"); assert "left" == "right"
def test_left_out(): pytest.skip("for a reason")
@pytest.mark.xfail
def test_expected(): assert 0
def test_warned(): warnings.warn("something old", DeprecationWarning)
"""
WAITS = """
import pathlib, time
def test_waits(server):
    pathlib.Path(__file__).with_name("waits").touch()
    time.sleep(100)
"""
FAILS = """
import pathlib, time
def test_fails():
    while not (pathlib.Path(__file__).parents[1] / "p" / "waits").exists(): time.sleep(0.01)
    assert 0
"""
DIES = "import os\ndef test_first(): pass\ndef test_dies(): os._exit(3)\ndef test_never(): pass\n"


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -p tests.forks -p no:cacheprovider --import-mode=importlib\n"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def write(folder: Path, **sources: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def test_each_runs_once_where_its_folder_is(tmp_path: Path) -> None:
    """Collected once; the server of a folder starts once while there are others to work on, and is ended."""
    for name in "pq":
        write(
            tmp_path / name, __init__="", conftest=SHARED, test_1=COLLECTED + USES, test_2=USES, test_3=USES
        )
    status, output = run(tmp_path, "--forks", "2")
    assert status == 0, output
    assert "12 passed" in output
    for name in "pq":
        assert (tmp_path / name / "collected").read_text() == "once "
        assert 1 <= len(list((tmp_path / name).glob("down-*"))) <= 2
        assert not list((tmp_path / name).glob("up-*"))


def test_processes_have_folders_and_outputs_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, **{f"test_{number}": NAMED for number in range(4)})
    status, output = run(tmp_path, "--forks", "3")
    assert status == 0, output
    assert "4 passed" in output


def test_outcomes_are_told_as_without(tmp_path: Path) -> None:
    write(tmp_path, test_outcomes=OUTCOMES)
    lines = []
    for forks in "02":
        status, output = run(tmp_path, "--forks", forks, "-rs")
        assert status == 1, output
        assert "what it wrote" in output
        assert "something old" in output
        assert "SKIPPED [1] test_outcomes.py:5: for a reason" in output
        lines.append(output.splitlines()[-1].partition(" in ")[0])
    assert lines[0] == lines[1]
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed, 1 warning" in lines[0]


def test_a_process_that_dies_fails_the_run(tmp_path: Path) -> None:
    """With the test that it ran; the others go on, and what nobody ran is told."""
    write(tmp_path, test_dies=DIES, test_outcomes="def test_good(): pass\n", test_z="def test_good(): pass\n")
    status, output = run(tmp_path, "--forks", "2")
    assert status == 1, output
    assert "the process that ran test_dies.py::test_dies has died, with status 3" in output
    assert "2 tests did not run to their end, because a process died: test_dies.py::test_dies" in output
    assert "1 failed, 3 passed" in output


def test_a_run_stops_where_pytest_is_told_to(tmp_path: Path) -> None:
    """At the first failure: what another process runs is interrupted, and its fixtures end."""
    write(tmp_path / "p", conftest=SHARED, test_a=WAITS)
    write(tmp_path / "q", test_b=FAILS)
    status, output = run(tmp_path, "--forks", "2", "-x")
    assert status == 1, output
    assert "stopping after 1 failures" in output
    assert len(list((tmp_path / "p").glob("down-*"))) == 1


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_file_is_taken_once(processes: int) -> None:
    """A process stays in its folder, then goes where nobody is, then helps."""
    files = [
        f"{folder}/test_{number}.py::test_{case}" for folder in "abc" for number in range(3) for case in "xy"
    ]
    shares = Shares(files)
    took: list[list[range]] = [[] for _ in range(processes)]
    for turn in range(9):
        taken = shares.take(turn % processes)
        assert taken is not None
        took[turn % processes].append(taken)
    assert [shares.take(process) for process in range(processes)] == [None] * processes
    assert sorted(at for one in took for taken in one for at in taken) == list(range(len(files)))
    if processes == 3:  # one in each folder
        assert [[taken.start // 6 for taken in one] for one in took] == [[0] * 3, [1] * 3, [2] * 3]
    if processes == 2:  # the third is shared
        assert [[taken.start // 6 for taken in one][:3] for one in took] == [[0] * 3, [1] * 3]


def test_a_folder_where_nobody_is_comes_first() -> None:
    shares = Shares([f"{folder}/test_{number}.py::test_it" for folder in "ab" for number in range(2)])
    assert [shares.take(0), shares.take(1)] == [range(1), range(2, 3)]
    assert [shares.take(0), shares.take(0), shares.take(1)] == [range(1, 2), range(3, 4), None]


def test_files_that_wait_are_for_one_process() -> None:
    """It begins with them; who has nothing else to do helps with them."""
    nodeids = [f"{folder}/test_{number}.py::test_it" for folder in "ab" for number in range(3)]
    shares = Shares(nodeids, waiting={1, 2, 4})
    assert [shares.take(1), shares.take(0), shares.take(1)] == [range(1), range(1, 2), range(3, 4)]
    assert [shares.take(1), shares.take(0), shares.take(0)] == [range(5, 6), range(2, 3), range(4, 5)]
    assert shares.take(1) is None
    shares = Shares(nodeids, waiting={5})
    assert [shares.take(1) for _ in range(7)] == [*(range(at, at + 1) for at in range(6)), None]


def test_a_marked_file_is_one_that_waits(tmp_path: Path) -> None:
    source = (
        "from pathlib import Path\ndef test_it(): Path(__file__).with_name('ran').open('a').write('{}')\n"
    )
    marked = "import pytest\npytestmark = pytest.mark.waits\n" + source.format("b")
    write(tmp_path, test_a=source.format("a"), test_b=marked)
    status, output = run(tmp_path, "--forks", "1")
    assert status == 0, output
    assert (tmp_path / "ran").read_text() == "ba"
