"""A release: what a wheel needs, what a source distribution has, for which Pythons, and what says so."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
# Imported where they are wanted, with a sentence that says what to install.
OPTIONAL = {
    *("catboost", "flask", "joblib", "lightgbm", "llguidance"),
    *("obstore", "onnxruntime", "pandas", "pillow", "pyzmq", "ray"),
    *("safetensors", "scikit-learn", "scipy", "skops", "tensorflow", "torch", "transformers", "treelite"),
    *("werkzeug", "xgboost"),
}
# Of client commands; no process of a server imports it.
COMMANDS_ALONE = {"grpc"}


def listed(name: str) -> list[Any]:
    """A list of pyproject.toml's; Python 3.10 cannot read the whole."""
    found = re.search(rf"^{name} = (\[.*?\])", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert found is not None
    names: list[Any] = ast.literal_eval(found.group(1))
    return names


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level names of the modules that running the statements may import."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from imported(statement.orelse)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Modules that are neither Python's nor ours, each with the files that import it."""
    found: dict[str, set[str]] = {}
    known = {*sys.stdlib_module_names, "fastserve"}
    for path in (ROOT / "fastserve").rglob("*.py"):
        source = path.read_text()
        # An import begins a line. A tree takes ten times as long as the search.
        if known.issuperset(re.findall(r"^\s*(?:import|from)\s+(\w+)", source, re.M)):
            continue
        for name in set(imported(ast.parse(source).body)) - known:
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_dependencies_are_what_the_package_imports(imports: dict[str, set[str]]) -> None:
    """None that nothing imports, and none that comes only because another package happens to bring it."""
    known = {"PIL": ["pillow"], **packages_distributions()}
    needed = {
        canonicalize_name(one) for name in imports for one in known.get(name, [name]) if one != "fastserve"
    }
    needed = {
        one for one in needed if not one.startswith(("googleapis", "opentelemetry", "tensorflow", "grpcio-"))
    }
    assert needed - OPTIONAL == {Requirement(one).name for one in listed("dependencies")}


def test_grpcio_is_for_clients_alone(imports: dict[str, set[str]]) -> None:
    for name in COMMANDS_ALONE:
        assert {path.rpartition("/")[0] for path in imports[name]} <= {"fastserve/cli", "fastserve/client"}


def test_pythons_of_a_release() -> None:
    """Wheels are built and tried for the same Pythons; the ones that the package names are among them."""
    tried = workflow()["jobs"]["installed"]["strategy"]["matrix"]["python"]
    assert listed("build") == [f"cp{version.replace('.', '')}-manylinux*" for version in tried]
    named = re.findall(r"Python :: (3\.\d+)\"", PYPROJECT)
    assert named == tried[: len(named)]
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "README.md").read_text()


def workflow() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    return read


def test_a_release_is_published_after_all_of_it_was_tested() -> None:
    jobs = workflow()["jobs"]

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        named = {needs} if isinstance(needs, str) else set(needs)
        return named.union(*map(before, named))

    assert before("publish") == {"suite", "sdist", "wheels", "installed"}
    assert before("page") == before("publish") | {"publish"}
    granted = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert granted == {"publish": {"id-token": "write"}, "page": {"contents": "write"}}
    assert workflow()["permissions"] == {"contents": "read"}


def test_a_release_runs_what_there_is() -> None:
    """Files of the checkout that its commands name."""
    commands = "\n".join(
        step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step
    )
    named = set(re.findall(r"\b(?:tools|bench)/\w+\.py|\.ci/\w+", commands))
    assert named == {".ci/run", "bench/first_answer.py", "tools/write_sbom.py"}
    assert all((ROOT / name).exists() for name in named)


def sources(folder: str) -> Iterator[str]:
    for path in (ROOT / folder).rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        product = path.suffix in {".so", ".binpb", ".pyc"} or name == "fastserve/protos/model_config.py"
        if path.is_file() and not product:
            yield name


