"""Write a CycloneDX bill of materials beside each wheel that this Python can install: `make sbom`.

    python tools/write_sbom.py dist      # fastserve-...whl.cdx.json: JSON, CycloneDX 1.6

It lists the wheel with its digest; libraries that are linked into its modules (the C++ library, Cython's own
code), as the modules name their compilers; and the packages that pip would install with it on that day, with
versions, digests and licences, and their dependencies. Nothing is installed. pip resolves for the Python that
runs it alone, so wheels of several Pythons take several runs.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

COMPILER = re.compile(rb"GCC: \((?P<build>[^)]*)\) (?P<version>\d[\d.]*)")
CYTHON = re.compile(rb"_cython_(\d+)_(\d+)_(\d+)")
GCC = "GPL-3.0-or-later WITH GCC-exception-3.1"
Component = dict[str, Any]


def main(folder: Path) -> int:
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels = [wheel for wheel in folder.glob("fastserve-*.whl") if fits(wheel.name, here, platform.machine())]
    if not wheels:
        print(
            f"{folder} has no wheel of {here} and {platform.machine()}: `make wheel` makes one",
            file=sys.stderr,
        )
        return 1
    for wheel in wheels:
        listed = bill(wheel, linked(modules(wheel)), resolved(wheel), written_at())
        out = wheel.with_name(f"{wheel.name}.cdx.json")
        out.write_text(json.dumps(listed, indent=2) + "\n")
        print(f"{out}: {len(listed['components'])} components")
    return 0


def fits(name: str, interpreter: str, machine: str) -> bool:
    tags = parse_wheel_filename(name)[3]
    return any(tag.interpreter == interpreter and tag.platform.endswith(machine) for tag in tags)


def written_at() -> str:
    """SOURCE_DATE_EPOCH makes two runs alike."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    when = datetime.fromtimestamp(int(epoch), timezone.utc) if epoch else datetime.now(timezone.utc)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def modules(wheel: Path) -> list[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(".so")]


def linked(binaries: Iterable[bytes]) -> list[Component]:
    """Libraries that compilers have put into the modules, by the marks that these leave there."""
    compilers: set[tuple[str, str]] = set()
    cythons: set[str] = set()
    for binary in binaries:
        compilers |= {(m["version"].decode(), m["build"].decode()) for m in COMPILER.finditer(binary)}
        cythons |= {b".".join(found).decode() for found in CYTHON.findall(binary)}
    found = [
        library(name, version, "generic", GCC, description=f"of GCC {build}")
        for version, build in sorted(compilers)
        for name in ("libgcc", "libstdc++")
    ]
    return found + [library("Cython", version, "pypi", "Apache-2.0") for version in sorted(cythons)]


def resolved(wheel: Path) -> list[dict[str, Any]]:
    """The wheel and what comes with it, as pip reports it."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--dry-run"]
    command = [*pip, "--ignore-installed", "--only-binary", ":all:", "--report", "-", str(wheel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return found


def library(name: str, version: str, kind: str, licence: str, **more: Any) -> Component:
    """A component; `licence` is an expression of SPDX's, or "" where it is not known."""
    named = canonicalize_name(name) if kind == "pypi" else quote(name, safe="")
    purl = f"pkg:{kind}/{named}@{quote(version, safe='')}"
    found = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}
    return {**found, "licenses": [{"expression": licence}]} if licence else found


def package(report: dict[str, Any]) -> Component:
    metadata = report["metadata"]
    digests = report["download_info"].get("archive_info", {}).get("hashes", {})
    more: Component = {"hashes": [{"alg": "SHA-256", "content": digests["sha256"]}]} if digests else {}
    return library(
        metadata["name"], metadata["version"], "pypi", metadata.get("license_expression", ""), **more
    )


def name_of(report: dict[str, Any]) -> str:
    return str(canonicalize_name(report["metadata"]["name"]))


def needed(report: dict[str, Any]) -> set[str]:
    """Names of the packages that a package needs here, without its extras."""
    requirements = map(Requirement, report["metadata"].get("requires_dist", []))
    return {
        canonicalize_name(one.name)
        for one in requirements
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def bill(wheel: Path, inside: list[Component], reports: list[dict[str, Any]], written: str) -> dict[str, Any]:
    """The bill's members, in the order of the specification."""
    packages: dict[str, Component] = {name_of(report): package(report) for report in reports}
    root = packages.pop("fastserve")
    root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    root["components"] = inside
    refs: dict[str, str] = {name: one["bom-ref"] for name, one in packages.items()}
    refs["fastserve"] = root["bom-ref"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": written, "component": {**root, "type": "application"}},
        "components": [packages[name] for name in sorted(packages)],
        "dependencies": [
            {
                "ref": refs[name_of(report)],
                "dependsOn": sorted(refs[one] for one in needed(report) & refs.keys()),
            }
            for report in reports
        ],
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
