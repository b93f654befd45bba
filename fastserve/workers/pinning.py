"""Placement of processes on processors, and of arenas on nodes of memory, where the settings ask for it; and
the priority of workers that load beside others that serve.

    pinning: cores    every front process has a core of its own, workers have the others, as many as they have
                      threads
    pinning: numa     front processes are spread over the nodes; the workers of a version and its arena are on
                      one node, the one with most cores to spare

The owner plans (`PinningPlan`); a child pins itself before it has a second thread, by a variable of its
environment. Processes keep the processors of this process's affinity, which a container may have limited.

    PRIORITY.step_back()       when a load on demand begins: others that wake up have the processor first
    PRIORITY.step_forward()    before the worker says that it is ready
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Literal

from fastserve.util.cpus import Core

log = logging.getLogger(__name__)

Pinning = Literal["none", "cores", "numa"]
Processors = tuple[int, ...]

AFFINITY = "_FASTSERVE_AFFINITY"  # of a child's environment: processors, with commas
NO_NODE = -1
_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
_MPOL_PREFERRED = 1
_SETATTR = {"x86_64": 314, "aarch64": 274}  # sched_setattr
_SCHED_ATTR = Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
BACK = 5
"""Steps of niceness that a load steps back: beside busy processes it takes three times as long. With ten it
would be ten times: on a crowded machine longer than requests wait."""
_SLICE_NS = 20_000_000
_AGAIN_S = 0.02  # the kernel takes one change of a session's niceness in 0.1 s from those without rights
_MOST_TRIES = 25


@dataclass(frozen=True)
class WorkerPins:
    """The processors of each worker of a version, () for any, and the node of its arena, NO_NODE for any."""

    workers: tuple[Processors, ...]
    node: int = NO_NODE
    taken: Mapping[Core, float] = field(default_factory=dict)  # of each core, as the plan counts


class PinningPlan:
    """Decides where the processes of one server run. The first front is the owner itself."""

    def __init__(self, pinning: Pinning, cores: Sequence[Core], fronts: int) -> None:
        self._pinning, self._cores = pinning, list(cores)
        self._all = _processors(cores)
        self._taken = dict.fromkeys(cores, 0.0)  # by workers
        self._fronts: list[Processors] = [()] * fronts
        self._rest = self._cores
        if pinning == "cores" and len(cores) > 1:
            own = min(fronts, len(cores) - 1)
            self._fronts = [self._cores[i % own].processors for i in range(fronts)]
            self._rest = self._cores[own:]
        elif pinning == "numa":
            nodes = sorted({core.node for core in cores})
            self._fronts = [_processors(self._of_node(nodes[i % len(nodes)])) for i in range(fronts)]

    def front(self, number: int) -> Processors:
        """Return the processors of a front process, () for any."""
        return self._fronts[number]

    @property
    def others(self) -> Processors:
        """The processors of processes that have no place of their own: workers that several models share."""
        if self._pinning == "none":
            return ()
        return _processors(self._rest)

    def take(self, workers: int, threads: int) -> WorkerPins:
        """Return where the workers of a version run, until `give_back`. `threads` 0: as many as there are."""
        if self._pinning == "none":
            return WorkerPins(((),) * workers)
        if self._pinning == "numa":
            return self._take_node(workers, threads)
        pins = list[Processors]()
        before = dict(self._taken)
        for _ in range(workers):
            free = sorted(self._rest, key=lambda core: (self._taken[core], core.processors))
            own = free[: threads or len(free)]
            pins.append(_processors(own))
            for core in own:
                self._taken[core] += 1.0
        return WorkerPins(tuple(pins), taken={core: self._taken[core] - n for core, n in before.items()})

    def give_back(self, pins: WorkerPins) -> None:
        """Release the places of a version that has ended."""
        for core, share in pins.taken.items():
            self._taken[core] -= share

    def _take_node(self, workers: int, threads: int) -> WorkerPins:
        nodes = sorted({core.node for core in self._cores})
        need = workers * max(threads, 1)
        if threads == 0 or not any(len(self._of_node(node)) >= need for node in nodes):
            return WorkerPins((self._all,) * workers)
        fitting = [node for node in nodes if len(self._of_node(node)) >= need]
        node = max(fitting, key=lambda one: (self._spare(one), -one))
        cores = self._of_node(node)
        share = need / len(cores)
        for core in cores:
            self._taken[core] += share
        return WorkerPins((_processors(cores),) * workers, node, dict.fromkeys(cores, share))

    def _spare(self, node: int) -> float:
        return sum(1 - self._taken[core] for core in self._of_node(node))

    def _of_node(self, node: int) -> list[Core]:
        return [core for core in self._cores if core.node == node]


def _processors(cores: Sequence[Core]) -> Processors:
    return tuple(sorted(number for core in cores for number in core.processors))


def affinity_variable(processors: Processors) -> dict[str, str]:
    """Return the variable that pins a child to these processors, none for ()."""
    return {AFFINITY: ",".join(map(str, processors))} if processors else {}


def take_affinity() -> None:
    """Pin this process as its owner asks. Call it before there are other threads: they inherit it."""
    listed = os.environ.pop(AFFINITY, "")
    if listed:
        pin(tuple(map(int, listed.split(","))))


def pin(processors: Processors) -> None:
    """Pin the calling thread. Where the system refuses, it stays where it is, and the log says so."""
    try:
        os.sched_setaffinity(0, processors)
    except OSError as error:
        log.warning("pinning to processors %s: %s", ",".join(map(str, processors)), error.strerror)


def prefer_node(memory: mmap.mmap, node: int) -> bool:
    """Have pages of shared memory that are touched from now on, by any process, lie on a node; return whether
    the system does that. Where the node is full they lie elsewhere."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.c_char.from_buffer(memory)
    try:
        address = ctypes.c_void_p(ctypes.addressof(start))
        size = ctypes.c_ulong(len(memory))
        bits = ctypes.c_ulong(64 * len(mask) + 1)
        done = libc.syscall(number, address, size, _MPOL_PREFERRED, mask, bits, ctypes.c_uint(0))
    finally:
        del start  # else the memory could not be unmapped
    if done != 0:
        log.warning("memory of node %d cannot be preferred: %s", node, os.strerror(ctypes.get_errno()))
    return bool(done == 0)


