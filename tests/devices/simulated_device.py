"""A device made of the host's memory: it does later what it is asked, in any order that streams and marks
allow.

Pipelines and whole servers run over it where there is no GPU: simulated_worker.py and simulated_server.py
make `devices: simulated` mean it. One step is done at each look at a mark (`reached`), of a stream that a
seed chooses among those that may go on. What a wrong order would spoil is spoilt: memory of the device begins
as noise, and is read and written when the step is done, not before.

    FASTSERVE_SIMULATED_DEVICE='{"seed": 3, "faults": [{"stage": "copy-in", "at": 2, "what": "lost"}]}'
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from fastserve.backends.model_errors import DeviceLost
from fastserve.workers.device.base import COMPUTE, DeviceStream, Mark, Tensor

NAME = "simulated"
SCRIPT = "FASTSERVE_SIMULATED_DEVICE"
LOST = "CUDA error: an illegal memory access was encountered (simulated)"
NOISE = 0x5B
# What a copy that is asked for can be refused with, and what becomes of one that was enqueued.
REFUSED, ENQUEUED = frozenset({"out of memory", "error"}), frozenset({"lost", "hold"})


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault at step number `at` of a stage, counted from 0 and once if `once` names a file that is not
    there yet. `hold`: the stage stands still from there on. `larger`: only of batches of more rows. A copy is
    refused when it is asked for (`out of memory`, `error`), or fails where nobody waits for it (`lost`)."""

    stage: str
    what: Literal["out of memory", "lost", "error", "hold"]
    at: int = 0
    every: bool = False
    larger: int = -1
    once: str = ""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the device behaves. `pins`: whether host memory can be registered."""

    seed: int = 0
    pins: bool = True
    step_us: int = 0
    faults: list[Fault] = []


def read_script() -> Script:
    """The one of the environment."""
    text = os.environ.get(SCRIPT, "")
    return msgspec.json.decode(text, type=Script) if text else Script()


class SimulatedOutOfMemoryError(RuntimeError):
    """As torch's."""


SimulatedOutOfMemoryError.__name__ = "OutOfMemoryError"


@dataclass(eq=False)
class Step:
    """One thing on a stream."""

    do: Callable[[], None]
    waits_for: Any = None
    """A mark that has to be reached before."""


@dataclass(eq=False)
class SimulatedMark:
    """Reached once the steps before it are done."""

    reached_ns: int = 0


