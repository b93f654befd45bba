"""The watchdog: finds processes of the owner that do not answer, and ends them. Nothing here blocks.

The owner asks every two seconds: a worker through a word in its arena and its doorbell, which its ordinary
loop answers, another front process over its control line. A process that owes an answer is judged by its
state in the kernel, since one that is only starved must not be ended:

    is stopped by a signal          8 s: also in a batch, and while it loads
    waits for something             8 s: every thread of it sleeps, and it has used no CPU
    computes                        30 s: a thread of it holds the interpreter's lock
    gets no CPU, waits for a disk   60 s
    is held by a debugger           any time

A worker in a batch owes nothing: run_timeout_ms bounds the batch; load_timeout_s bounds one that loads. Time
counts only as the owner itself runs: one that was held up blames nobody for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

log = logging.getLogger(__name__)


class ProcessActivity(Enum):
    """The activity of a process that does not answer, by the kernel; the value is its description."""

    STOPPED = "it is stopped by a signal"
    WAITING = "it waits for something and does not look at its work"
    COMPUTING = "it computes and does not look at its work"
    STARVED = "it gets no CPU, or waits for a disk"
    UNKNOWN = "a debugger holds it, or it is gone"


@dataclass(frozen=True)
class SilenceLimits:
    """Seconds from one question to the next, and of silence until a process is ended, by what it does."""

    ping_s: float = 2.0
    silent_s: float = 8.0
    computing_s: float = 30.0
    starved_s: float = 60.0

    @property
    def most_tick_s(self) -> float:
        """The most that one scan counts: the owner itself may have been late."""
        return 1.5 * self.ping_s

    def weight(self, doing: ProcessActivity) -> float:
        """How much a second of it counts against `silent_s`."""
        slower = {ProcessActivity.COMPUTING: self.computing_s, ProcessActivity.STARVED: self.starved_s}
        return self.silent_s / slower.get(doing, self.silent_s)


SILENCE_LIMITS = SilenceLimits()
# A process that has used more than this share of CPU time between two scans computes.
COMPUTING_SHARE = 0.2
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


class Silence:
    """How long one process has owed an answer, by its owner's scans."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._pid = 0
        self._cpu_s = -1.0  # at the last look; negative: there was none since it answered
        self.weight_s = 0.0
        """Seconds of silence, as they count against `silent_s`."""
        self.doing = ProcessActivity.UNKNOWN

    def look(self, pid: int, *, answered: bool, owes: bool) -> float:
        """One look, after the process has or has not answered; the weight of its silence. `owes` False: only
        a process that is stopped counts as silent."""
        now = self._clock()
        elapsed_s, self._at = min(now - self._at, SILENCE_LIMITS.most_tick_s), now
        if answered or not pid or pid != self._pid:
            self._pid, self.weight_s, self._cpu_s = pid, 0.0, -1.0
            return 0.0
        self.doing, self._cpu_s = look_at(pid, self._cpu_s, elapsed_s, owes=owes)
        if self.doing is ProcessActivity.UNKNOWN:
            self.weight_s = 0.0
        else:
            self.weight_s += elapsed_s * SILENCE_LIMITS.weight(self.doing)
        return self.weight_s

    @property
    def long(self) -> bool:
        """Whether it counts as not ready."""
        return self.weight_s >= SILENCE_LIMITS.silent_s / 2

    @property
    def over(self) -> bool:
        """Whether it is to be ended."""
        return self.weight_s >= SILENCE_LIMITS.silent_s

    @property
    def reason(self) -> str:
        """The reason, as text that a client may read."""
        return f"it gave no sign of life: {self.doing.value}"


