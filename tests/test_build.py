"""What somebody reads who builds on a machine that lacks something."""

from __future__ import annotations

import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECK = [sys.executable, str(ROOT / "tools" / "check_compiler.py")]


def check(**environment: str) -> tuple[int, str]:
    done = subprocess.run(
        CHECK, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def stand_in(folder: Path, script: str) -> str:
    """A compiler that does what the test says."""
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_machine_that_can_compile_is_told_nothing() -> None:
    assert check() == (0, "")


def test_no_compiler() -> None:
    status, told = check(CXX="no-such-compiler -O2")
    assert status == 1
    assert told.startswith(
        "fastserve cannot be built: there is no C++ compiler (no-such-compiler): install one"
    )
    assert "apt install g++" in told


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "cannot compile C++20"),
        ('grep -q Python.h "$(eval echo \\$$#)" && exit 1; exit 0', "headers"),
    ],
)
def test_a_compiler_that_does_not_do(tmp_path: Path, script: str, said: str) -> None:
    status, told = check(CXX=stand_in(tmp_path, script))
    assert status == 1
    assert said in told


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by a program that it can still run."""
    module = runpy.run_path(CHECK[1])
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert module["fault"]().startswith("Python 3.9 is too old, it needs 3.10 or newer")


def test_setup_checks_before_it_compiles() -> None:
    """Who installs from the sources without make is told the same."""
    environment = {**os.environ, "CXX": "no-such-compiler", "FASTSERVE_EXT": "meter"}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "fastserve cannot be built: there is no C++ compiler (no-such-compiler)" in done.stderr


def test_make_checks_first(tmp_path: Path) -> None:
    """Before an environment is made and anything is installed into it."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    for name in ("Makefile", "pyproject.toml", "tests/clients.txt", "tools/check_compiler.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    environment = {**os.environ, "CXX": "no-such-compiler"}
    command = ["make", "build", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "there is no C++ compiler (no-such-compiler)" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("name", ["decimal_table", "float_table"])
def test_a_table_is_what_its_tool_writes(name: str) -> None:
    tool = ROOT / "tools" / f"generate_{name}.py"
    written = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=True)
    assert written.stdout == (ROOT / "ext" / "include" / f"{name}.h").read_text()
