"""Messages of a build on a machine that lacks something."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import socket
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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
    """An installation from the sources without make is told so too."""
    environment = {**os.environ, "CXX": "no-such-compiler", "FASTSERVE_EXT": "crc32c"}
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


def empty_wheel(folder: Path, version: str) -> None:
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"torch-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )


@pytest.fixture
def torch_builds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The builds of torch that are found with these settings of pip."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    module = runpy.run_path(str(ROOT / "tools" / "install_torch.py"))

    def found(**settings: str) -> list[str]:
        for name, value in {"CONFIG_FILE": os.devnull, **settings}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        return [str(one) for one in module["builds"](Requirement("torch>=2.6,<2.14"))]

    return found


def test_torch_has_its_cpu_build_found_first(tmp_path: Path, torch_builds: Callable[..., list[str]]) -> None:
    for version in ("2.5.0", "2.12.0", "2.13.0", "2.13.0+cpu", "2.14.0"):
        empty_wheel(tmp_path, version)
    assert torch_builds(NO_INDEX="1", FIND_LINKS=str(tmp_path)) == ["2.13.0+cpu", "2.13.0", "2.12.0"]


def test_torch_of_an_index_that_cannot_be_reached(torch_builds: Callable[..., list[str]]) -> None:
    """A port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert torch_builds(INDEX_URL=f"http://127.0.0.1:{held.getsockname()[1]}/simple") == []


@pytest.mark.parametrize(
    ("found", "left", "installed"),
    [
        (["2.13.0+cpu", "2.13.0"], "", "torch==2.13.0+cpu"),
        (["2.13.0"], "CUDA build", ""),
        ([], "no build", ""),
    ],
)
def test_torch_is_installed_in_its_cpu_build_alone(
    found: list[str],
    left: str,
    installed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("install_torch")
    ran: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(module, "installed", lambda requirement: False)
    monkeypatch.setattr(module, "builds", lambda requirement: [Version(one) for one in found])
    monkeypatch.setattr(module.subprocess, "run", run)
    assert module.main("") == 0
    assert [command[-1] for command in ran] == ([installed] if installed else [])
    told = capsys.readouterr().err
    assert left in told
    assert bool(told) == bool(left)
    assert module.main("any") == 0
    assert ran[-1][-1] == "torch<2.14,>=2.6"


def test_what_make_build_installs_brings_no_torch() -> None:
    """Of the project's own extras, those of the Makefile."""
    chosen = re.findall(r"-e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(chosen) == 1
    project = (ROOT / "pyproject.toml").read_text()
    for extra in chosen[0].split(","):
        found = re.search(rf"^{extra} = (\[.*?\])(?: *#.*)?$", project, re.MULTILINE | re.DOTALL)
        assert found is not None
        names = {Requirement(line).name for line in ast.literal_eval(found.group(1))}
        assert names
        assert not names & {"torch", "fastserve"}


OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "ARGS")
"""Variables that `make test ARGS=...` hands on."""


def test_what_make_serve_installs_is_what_the_server_imports(tmp_path: Path) -> None:
    """Build requirements and the package without extras: no tests, linters, clients or torch."""
    for name in ("tools", "tests", "protos", "ext"):
        (tmp_path / name).mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py", "tests/clients.txt", "tools/check_compiler.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools/write_triton_structs.py").touch()
    command = ["make", "-n", "serve", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    installed = re.findall(r"pip install (?:--\S+ |-q )*(.*)", done.stdout)
    assert installed == ["$(.venv/bin/python tools/requirements.py requires)", "-e ."]
    assert "setup.py -q build_ext --inplace" in done.stdout
    assert "setup.py -q protos" in done.stdout
    assert done.stdout.rstrip().endswith("exec .venv/bin/fastserve serve demo")
