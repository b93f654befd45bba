"""The calls of devices/cuda.py against a driver that holds its callers to its documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.devices.inventory import find_devices
from tests.devices.simulated import FakeGpus

PRELUDE = """
import mmap, os, sys, threading
from fastserve.devices.cuda import Cuda, CudaFault
cuda, handle = Cuda.load(), bytes.fromhex(sys.argv[1])
def code(call, *arguments):
    try:
        call(*arguments)
    except CudaFault as fault:
        return fault.code
    return 0
"""


@pytest.fixture
def own(tmp_path: Path) -> FakeGpus:
    """Devices whose rules are broken on purpose."""
    return FakeGpus(tmp_path)


def say(gpus: FakeGpus, code: str, handle: bytes = b"", **environment: str) -> str:
    """Return the output of these lines in a process that has the devices."""
    with gpus.here(**environment):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, handle.hex()], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_handle_is_counted_and_closed_as_often(own: FakeGpus) -> None:
    at = own.allocate(100)
    told = say(
        own,
        """
cuda.enter(0)
first, second = cuda.open_handle(handle), cuda.open_handle(handle)
print(first == second, cuda.extent(first), cuda.extent(first + 40), cuda.device_of(first))
print([code(cuda.close_handle, first) for _ in range(3)])
""",
        at.handle,
    )
    assert told == "True 100 60 0\n[0, 0, 1]"
    assert "a handle closed that is not open" in own.broken


def test_every_thread_enters_and_a_fork_may_not_go_on(own: FakeGpus) -> None:
    told = say(
        own,
        """
cuda.enter(0)
found = []
def apart():
    found.append(code(cuda.open_handle, handle))
    cuda.enter(0)
    found.append(code(cuda.open_handle, handle))
thread = threading.Thread(target=apart); thread.start(); thread.join()
child = os.fork()
if not child:
    os._exit(code(cuda.count))
found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(found)
""",
        own.allocate(8).handle,
    )
    assert told == "[201, 0, 3]"


def test_a_handle_is_closed_where_it_was_opened(own: FakeGpus) -> None:
    told = say(
        own,
        """
cuda.enter(0)
at = cuda.open_handle(handle)
cuda.enter(1)
print(code(cuda.close_handle, at))
cuda.enter(0)
print(code(cuda.close_handle, at))
""",
        own.allocate(8).handle,
    )
    assert told == "201\n0"


def test_memory_is_registered_once_in_whole_pages_and_let_go_of_before_it_is_unmapped(own: FakeGpus) -> None:
    told = say(
        own,
        """
cuda.enter(0)
arena = mmap.mmap(-1, 8192)
start = cuda.register(arena)
print(code(cuda.register, arena), code(cuda.register, memoryview(bytearray(8192))[1:4097]))
cuda.unregister(start)
print(code(cuda.unregister, start))
start = cuda.register(arena)
arena.close()
print(code(cuda.unregister, start))
""",
    )
    assert told == "712 1\n713\n1"
    assert "memory was unmapped while it was registered" in own.broken


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_written_is_on_the_device_when_the_call_returns(own: FakeGpus, pinned: bool) -> None:
    at = own.allocate(4096)
    say(
        own,
        f"""
cuda.enter(0)
memory = mmap.mmap(-1, 4096)
memory[:4] = b"here"
if {pinned}:
    cuda.register(memory)
to = cuda.open_handle(handle)
cuda.to_device(to, memory)
os._exit(0)  # nothing comes behind it
""",
        at.handle,
    )
    assert at.get(4) == b"here"


def test_memory_that_cannot_be_pinned_is_said_so(own: FakeGpus) -> None:
    own.set("unpinnable")
    told = say(own, "cuda.enter(0); print(code(cuda.register, mmap.mmap(-1, 4096)))")
    assert (told, own.broken) == ("800", "")


def test_a_driver_that_tells_no_range(own: FakeGpus) -> None:
    own.set("shy")
    told = say(
        own,
        "cuda.enter(0); at = cuda.open_handle(handle); print(cuda.extent(at), cuda.device_of(at))",
        own.allocate(8).handle,
    )
    assert told == "None None"


def test_mig_instances_are_selected_by_names_of_their_own(own: FakeGpus) -> None:
    with own.here():
        whole = [device.select for device in find_devices()]
        own.set("mig")
        parts = [device.select for device in find_devices()]
        assert [one.partition("-")[0] for one in whole] == ["GPU", "GPU"]
        assert [one.partition("-")[0] for one in parts] == ["MIG", "MIG"]
    with own.here(CUDA_VISIBLE_DEVICES=parts[1]):
        assert [device.name for device in find_devices()] == ["Fake GPU 1"]