@dataclass
class SimulatedDevice:
    """See Device. `choose` decides which of several streams goes on; `trace` tells what was done."""

    name: str = NAME
    script: Script = field(default_factory=Script)
    choose: Callable[[list[DeviceStream]], DeviceStream] | None = None
    trace: list[tuple[str, int]] = field(default_factory=list)
    lost: str = ""

    def __post_init__(self) -> None:
        self._steps: dict[DeviceStream, deque[Step]] = {stream: deque() for stream in DeviceStream}
        self._inside: list[Step] | None = None  # what a step that is being done enqueues on its own stream
        self._doing: DeviceStream | None = None
        self._random = random.Random(self.script.seed)
        self._counts = dict.fromkeys(DeviceStream, 0)
        self._asked = dict.fromkeys(DeviceStream, 0)  # copies, done or not
        self._held: set[DeviceStream] = set()
        self.pinned = False

    # --- memory ---

    def pin(self, memory: Any) -> str:
        """See Device."""
        self.pinned = self.script.pins
        return "" if self.script.pins else "this simulated device registers no memory"

    def unpin(self) -> None:
        """See Device."""
        self.pinned = False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """See Device."""
        import torch

        made = torch.empty(shape, dtype=dtype)
        made.view(torch.uint8).fill_(NOISE) if made.dim() and made.numel() else None
        return made

    def staging(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """See Device."""
        return self.empty(shape, dtype)

    # --- what is enqueued ---

    def copy(self, stream: DeviceStream, target: Tensor, source: Tensor) -> None:
        """See Device."""
        rows = len(source) if source.dim() else 1
        at, self._asked[stream] = self._asked[stream], self._asked[stream] + 1
        refused = self._find(stream, at, rows, REFUSED)
        if refused is not None:
            self._fail(refused)

        def do() -> None:
            fault = self._fault(stream, rows, ENQUEUED)
            if fault is not None and fault.what == "lost":
                self.lost = LOST
                return
            target.copy_(source)

        self._put(stream, Step(do))

    def enqueue(self, stream: DeviceStream, work: Callable[[], None]) -> None:
        """See Device."""
        self._put(stream, Step(work))

    def mark(self, stream: DeviceStream) -> Mark:
        """See Device."""
        made = SimulatedMark()

        def do() -> None:
            made.reached_ns = time.monotonic_ns()

        self._put(stream, Step(do))
        return made

    def after(self, stream: DeviceStream, mark: Mark) -> None:
        """See Device."""
        self._put(stream, Step(lambda: None, mark))

    def _put(self, stream: DeviceStream, step: Step) -> None:
        """Enqueue right behind the running step where a step enqueues on its own stream: the host was called
        in that place."""
        if self._doing is stream and self._inside is not None:
            self._inside.append(step)
        else:
            self._steps[stream].append(step)

    # --- what is done ---

    def reached(self, mark: Mark) -> bool:
        """See Device."""
        self.step()
        if self.lost:
            raise DeviceLost(self.lost)
        return bool(mark.reached_ns)

    def step(self) -> bool:
        """Do one thing; False when nothing can go on."""
        ready = [stream for stream in DeviceStream if stream not in self._held and self._may_go(stream)]
        if not ready:
            return False
        stream = (self.choose or self._random.choice)(ready)
        if self.script.step_us:
            time.sleep(self.script.step_us / 1e6)
        step = self._steps[stream].popleft()
        self._doing, self._inside = stream, []
        try:
            step.do()
        finally:
            self._steps[stream].extendleft(reversed(self._inside))
            self._doing, self._inside = None, None
        return True

    def _may_go(self, stream: DeviceStream) -> bool:
        steps = self._steps[stream]
        return bool(steps) and (steps[0].waits_for is None or bool(steps[0].waits_for.reached_ns))

    def run(self, call: Callable[[Any], Any], inputs: Mapping[str, Tensor]) -> Any:
        """See Device. A fault of the script is raised as torch would raise it."""
        first = next(iter(inputs.values()), None)
        fault = self._fault(COMPUTE, len(first) if first is not None and first.dim() else 1)
        if fault is not None and fault.what != "hold":
            self._fail(fault)
        found = call(inputs)
        # As of a kernel that was launched: the results are noise until the stream has come so far.
        later = {name: self.empty(tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}

        def do() -> None:
            for name, tensor in found.items():
                later[name].copy_(tensor)

        self._put(COMPUTE, Step(do))
        return later

    def _fail(self, fault: Fault) -> None:
        if fault.what == "out of memory":
            raise SimulatedOutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")
        if fault.what == "lost":
            self.lost = LOST
            raise RuntimeError(LOST)
        raise ValueError("the model does not like this batch (simulated)")

    def _fault(
        self, stream: DeviceStream, rows: int, kinds: frozenset[str] = REFUSED | ENQUEUED
    ) -> Fault | None:
        at, self._counts[stream] = self._counts[stream], self._counts[stream] + 1
        self.trace.append((stream.value, at))
        fault = self._find(stream, at, rows, kinds)
        if fault is not None and fault.what == "hold":
            self._held.add(stream)
        return fault

    def _find(self, stream: DeviceStream, at: int, rows: int, kinds: frozenset[str]) -> Fault | None:
        for fault in self.script.faults:
            if fault.stage != stream.value or not (fault.every or fault.at == at) or rows <= fault.larger:
                continue
            if fault.what in kinds and not (fault.once and not _first(Path(fault.once))):
                return fault
        return None

    def between_ns(self, first: Mark, last: Mark) -> int:
        """See Device."""
        return int(last.reached_ns - first.reached_ns)

    def check(self, error: BaseException) -> None:
        """See Device."""
        if self.lost:
            raise DeviceLost(self.lost) from error

    def close(self) -> None:
        """See Device. One that is lost does nothing more."""
        while not self.lost and self.step():
            pass
        for steps in self._steps.values():
            steps.clear()
        self.unpin()


def _first(path: Path) -> bool:
    """Return whether this process is the first to make the file, and note in it who that was."""
    try:
        with path.open("x") as made:
            made.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
