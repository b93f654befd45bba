"""Processors as the kernel's files tell of them: made-up ones, and this machine's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastserve.util.cpus import Core, parse_list, read_quota, read_topology, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


A = "sys/fs/cgroup/a/"
GROUP = {"proc/self/cgroup": "0::/a/b"}
V1 = {"proc/self/cgroup": "4:cpu,cpuacct:/a\n3:memory:/m\n0::/"}
V1_FILES = "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_{}_us"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (GROUP, None),
        ({**GROUP, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({**GROUP, "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2.5),
        (
            {**GROUP, "sys/fs/cgroup/a/cpu.max": "50000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"},
            0.5,
        ),
        (
            {**GROUP, "sys/fs/cgroup/cpu.max": "300000 100000"},
            3.0,
        ),  # a container, by the host's path
        ({**V1, V1_FILES.format("quota"): "150000", V1_FILES.format("period"): "100000"}, 1.5),
        ({**V1, V1_FILES.format("quota"): "-1", V1_FILES.format("period"): "100000"}, None),
        ({**GROUP, "sys/fs/cgroup/a/b/cpu.max": "nonsense"}, None),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, files)
    assert read_quota(tmp_path / "sys", tmp_path / "proc") == quota


def test_cores_are_those_of_the_affinity_or_of_the_quota(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    assert usable_cores(sys, proc) == allowed
    write(tmp_path, {**GROUP, "sys/fs/cgroup/a/b/cpu.max": "50000 100000"})
    assert usable_cores(sys, proc) == 1
    write(tmp_path, {"sys/fs/cgroup/a/b/cpu.max": "99900000 100000"})
    assert usable_cores(sys, proc) == allowed
    assert 1 <= usable_cores() <= allowed


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("1,3-4", [1, 3, 4])]
)
def test_lists(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers


def test_two_nodes_of_two_cores_with_two_threads(tmp_path: Path) -> None:
    files = {"devices/system/node/node0/cpulist": "0-1,4-5", "devices/system/node/node1/cpulist": "2-3,6-7"}
    for processor in range(8):
        siblings = f"{processor % 4},{processor % 4 + 4}"
        files[f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"] = siblings
    write(tmp_path, files)
    whole = read_topology(tmp_path, range(8))
    assert whole == (Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7)))
    assert read_topology(tmp_path, [1, 2, 6]) == (Core(0, (1,)), Core(1, (2, 6)))


def test_without_tables_every_processor_is_a_core(tmp_path: Path) -> None:
    assert read_topology(tmp_path, [0, 3]) == (Core(0, (0,)), Core(0, (3,)))


def test_this_machine() -> None:
    cores = read_topology()
    assert sorted(number for core in cores for number in core.processors) == sorted(os.sched_getaffinity(0))
