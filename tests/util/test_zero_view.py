"""Zeros that take no memory, however many."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.util.memory import zero_view


def resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_of_any_size() -> None:
    before = resident_kb()
    held = [zero_view(nbytes) for nbytes in (0, 1, 600_000, 100 << 20, 3 << 30, 7)]
    assert [view.nbytes for view in held] == [0, 1, 600_000, 100 << 20, 3 << 30, 7]
    assert resident_kb() - before < 4096
    assert all(view.readonly and view.format == "B" for view in held)
    assert bytes(held[2]) == bytes(600_000)
    assert held[4][-1] == 0


def test_more_than_there_is() -> None:
    with pytest.raises(MemoryError):
        zero_view(1 << 62)