def look_at(
    pid: int, cpu_before_s: float, elapsed_s: float, *, owes: bool = True
) -> tuple[ProcessActivity, float]:
    """Return the activity of a process and the CPU seconds it has used; `cpu_before_s` is of the scan before,
    negative for none. For a process that owes nothing it is STOPPED or UNKNOWN."""
    try:
        state, cpu_s = _read_stat(f"/proc/{pid}/stat")
        if state == "T":
            return ProcessActivity.STOPPED, cpu_s
        if state not in "RSD" or not owes:
            return ProcessActivity.UNKNOWN, cpu_s
        if cpu_before_s >= 0 and cpu_s - cpu_before_s >= COMPUTING_SHARE * elapsed_s:
            return ProcessActivity.COMPUTING, cpu_s
        threads = os.listdir(f"/proc/{pid}/task")
        states = {_read_stat(f"/proc/{pid}/task/{thread}/stat")[0] for thread in threads}
    except (OSError, ValueError):  # it, or a thread of it, has ended this moment, or /proc hides it
        return ProcessActivity.STARVED, cpu_before_s
    return ProcessActivity.WAITING if states == {"S"} else ProcessActivity.STARVED, cpu_s


def _read_stat(path: str) -> tuple[str, float]:
    """The state and the CPU seconds of a process or a thread. Its name, in brackets, may hold anything."""
    with open(path, "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICKS_S


class WorkerHeartbeatLike(Protocol):
    """The owner's questions to the workers of an arena (ext/arena_maintenance.pyx)."""

    def ping(self, worker: int) -> bool: ...

    def busy(self, worker: int) -> bool: ...


class WatchedWorker(Protocol):
    """A worker as the watchdog sees it: an Instance of the group."""

    index: int

    @property
    def ready(self) -> bool: ...

    @property
    def pid(self) -> int: ...

    def occupy(self, occupied: bool) -> bool: ...

    def kill(self, reason: str) -> None: ...


class Watchdog:
    """Asks the workers of one version for signs of life, from `open` to `close`; ends those that give none.

    `silent` are the workers that have not answered for so long that they count as not ready; `on_silent` is
    called whenever the set changes.
    """

    def __init__(self, title: str, instances: Sequence[WatchedWorker], on_silent: Callable[[], None]) -> None:
        self.silent: frozenset[int] = frozenset()
        self._title, self._instances, self._on_silent = title, instances, on_silent
        self._silences = [Silence() for _ in instances]
        self._pulse: WorkerHeartbeatLike | None = None
        self._next: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin, on the running loop."""
        self._turn()

    def attach(self, pulse: WorkerHeartbeatLike | None) -> None:
        """Set the arena that ready workers are attached to."""
        self._pulse = pulse

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone, which its group reports."""
        self.silent -= {worker}
        self._silences[worker] = Silence()

    def reason(self, worker: int) -> str:
        """Why a silent worker counts as such."""
        return self._silences[worker].reason

    def close(self) -> None:
        """No more looks; idempotent."""
        if self._next is not None:
            self._next.cancel()
        self._pulse = None

    def _turn(self) -> None:
        self._next = asyncio.get_running_loop().call_later(SILENCE_LIMITS.ping_s, self._turn)
        found = set()
        for instance, silence in zip(self._instances, self._silences, strict=True):
            try:
                self._look(instance, silence)
            except OSError:
                log.exception("%s: worker %d could not be looked at", self._title, instance.index)
            if silence.long:
                found.add(instance.index)
            if silence.over:
                instance.kill(silence.reason)
        silent = frozenset(found)
        for worker in silent - self.silent:
            log.warning("%s: worker %d: %s", self._title, worker, self._silences[worker].reason)
        if silent != self.silent:
            self.silent = silent
            self._on_silent()

    def _look(self, instance: WatchedWorker, silence: Silence) -> None:
        pulse = self._pulse if instance.ready else None
        answered = pulse is not None and pulse.ping(instance.index)
        occupied = pulse is None or (not answered and pulse.busy(instance.index))
        beside = instance.occupy(occupied)
        silence.look(instance.pid, answered=answered, owes=not occupied and not beside)
