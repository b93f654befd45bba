"""Batches on their way over a device, several at a time: copy-in, compute and copy-out of different ones
overlap.

    COPY_IN    | in 1 | in 2 | in 3 |
    COMPUTE           |  run 1  |  run 2  |  run 3  |
    COPY_OUT                    | out 1 |  | out 2 |  | out 3 |
                                        ^ batch 1 has landed: its slot may be published, and not before

Knows streams and marks, and nothing of slots, requests or what a model is: what is copied and run is the
cargo's to say. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastserve.workers.device import COMPUTE, COPY_IN, COPY_OUT, Device, Mark, Tensor

Copies = Iterable[tuple[Tensor, Tensor]]  # (target, source)


class Cargo(Protocol):
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

    cargo: Cargo
    begun: Mark = None
    copied: Mark = None
    started: Mark = None
    computed: Mark = None
    done: Mark = None
    held: list[tuple[Tensor, Tensor]] | None = None
    fault: Exception | None = None

    def times_ns(self, device: Device) -> tuple[int, int, int]:
        """Copy-in, compute and copy-out of one that landed without a fault."""
        return (
            device.between_ns(self.begun, self.copied),
            device.between_ns(self.started, self.computed),
            device.between_ns(self.computed, self.done),
        )


class Pipeline:
    """At most `depth` batches on one device."""

    def __init__(self, device: Device, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def room(self) -> bool:
        """Whether another batch may start."""
        return len(self._flights) < self._depth

    def launch(self, cargo: Cargo) -> None:
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
        """Those that are done, oldest first. Raises DeviceLost."""
        while self._flights:
            flight = self._flights[0]
            done = flight.done  # a simulated device may call `_compute` while it is asked
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
