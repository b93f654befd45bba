"""The allocator's setting, in a process of its own because it cannot be taken back."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from fastserve.util.memory import LOOKS, REST_SHARE, TRIM_BYTES, HeapTrim
from fastserve.util.memory_budget import Claim, MemoryBudget


@pytest.mark.parametrize("name", ["keep_freed_memory", "share_heap"])
def test_it_can_be_set(name: str) -> None:
    code = f"import sys; from fastserve.util.memory import {name}; sys.exit(0 if {name}() else 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_heap_is_trimmed_when_a_burst_is_over() -> None:
    def trims(peaks: list[int], took_s: float = 0.0) -> list[int]:
        """The looks at which it is trimmed."""
        found, now = [], [0.0]

        def trim() -> None:
            found.append(look)
            now[0] += took_s

        async def main() -> None:
            nonlocal look
            budget = MemoryBudget(1 << 40)
            heap = HeapTrim(budget, trim, lambda: now[0], lambda: 0)
            for look in range(len(peaks)):
                budget.peak = peaks[look]
                running = heap.look()
                if running is not None:
                    await running
                now[0] += 0.5

        look = 0
        asyncio.run(main())
        return found

    burst, calm = 50 * TRIM_BYTES, [0] * LOOKS
    assert trims([burst, *calm, *calm]) == [LOOKS]
    assert trims([burst, 0] * 10) == []  # bodies come and go
    assert trims([TRIM_BYTES - 1, *calm]) == []
    assert trims([burst, *calm, burst, *calm]) == [LOOKS, 2 * LOOKS + 1]
    rest = int(REST_SHARE * 0.1 / 0.5)
    (first, second) = trims([burst, *calm, burst, *calm * rest], took_s=0.1)
    assert second - first >= rest


def test_a_heap_is_trimmed_at_once_when_it_has_more_than_the_budget_allows() -> None:
    limit, own, trims = 64 << 20, [100 << 20], [0]

    def trim() -> None:
        trims[0] += 1

    async def main() -> list[int]:
        found: list[int] = []
        budget = MemoryBudget(limit)
        heap = HeapTrim(budget, trim, lambda: 0.0, lambda: own[0])
        heap.look()
        for free in (0, limit // 4 - 1, limit // 4, limit, 0):
            claim = Claim(budget)
            claim.set(limit // 2)
            own[0] = (100 << 20) + free
            claim.release()
            if heap._running is not None:
                await heap._running
            found.append(trims[0])
        return found

    assert asyncio.run(main()) == [0, 0, 1, 2, 2]


def test_memory_that_was_freed_between_blocks_comes_back() -> None:
    code = """
import re
from fastserve.util.memory import keep_freed_memory, share_heap, trim_heap
def mb(): return int(re.search(r"RssAnon:\\s+([0-9]+)", open("/proc/self/status").read())[1]) / 1024
share_heap(), keep_freed_memory()
large, small = [], []
for _ in range(40):
    large.append(bytearray(b"x") * (5 << 20)), small.append(bytearray(60000))
before = mb()
large.clear()
assert before - mb() < 100, "it comes back by itself"
assert trim_heap()
assert before - mb() > 190
"""
    subprocess.run([sys.executable, "-c", code], check=True)
