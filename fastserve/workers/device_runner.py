"""What the runners of a device's batches share: taking off, landing, what becomes of batches that failed.

    take -> launch -> (other batches) -> landed -> publish

A batch that raised lands when the device has let go of its memory, and goes the plain way from there, one run
at a time and waited for (dense.py, ragged.py): in parts where its requests may fail alone, by halves of its
rows where the device ran out of memory. A device that is lost ends the worker: DeviceLost goes up, and
nothing that is in flight is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fastserve.backends.base import Backend
from fastserve.backends.device_faults import is_out_of_memory
from fastserve.workers.device import Device, Tensor
from fastserve.workers.device_pipeline import Cargo, Flight, Pipeline
from fastserve.workers.device_report import DeviceReport
from fastserve.workers.guesses import Guess
from fastserve.workers.publishing import fail_slot

if TYPE_CHECKING:
    from fastserve.workers.workplace import Workplace

log = logging.getLogger(__name__)

# One is computed, one waits in the device's memory for it; the third copies in while the first copies out.
IN_FLIGHT = 3
SETTING = "batches_in_flight"


class DeviceBackend(Backend, Protocol):
    """A backend that has `run_on_device`: tensors of the device in and out, held to their specs."""

    def run_on_device(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


class SlotCargo(Cargo, Protocol):
    """A cargo that is a slot's."""

    slot: int

    def land(self) -> None:
        """Answer what has been copied out."""

    def leave(self) -> None:
        """What it held on the device is free."""


C = TypeVar("C", bound=SlotCargo)


class DeviceRunner(Generic[C]):
    """`plain` runs a batch, or what is left of one that failed, and returns when it has: `recover`."""

    def __init__(self, place: Workplace, device: Device, plain: Any) -> None:
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
        """Batches taken and not yet published."""
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
        """Until nothing is in flight. Raises DeviceLost."""
        while self.in_flight:
            self.land()

    def close(self) -> None:
        """The arena's memory is going."""
        self.report.tell(at_once=True)
        self._device.close()

    def warm_up(self, rows: int, guess: Guess) -> None:
        """Run the backend on a guess; no slot is touched."""
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
        """Answer a batch that failed, on the plain way. Raises DeviceLost."""
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
        """Where memory is short, let all the others land: theirs may be what is missing. Whether there were
        any. Raises DeviceLost."""
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
