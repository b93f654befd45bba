"""Numbers of /proc; and a machine that says nothing."""

from __future__ import annotations

from pathlib import Path

from fastserve.metrics.readiness import MachineUsage


def write(folder: Path, *ticks: int) -> None:
    (folder / "stat").write_text(f"cpu  {' '.join(map(str, ticks))} 7 7\ncpu0 1 1 1 1\n")


def test_busy_share_since_the_last_look(tmp_path: Path) -> None:
    write(tmp_path, 100, 0, 100, 1000, 100, 0, 0, 0)
    machine = MachineUsage(tmp_path)
    write(tmp_path, 110, 5, 110, 1060, 110, 2, 2, 1)
    assert machine.cpu_utilization() == 30 / 100
    assert machine.cpu_utilization() == 0.0
    write(tmp_path, 1, 1, 1, 1, 1, 1, 1, 1)
    assert machine.cpu_utilization() == 0.0, "counters that went back"


def test_used_is_what_is_not_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nHuge: 0\n")
    assert MachineUsage(tmp_path).memory_bytes() == (1_024_000, 614_400)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    machine = MachineUsage(tmp_path)
    assert (machine.cpu_utilization(), machine.memory_bytes()) == (0.0, (0, 0))


def test_this_machine() -> None:
    total, used = MachineUsage().memory_bytes()
    assert 0 < used < total
