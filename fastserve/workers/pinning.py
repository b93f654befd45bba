"""Placement of processes on processors, and of arenas on nodes of memory, where the settings ask for it.

    pinning: cores    every front process has a core of its own, workers have the others, as many as they have
                      threads
    pinning: numa     front processes are spread over the nodes; the workers of a version and its arena are on
                      one node, the one with most cores to spare

The owner plans (`PinningPlan`); a child pins itself before it has a second thread, by a variable of its
environment. Processes keep the processors of this process's affinity, which a container may have limited.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastserve.util.cpus import Core

log = logging.getLogger(__name__)

Pinning = Literal["none", "cores", "numa"]
Processors = tuple[int, ...]

AFFINITY = "_FASTSERVE_AFFINITY"  # of a child's environment: processors, with commas
NO_NODE = -1
_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
_MPOL_PREFERRED = 1


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
