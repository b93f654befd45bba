"""Where processes run: plans over made-up machines, and what the kernel says of this one."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.util.cpus import Core, read_topology
from fastserve.workers import pinning
from fastserve.workers.pinning import AFFINITY, NO_NODE, PinningPlan, prefer_node
from tests.server.rig import run, serving, write_model

STARTS_PROCESSES = True
TWO_NODES = tuple(Core(i // 4, (i, i + 8)) for i in range(8))  # two threads a core
ONE_NODE = tuple(Core(0, (i,)) for i in range(4))


def test_none_pins_nothing() -> None:
    plan = PinningPlan("none", ONE_NODE, 2)
    assert (plan.front(1), plan.others, plan.take(2, 1).workers) == ((), (), ((), ()))
    assert plan.take(1, 1).node == NO_NODE


def test_cores_gives_fronts_and_workers_their_own() -> None:
    plan = PinningPlan("cores", TWO_NODES, 3)
    assert [plan.front(i) for i in range(3)] == [(0, 8), (1, 9), (2, 10)]
    assert plan.others == (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)
    first = plan.take(2, 2)
    assert first.workers == ((3, 4, 11, 12), (5, 6, 13, 14))
    assert plan.take(2, 1).workers == ((7, 15), (3, 11))
    plan.give_back(first)
    assert plan.take(1, 3).workers == ((4, 5, 6, 12, 13, 14),)
    assert plan.take(1, 0).workers == (plan.others,)


@pytest.mark.parametrize(("fronts", "cores"), [(4, 4), (8, 4), (2, 2), (1, 1)])
def test_workers_always_have_a_core_that_no_front_has(fronts: int, cores: int) -> None:
    plan = PinningPlan("cores", ONE_NODE[:cores], fronts)
    (worker,) = plan.take(1, 1).workers
    if cores == 1:
        assert (plan.front(0), worker) == ((), (0,))
    else:
        assert all(plan.front(i) and not set(worker) & set(plan.front(i)) for i in range(fronts))


def test_numa_spreads_fronts_and_keeps_a_version_on_one_node() -> None:
    plan = PinningPlan("numa", TWO_NODES, 3)
    left, right = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    assert [plan.front(i) for i in range(3)] == [left, right, left]
    first = plan.take(3, 1)
    assert (first.node, first.workers) == (0, (left,) * 3)
    assert plan.take(1, 2).node == 1
    assert plan.take(1, 1).node == 1
    plan.give_back(first)
    assert plan.take(4, 1).node == 0


@pytest.mark.parametrize(("workers", "threads"), [(5, 1), (1, 0), (2, 3)])
def test_numa_leaves_alone_what_one_node_does_not_hold(workers: int, threads: int) -> None:
    pins = PinningPlan("numa", TWO_NODES, 1).take(workers, threads)
    assert (pins.node, pins.workers) == (NO_NODE, (tuple(range(16)),) * workers)


def affinities(pid: int) -> set[int]:
    """The processors that any thread of a process may use."""
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return set().union(*(os.sched_getaffinity(thread) for thread in threads))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("shared", ["", "all"])
def test_processes_of_a_server_run_where_the_plan_says(tmp_path: Path, shared: str) -> None:
    write_model(tmp_path, instances=2, shared_worker=shared)
    before = os.sched_getaffinity(0)

    async def work() -> None:
        async with serving(tmp_path, frontends=2, pinning="cores") as served:
            plan = served.server.host.pinning
            assert os.sched_getaffinity(0) == set(plan.front(0))
            assert affinities(served.links[0].pid) == set(plan.front(1))
            fronts = set(plan.front(0)) | set(plan.front(1))
            for pid in served.pids:
                assert affinities(pid) <= set(plan.others)
                assert not affinities(pid) & fronts
            assert await served.ask(2.0) == (200, [4.0])
        assert os.sched_getaffinity(0) == before

    run(work())


def test_a_server_on_nodes_serves(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, pinning="numa") as served:
            (pid,) = served.pids
            node = {core.node for core in read_topology()}
            assert served.server.host.hosted
            hosted = next(iter(served.server.host.hosted.values()))
            assert hosted.pins is not None
            assert hosted.pins.node in node
            assert affinities(pid) == set(hosted.pins.workers[0])
            assert await served.ask(2.0) == (200, [4.0])

    run(work())


def test_what_the_system_refuses_is_logged_and_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AFFINITY, "4095")
    before = os.sched_getaffinity(0)
    pinning.take_affinity()
    assert os.sched_getaffinity(0) == before
    assert AFFINITY not in os.environ
    assert "pinning to processors 4095: Invalid argument" in caplog.text
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        assert not prefer_node(memory, 63)
    assert "memory of node 63 cannot be preferred" in caplog.text or platform.machine() not in pinning._MBIND


POLICY = """
import ctypes, mmap, os, sys
from fastserve.workers.pinning import prefer_node
fd = os.memfd_create("a")
os.ftruncate(fd, 16 * mmap.PAGESIZE)
memory, other = mmap.mmap(fd, 0), mmap.mmap(fd, 0)
assert prefer_node(memory, 0)
other[5 * mmap.PAGESIZE] = 1
mode = ctypes.c_int(-1)
start = ctypes.c_char.from_buffer(other)
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
address = ctypes.c_void_p(ctypes.addressof(start) + 5 * mmap.PAGESIZE)
mask = (ctypes.c_ulong * 16)()
assert libc.syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), address, ctypes.c_ulong(2)) == 0
print(mode.value, mask[0])
"""


def test_the_policy_holds_for_every_mapping_of_the_memory() -> None:
    if platform.machine() not in pinning._MBIND or not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("no nodes of memory here")
    done = subprocess.run([sys.executable, "-c", POLICY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr  # MPOL_PREFERRED, node 0


PRIORITIES = """
import os, subprocess, sys, threading
from fastserve.workers.pinning import BACK, PRIORITY

def seen(of=0):
    return os.sched_getscheduler(of), os.getpriority(os.PRIO_PROCESS, of)

def session():
    try:
        return open("/proc/self/autogroup").read().split()[-1]
    except OSError:
        return "0"

before, session_before = seen(), session()
PRIORITY.step_forward()  # nothing was behind
assert seen() == before
PRIORITY.step_back()
behind, tried = seen(), threading.Event()
assert behind[0] == os.SCHED_BATCH
assert behind[1] in (before[1], before[1] + BACK)
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
child = subprocess.Popen(["sleep", "60"])
others = thread.native_id, child.pid
assert [seen(one) for one in others] == [behind] * 2
PRIORITY.step_forward()
assert [seen(one) for one in (0, *others)] == [before] * 3
assert session() == session_before
end.set()
child.kill()
child.wait()
print(behind[1] - before[1])
"""


@pytest.mark.skipif(platform.machine() not in pinning._SETATTR, reason="the call's number is not known")
@pytest.mark.parametrize("may_raise", [True, False])
def test_a_load_steps_back_with_all_it_starts_and_forward_again(may_raise: bool) -> None:
    denied = "import os\nos.setpriority = lambda *given: (_ for _ in ()).throw(PermissionError())\n"
    source = PRIORITIES if may_raise else denied + PRIORITIES
    ran = subprocess.run(
        *([sys.executable, "-c", source],),
        **{"stdout": subprocess.PIPE, "text": True, "check": True, "start_new_session": True},
    )
    assert ran.stdout.strip() in ({"0", str(pinning.BACK)} if may_raise else {"0"})
