"""The processors that this process may use, and where they lie: cores, nodes of memory, the share of a
container.

    usable_cores()     4       the affinity of this process, and the CPU quota of its control group
    read_topology()            cores with their hardware threads, by node, from /sys
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYS, PROC = Path("/sys"), Path("/proc")
CGROUPS = "fs/cgroup"


def usable_cores(sys: Path = SYS, proc: Path = PROC) -> int:
    """Return how many processors this process may use at a time, at least 1: those of its affinity, or the
    quota of its control group where that is less (1.5 counts as 1)."""
    cores = len(os.sched_getaffinity(0))
    quota = read_quota(sys, proc)
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def read_quota(sys: Path = SYS, proc: Path = PROC) -> float | None:
    """Return the processors that the control groups of this process allow it, None for no limit. The least
    of a group and those above it counts."""
    quotas = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = sys / CGROUPS / controllers
        # Inside a container the path may be the host's, whose folders are not there.
        for folder in _up(root, path):
            found = _quota_v1(folder) if controllers else _quota_v2(folder)
            if found is not None:
                quotas.append(found)
    return min(quotas, default=None)


def _up(root: Path, path: str) -> Iterable[Path]:
    """Yield the folder of a control group and of each one above it."""
    folder = root / path.lstrip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Return the processors of a quota as the kernel writes it: "max" or -1 is no limit."""
    try:
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return found if found > 0 else None


def _read(path: Path) -> str:
    """Return the text of a file of the kernel's, "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Core:
    """One core: the processors that are its hardware threads, and the node of memory beside it."""

    node: int
    processors: tuple[int, ...]


def read_topology(sys: Path = SYS, allowed: Iterable[int] | None = None) -> tuple[Core, ...]:
    """Return the cores that this process may use, by node and number. Without tables in /sys each processor
    is a core of node 0."""
    wanted = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = _read_nodes(sys)
    cores = dict[tuple[int, ...], Core]()
    for processor in wanted:
        text = _read(sys / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        siblings = [one for one in parse_list(text) if one in wanted] or [processor]
        cores.setdefault(tuple(siblings), Core(nodes.get(processor, 0), tuple(siblings)))
    return tuple(sorted(cores.values(), key=lambda core: (core.node, core.processors)))


def _read_nodes(sys: Path) -> dict[int, int]:
    """Return the node of each processor."""
    found = dict[int, int]()
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        for processor in parse_list(_read(folder / "cpulist")):
            found[processor] = int(folder.name.removeprefix("node"))
    return found


def parse_list(text: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it, "0-3,8"."""
    found = list[int]()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
