"""Batches on their way over a device, several at a time: copy-in, compute and copy-out of different ones
overlap.

    COPY_IN    | in 1 | in 2 | in 3 |
    COMPUTE           |  run 1  |  run 2  |  run 3  |
    COPY_OUT                    | out 1 |  | out 2 |  | out 3 |
                                        ^ batch 1 has landed: its slot may be published, and not before

Knows streams and marks, and nothing of slots, requests or models: a batch says what is copied and run.
Nothing here waits, but the batch loop of a worker with a device (`run_flights`): it takes batches while
others are in flight, and sleeps only when there is nothing to look at. Right after something has happened it
asks all the time whether a batch has landed; then it naps, and a doorbell wakes it.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastserve.workers.device.base import COMPUTE, COPY_IN, COPY_OUT, ComputeDevice, Mark, Tensor
from fastserve.workers.loop import CONTROL_SPOKE, answer

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing


Copies = Iterable[tuple[Tensor, Tensor]]  # (target, source)


class DeviceBatch(Protocol):
    """One batch. Its host memory is the device's from `incoming` until it has landed."""

    def incoming(self) -> Copies:
        """Device memory and the host memory it is filled from."""

    def compute(self) -> Copies:
        """Enqueue the run, on the current stream; host memory and the results it is filled from. What is
        returned is held until it has landed. Raises what the model raises."""


@dataclass(slots=True, eq=False)
class Flight:
    """A batch on its way. `fault` is what its copies or its run raised; `done` is reached when the device has
    let go of all memory of it, after a fault too."""

    cargo: DeviceBatch
    begun: Mark = None
    copied: Mark = None
    started: Mark = None
    computed: Mark = None
    done: Mark = None
    held: list[tuple[Tensor, Tensor]] | None = None
    fault: Exception | None = None

    def times_ns(self, device: ComputeDevice) -> tuple[int, int, int]:
        """Copy-in, compute and copy-out of one that landed without a fault."""
        return (
            device.between_ns(self.begun, self.copied),
            device.between_ns(self.started, self.computed),
            device.between_ns(self.computed, self.done),
        )


class Pipeline:
    """At most `depth` batches on one device."""

    def __init__(self, device: ComputeDevice, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def room(self) -> bool:
        """Whether another batch may start."""
        return len(self._flights) < self._depth

    def launch(self, cargo: DeviceBatch) -> None:
        """Enqueue a batch whole; what it fails with is seen when it lands. Raises DeviceLost."""
        device, flight = self._device, Flight(cargo)
        self._flights.append(flight)
        flight.begun = device.mark(COPY_IN)
        try:
            for target, source in cargo.incoming():
                device.copy(COPY_IN, target, source)
        except Exception as error:
            flight.fault = error
        flight.copied = device.mark(COPY_IN)
        device.after(COMPUTE, flight.copied)  # of one that failed too: `done` then covers its copies
        device.enqueue(COMPUTE, partial(self._compute, flight))

    def landed(self) -> Iterator[Flight]:
        """Yield the batches that are done, oldest first. Raises DeviceLost."""
        while self._flights:
            flight = self._flights[0]
            done = flight.done  # a device may call `_compute` while it is asked
            if not self._device.reached(flight.copied if done is None else done) or done is None:
                return
            self._flights.popleft()
            yield flight

    def _compute(self, flight: Flight) -> None:
        device = self._device
        flight.started = device.mark(COMPUTE)
        try:
            copies = None if flight.fault is not None else list(flight.cargo.compute())
        except Exception as error:
            flight.fault, copies = error, None
        flight.computed = device.mark(COMPUTE)
        if copies is None:
            flight.done = flight.computed
            return
        flight.held = copies
        device.after(COPY_OUT, flight.computed)
        try:
            for target, source in copies:
                device.copy(COPY_OUT, target, source)
        except Exception as error:
            flight.fault = error
        flight.done = device.mark(COPY_OUT)


# Asked all the time for this long after something happened: a small model's batch is over in it. Then every
# NAP.
EAGER_NS, NAP_NS = 100_000, 50_000

LISTEN_NS = 5_000_000


class _ControlPoll:
    """Whether a message of the owner has arrived: polled every LISTEN_NS, beside the waits in the ring."""

    def __init__(self, control_fd: int) -> None:
        self._line = select.poll()
        self._line.register(control_fd, select.POLLIN)
        self._next_ns = 0

    def spoke(self) -> bool:
        now = time.monotonic_ns()
        if now < self._next_ns:
            return False
        self._next_ns = now + LISTEN_NS
        return bool(self._line.poll(0))


def run_flights(
    ring: BatchRing, runner: Any, stopped: Callable[[], bool], spin_ns: int, control_fd: int
) -> None:
    """Until told to stop; everything in flight then lands first. Raises DeviceLost."""
    eager_until, owner = 0, _ControlPoll(control_fd)
    while True:
        if owner.spoke() and stopped():
            runner.drain()
            return
        if not runner.in_flight:
            slot = ring.take_or_wait(spin_ns)
        elif not runner.room:
            slot = -1
        elif time.monotonic_ns() < eager_until:
            slot = ring.take()
        else:
            slot = ring.take_or_wait(0, NAP_NS)
        if slot >= 0:
            answer(ring, runner, slot)
        elif slot == CONTROL_SPOKE and stopped():
            runner.drain()
            return
        if runner.land() or slot >= 0:
            eager_until = time.monotonic_ns() + EAGER_NS
        elif not runner.room and time.monotonic_ns() > eager_until:
            time.sleep(NAP_NS / 1e9)
