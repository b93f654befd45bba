"""The runner of batches on a device, its retries, and its report to the owner.

    take -> launch -> (other batches) -> landed -> publish

A batch that raised lands when the device has let go of its memory, and is then run by a plain runner, one run
at a time (runners.py): in parts where its requests may fail alone, by halves of its rows where the device ran
out of memory. A lost device ends the worker: DeviceLost goes up, and nothing that is in flight is published.

The report is sent at most once a second, times of the stages:

    {"device": "cuda:0", "pinned": true, "batches": 12, "copy_in_ns": ..., "compute_ns": ...,
     "copy_out_ns": ...}

All but the first two are increments since the last time: they may be added up over workers that come and go.
The owner keeps the sums (engine/counters.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fastserve.backends import model_callbacks
from fastserve.backends.base import Backend, SupportsDevice
from fastserve.backends.model_errors import is_out_of_memory
from fastserve.workers.control import ControlFault
from fastserve.workers.device.base import ComputeDevice
from fastserve.workers.device.pipeline import DeviceBatch, Flight, Pipeline
from fastserve.workers.isolation import fail_slot
from fastserve.workers.warmup import SyntheticInput

if TYPE_CHECKING:
    from fastserve.workers.arena import WorkerContext


EVERY_NS = 1_000_000_000


@dataclass(slots=True)
class DeviceReport:
    """Batches and times since the last report."""

    device: str
    pinned: bool = True
    batches: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    last_ns: int = 0

    def flew(self, copy_in_ns: int, compute_ns: int, copy_out_ns: int) -> None:
        """A batch has landed."""
        self.batches += 1
        self.copy_in_ns += copy_in_ns
        self.compute_ns += compute_ns
        self.copy_out_ns += copy_out_ns
        self.tell()

    def tell(self, *, at_once: bool = False) -> None:
        """Send it, where a second has passed."""
        now = time.monotonic_ns()
        if not at_once and now - self.last_ns < EVERY_NS:
            return
        self.last_ns = now
        with contextlib.suppress(ControlFault):  # the loop notices that the owner is gone
            model_callbacks.notify(
                "device",
                device=self.device,
                pinned=self.pinned,
                batches=self.batches,
                copy_in_ns=self.copy_in_ns,
                compute_ns=self.compute_ns,
                copy_out_ns=self.copy_out_ns,
            )
        self.batches = self.copy_in_ns = self.compute_ns = self.copy_out_ns = 0


log = logging.getLogger(__name__)
# One is computed, one waits in the device's memory for it; the third copies in while the first copies out.
IN_FLIGHT = 3
SETTING = "batches_in_flight"


class DeviceBackend(Backend, SupportsDevice, Protocol):
    """A backend whose batches stay on the device."""


class SlotBatch(DeviceBatch, Protocol):
    """A batch of one slot."""

    slot: int

    def land(self) -> None:
        """Answer with the outputs that have been copied out."""

    def leave(self) -> None:
        """Free what it holds on the device."""


C = TypeVar("C", bound=SlotBatch)


class DeviceRunner(Generic[C]):
    """`plain` runs a batch, or what is left of one that failed, and returns when it has: `recover`."""

    def __init__(self, place: WorkerContext, device: ComputeDevice, plain: Any) -> None:
        """`place` with a DeviceBackend."""
        self._backend: DeviceBackend
        self._arena, self._ring, self._backend, config = place
        self._device, self._plain = device, plain
        self._pipeline = Pipeline(device, int(config.get(SETTING) or IN_FLIGHT))
        self.report = DeviceReport(device.name)
        why = device.pin(place.arena.memory)
        self._pinned = not why
        if why:
            log.warning(
                "%s: the arena could not be registered (%s): batches go through a staging buffer",
                device.name,
                why,
            )
        self.report.pinned = self._pinned

    @property
    def in_flight(self) -> int:
        """How many batches are taken and not yet published."""
        return len(self._pipeline)

    @property
    def room(self) -> bool:
        """Whether another batch may be taken."""
        return self._pipeline.room

    def run(self, slot: int) -> bool:
        """Start the batch. True: it publishes the slot when it has landed."""
        self._ring.start_run(slot)
        try:
            cargo = self._load(slot)
        except Exception as error:  # there is no memory of the device for its inputs, say
            self._recover(slot, error)
            return False
        if cargo is None:
            return False
        self._pipeline.launch(cargo)
        return True

    def _load(self, slot: int) -> C | None:
        """The slot's cargo; None when nobody waits for it any more."""
        raise NotImplementedError

    def land(self) -> bool:
        """Publish what has landed; whether anything has. Raises DeviceLost."""
        count = 0
        for flight in self._pipeline.landed():
            self._finish(flight)
            count += 1
        return count > 0

    def drain(self) -> None:
        """Land every batch in flight. Raises DeviceLost."""
        while self.in_flight:
            self.land()

    def close(self) -> None:
        """Let go of the arena's memory, which is unmapped next."""
        self.report.tell(at_once=True)
        self._device.close()

    def warm_up(self, rows: int, guess: SyntheticInput) -> None:
        """Run the backend on a synthetic input; no slot is touched."""
        self._plain.warm_up(rows, guess)

    def _finish(self, flight: Flight) -> None:
        cargo: Any = flight.cargo
        error, flight.fault = flight.fault, None
        if error is None:
            try:
                self._time(cargo.slot, flight)
                cargo.land()
            except Exception as fault:
                error = fault
        if error is not None:
            flight.held = None
            try:
                self._recover(cargo.slot, error, cargo)
            finally:
                del error  # its traceback holds this frame
        cargo.leave()
        self._ring.publish(cargo.slot)

    def _recover(self, slot: int, error: Exception, cargo: C | None = None) -> None:
        """Answer a batch that failed, by the plain runner. Raises DeviceLost."""
        self._device.check(error)
        try:
            self._run_again(slot, error, cargo)
        except Exception as fault:
            self._device.check(fault)
            fail_slot(self._ring, slot, fault)

    def _run_again(self, slot: int, error: Exception, cargo: C | None) -> None:
        """`cargo`: of a batch that had taken off. Raises what the batch is to end in."""
        self._plain.recover(slot, error, whole=self._make_room(error))

    def _make_room(self, error: Exception) -> bool:
        """Where memory is short, land all other batches: theirs may be what is missing. Returns whether there
        were any. Raises DeviceLost."""
        crowded = is_out_of_memory(error) and self.in_flight > 0
        if crowded:
            self.drain()
        return crowded

    def _time(self, slot: int, flight: Flight) -> None:
        now = time.monotonic_ns()
        copy_in, compute, copy_out = flight.times_ns(self._device)
        ran = now - copy_out
        self._ring.end_run(slot, ran - compute, ran)
        self.report.flew(copy_in, compute, copy_out)
