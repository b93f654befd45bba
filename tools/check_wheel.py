"""Looks into the newest wheel of a folder: compiled modules, stubs, demo data in, sources out; its size."""

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 10_250_000  # measured: 10,000,000; the demo's text model takes 5.9 of it, compiled modules 2.4


def faults(names: set[str]) -> Iterator[str]:
    for path in sorted((ROOT / "ext").glob("*.pyx")):
        if not any(n.startswith(f"fastserve/_ext/{path.stem}.") and n.endswith(".so") for n in names):
            yield f"no compiled module for ext/{path.name}"
        if f"fastserve/_ext/{path.stem}.pyi" not in names:
            yield f"no stub for ext/{path.name}"
    wanted = [p for p in (ROOT / "fastserve").rglob("*") if p.is_file() and shipped(p)]
    for path in wanted:
        if path.relative_to(ROOT).as_posix() not in names:
            yield f"{path.relative_to(ROOT)} is missing"
    for name in sorted(names):
        inside = name.startswith("fastserve/") and not name.endswith(".so")
        source = ROOT / "ext" / f"{Path(name).name.partition('.')[0]}.pyx"
        if name.endswith(".so") and source.stem != "_cyutility" and not source.exists():
            yield f"{name} is of an earlier build: make clean"
        if inside and not (ROOT / name).exists():
            yield f"{name} is in the wheel but not in the tree"
        if not name.startswith(("fastserve/", "fastserve-")) or name.endswith((".pyx", ".cpp", ".h")):
            yield f"{name} does not belong into the wheel"


def shipped(path: Path) -> bool:
    return "__pycache__" not in path.parts and path.suffix not in {".so", ".pyc"}


def main(folder: str) -> int:
    wheels = sorted(Path(folder).glob("fastserve-*.whl"), key=lambda p: p.stat().st_mtime)
    if not wheels:
        print(f"no wheel in {folder}")
        return 1
    with zipfile.ZipFile(wheels[-1]) as wheel:
        found = list(faults(set(wheel.namelist())))
    nbytes = wheels[-1].stat().st_size
    if nbytes >= MOST_BYTES:
        found.append(f"the wheel has {nbytes} bytes, allowed: fewer than {MOST_BYTES}")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "dist"))
