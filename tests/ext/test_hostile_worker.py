"""I4: a worker that writes anything anywhere in the arena cannot crash a front, mislead it or stop it."""

from __future__ import annotations

import ast
import mmap
import os
import random
import subprocess
import sys

import pytest

from fastserve._ext import batch_ring
from fastserve._ext.batch_ring import BatchRing

SECONDS = 0.5
# Everything before the first slot's columns is control words; small columns keep the aim good.
LAYOUTS = {
    "columns": {"inputs": [8, 4], "outputs": [16], "slab_pages": 0},
    "slabs": {"inputs": [], "outputs": [], "slab_pages": 24},
}


def start(what: str, fd: int, size: int, **streams: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.ext.hostile", what, str(fd), str(size), str(SECONDS)]
    return subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True, **streams)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_front_lives_with_a_worker_gone_mad(layout):
    shape = {"slots": 4, "max_rows": 4, "workers": 2, "fronts": 2, **LAYOUTS[layout]}
    size = -(-batch_ring.measure(**shape) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("hostile")
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        batch_ring.format_arena(memory, **shape)
    front = start("front", fd, size, stdin=subprocess.PIPE)
    assert front.stdout.readline() == "attached\n"
    worker = start("scrawl", fd, size)
    os.close(fd)
    assert worker.stdout.readline() == "scrawling\n"
    told, _ = front.communicate("go\n", timeout=60)
    written, _ = worker.communicate(timeout=120)
    assert front.returncode == 0, f"the front ended with {front.returncode}"
    done = ast.literal_eval(told)
    # far less than what it comes to, on a busy machine and under sanitizers too
    assert int(written) > 50_000
    assert done["reserve"] > 100
    assert done["drain"] > 100
    assert done["reclaim_front"] > 5


@pytest.mark.parametrize("seed", range(40))
def test_a_scrawled_header_is_not_believed_by_who_joins_later(seed):
    """Either the memory is refused, or what the joiner believes is what was laid out."""
    rng = random.Random(seed)
    shape = {"slots": 3, "max_rows": 4, "inputs": [8], "outputs": [4], "fronts": 2, "slab_pages": 4}
    memory = mmap.mmap(-1, batch_ring.measure(**shape))
    batch_ring.format_arena(memory, **shape)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(0, 2200 // 4) * 4
        memory[at : at + 4] = rng.choice([0, 1, 2, 5, 64, 65, 0xFFFF, 1 << 20, 1 << 31]).to_bytes(4, "little")
    try:
        ring = BatchRing(memory, front=1)
    except ValueError:
        return
    for _ in range(20):
        lease = ring.reserve(1)
        if lease < 0:
            break
        for column in range(ring.inputs):
            view = ring.input_rows(lease, 1, column)
            view[:] = bytes(len(view))
        ring.abandon(lease, 1)
        ring.drain()
