"""Installs torch for the tests, in its CPU build: `make build` runs it.

    python tools/install_torch.py            # where pip would take a CPU build; says so where it would not
    python tools/install_torch.py INDEX      # from an index of CPU builds
    python tools/install_torch.py any        # whatever pip finds: as `make test` does: CUDA has 3 GB

Most indices have the CUDA build under the same name; builds for CPUs alone have `+cpu` in their version.
pip is asked which versions there are before it downloads any. An index that cannot be reached costs a
minute at most.
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

HOW = (
    "make build TORCH_INDEX=URL takes it from an index of CPU builds (pytorch.org names PyTorch's), "
    "make build TORCH_INDEX=any whatever pip finds"
)
PATIENCE = ["--timeout", "15", "--retries", "1"]
ASKING_S = 60


def wanted() -> Requirement:
    """What pyproject.toml says. Python 3.10 has no tomllib: it is cut out of the text."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    found = re.search(r"^test-torch = \[\"(.*?)\"\]$", text, re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml has no extra test-torch")
    return Requirement(found.group(1))


def installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def pip(command: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *command.split(), "--disable-pip-version-check", *arguments]


def builds(requirement: Requirement) -> list[Version]:
    """Those that pip finds for this Python and machine, the newest first; none where no index answers."""
    asked = pip("index versions", *PATIENCE, requirement.name)
    try:
        done = subprocess.run(
            asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=ASKING_S
        )
    except subprocess.TimeoutExpired:
        return []
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    found = map(Version, listed.group(1).split(", ")) if listed else ()
    return sorted(requirement.specifier.filter(found), reverse=True)


def main(index: str) -> int:
    requirement = wanted()
    text = f"{requirement.name}{requirement.specifier}"
    if installed(requirement):
        return 0
    if index == "any":
        return subprocess.run(pip("install -q", text)).returncode
    if index:
        return subprocess.run(pip("install -q", *PATIENCE, "--index-url", index, text)).returncode
    found = builds(requirement)
    chosen = next((one for one in found if one.local == "cpu"), None)
    if chosen is None:
        why = "pip finds its CUDA build, of 3 GB" if found else "pip finds no build of it"
        print(f"torch is left out ({why}): {HOW}", file=sys.stderr)
        return 0
    return subprocess.run(pip("install -q", f"{requirement.name}=={chosen}")).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