@pytest.mark.torture
def test_a_source_distribution_builds_a_wheel(tmp_path: Path) -> None:
    """From what is in it alone; one compiled module stands for all."""
    where = ["egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run([sys.executable, "setup.py", "-q", *where], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("fastserve-*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        packed.extractall(tmp_path, filter="data")
    needed = {one for folder in ("fastserve", "ext", "protos", "tests/smoke") for one in sources(folder)}
    needed |= {"LICENSE", "README.md", "setup.py", "pyproject.toml", "tools/check_compiler.py"}
    assert needed <= names
    more = {name for name in names - needed if "." in name and "egg-info" not in name}
    written = {"CHANGELOG.md", "MANIFEST.in", "setup.cfg"}
    assert more == written | {"tools/write_triton_structs.py"}

    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-index"]
    command = [*pip, "--no-build-isolation", "--no-deps", "-w", str(tmp_path), "."]
    environment = {**os.environ, "FASTSERVE_EXT": "crc32c"}
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fastserve-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        inside = packed.namelist()
    assert any(re.fullmatch(r"fastserve/_ext/crc32c\..*\.so", name) for name in inside)
    assert {one for one in needed if one.startswith("fastserve/")} <= set(inside)
    assert {"fastserve/protos/kserve_v2.binpb", "fastserve/protos/model_config.py"} <= set(inside)


def report(name: str, version: str, *requires: str) -> dict[str, Any]:
    """A package in pip's report of an installation."""
    return {
        "metadata": {"name": name, "version": version, "requires_dist": list(requires)},
        "download_info": {"url": "", "archive_info": {"hashes": {"sha256": f"{version}-digest"}}},
    }


def test_a_bill_of_materials_has_what_is_linked_and_what_comes_along(tmp_path: Path) -> None:
    sbom = runpy.run_path(str(ROOT / "tools/write_sbom.py"))
    wheel = tmp_path / "fastserve-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    module = b"\x7fELF..GCC: (Maker 12.2.0-1) 12.2.0\0.._cython_3_1_2.."
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("fastserve/_ext/meter.cpython-311-x86_64-linux-gnu.so", module)
        packed.writestr("fastserve/_ext/slab.cpython-311-x86_64-linux-gnu.so", module)
    inside = sbom["linked"](sbom["modules"](wheel))
    reports = [
        report("fastserve", "0.1.0", "NumPy>=1", 'torch>=2; extra == "torch"', "tokenizers"),
        report("numpy", "2.0"),
        report("tokenizers", "0.22", "huggingface_hub", 'nothing; python_version < "3"'),
        report("huggingface_hub", "1.0"),
    ]
    bill = sbom["bill"](wheel, inside, reports, "2026-01-01T00:00:00Z")
    root = bill["metadata"]["component"]
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert [one["purl"] for one in root["components"]] == [
        "pkg:generic/libgcc@12.2.0",
        "pkg:generic/libstdc%2B%2B@12.2.0",
        "pkg:pypi/cython@3.1.2",
    ]
    assert [one["purl"] for one in bill["components"]] == [
        "pkg:pypi/huggingface-hub@1.0",
        "pkg:pypi/numpy@2.0",
        "pkg:pypi/tokenizers@0.22",
    ]
    assert bill["components"][1]["hashes"] == [{"alg": "SHA-256", "content": "2.0-digest"}]
    assert {one["ref"]: one["dependsOn"] for one in bill["dependencies"]} == {
        "pkg:pypi/fastserve@0.1.0": ["pkg:pypi/numpy@2.0", "pkg:pypi/tokenizers@0.22"],
        "pkg:pypi/numpy@2.0": [],
        "pkg:pypi/tokenizers@0.22": ["pkg:pypi/huggingface-hub@1.0"],
        "pkg:pypi/huggingface-hub@1.0": [],
    }


def test_a_bill_is_written_for_wheels_that_this_python_installs() -> None:
    fits = runpy.run_path(str(ROOT / "tools/write_sbom.py"))["fits"]
    name = "fastserve-0.1.0-cp310-cp310-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
    assert fits(name, "cp310", "x86_64")
    assert not fits(name, "cp311", "x86_64")
    assert not fits(name, "cp310", "aarch64")
