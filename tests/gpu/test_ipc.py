"""Memory that one process lends to another, by the driver alone: over the simulated one, and over a real one
where there is a GPU, which has to do as the other says it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.devices.simulated import FakeGpus

ROOT = Path(__file__).parents[2]
LENDER = """
from bench.gpu.place import ClientMemory
memory = ClientMemory(1 << 22)
print(memory.handle.hex(), flush=True)
input()
memory.free()
"""
BORROWER = """
import mmap, sys
from fastserve.devices.cuda import Cuda, CudaFault
cuda = Cuda.load()
cuda.enter(0)
handle, nbytes = bytes.fromhex(sys.argv[1]), 1 << 22
at = cuda.open_handle(handle)
assert cuda.open_handle(handle) == at, "a second opening is counted"
print("extent", cuda.extent(at), "device", cuda.device_of(at))
assert cuda.extent(at) is None or cuda.extent(at) >= nbytes
assert cuda.device_of(at) in (0, None)
arena = mmap.mmap(-1, nbytes)
start = cuda.register(arena)
arena[:] = bytes(range(256)) * (nbytes // 256)
for source in (arena, bytes(arena)):                    # registered, and pageable
    cuda.to_device(at, source)
    back = mmap.mmap(-1, nbytes)
    cuda.to_host(back, at)
    assert back[:] == arena[:]
cuda.unregister(start)
try:
    cuda.to_host(bytearray(1), at + (1 << 40))
except CudaFault as fault:
    assert fault.code == 1, fault                       # and the context goes on
else:
    raise AssertionError("far beyond the memory was read")
cuda.to_host(bytearray(8), at)
cuda.close_handle(at)
cuda.to_host(bytearray(8), at)                          # open still: once
cuda.close_handle(at)
for told in cuda.describe(0).values():
    print(told)
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


def lend_and_borrow(**environment: str) -> None:
    with start(LENDER, **environment) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        handle = lender.stdout.readline().strip()
        with start(BORROWER, handle, **environment) as borrower:
            told, words = borrower.communicate(timeout=100)
        assert borrower.returncode == 0, words
        assert "extent" in told
        _, words = lender.communicate("\n", timeout=100)
        assert lender.returncode == 0, words


def test_over_the_simulated_driver(tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path)
    lend_and_borrow(**gpus.environment)
    assert gpus.broken == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"PyTorch {torch.__version__}: no GPU is seen")
def test_over_a_real_driver() -> None:
    lend_and_borrow()