class Priority:
    """The priority of this process: behind others while its model loads, beside them once it serves."""

    def __init__(self) -> None:
        self._nice: int | None = None  # before it stepped back

    def step_back(self) -> None:
        """Let this process, which has one thread, have what processors others leave. What the system would
        not allow to be taken back is left as it is.

        SCHED_BATCH and a long slice let others that wake up run at once (by the slice from Linux 6.12 on).
        Both, and the niceness of a session, which counts where sessions share processors (autogroup), may be
        taken back by anyone; the niceness of a process by those that may raise it (CAP_SYS_NICE,
        RLIMIT_NICE).
        """
        if self._nice is not None or os.sched_getscheduler(0) != os.SCHED_OTHER:
            return  # the caller of the server has decided
        self._nice = nice = os.getpriority(os.PRIO_PROCESS, 0)
        lower = nice + BACK if nice + BACK < 20 and _may_raise(nice) else nice
        _set_scheduling(0, os.SCHED_BATCH, lower, _SLICE_NS)
        if os.getsid(0) == os.getpid():
            _set_session(BACK)

    def step_forward(self) -> None:
        """Give this process, its threads and its children the priority that it had before `step_back`."""
        nice, self._nice = self._nice, None
        if nice is None:
            return
        if os.getsid(0) == os.getpid():
            for _ in range(_MOST_TRIES):
                if _set_session(0):
                    break
                time.sleep(_AGAIN_S)
        done = set[int]()
        while found := set(_threads(os.getpid())) - done:  # one that was behind may have begun another
            for thread in found:
                with contextlib.suppress(ProcessLookupError):
                    if os.sched_getscheduler(thread) == os.SCHED_BATCH:
                        _set_scheduling(thread, os.SCHED_OTHER, nice, 0)
            done |= found


PRIORITY = Priority()
"""Of this process."""


def _may_raise(nice: int) -> bool:
    """Return whether this process may lower its niceness. Only a try tells: in a user's namespace root may
    not."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice - 1)
    except OSError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    return True


def _set_scheduling(thread: int, policy: int, nice: int, slice_ns: int) -> None:
    """Set these for a thread, 0 for the calling one. A system that refuses leaves it as it is."""
    number = _SETATTR.get(platform.machine())
    if number is not None:
        attr = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, nice, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(number, ctypes.c_int(thread), attr, ctypes.c_uint(0))


def _set_session(nice: int) -> bool:
    """Set the niceness of this process's session; return False where that is to be tried again."""
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # there are no such groups
        return True
    return True


def _threads(process: int) -> Iterator[int]:
    """Yield the threads of a process and of its descendants."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/task"):
            yield int(name)
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{name}/children") as children:
                for child in children.read().split():
                    yield from _threads(int(child))
