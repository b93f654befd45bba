"""The batch loop of a worker: take a batch, run it, publish it, until the owner says stop.

The loop sees batches and arrays, and nothing of requests or clients.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from fastserve.backends import model_callbacks
from fastserve.backends.base import Backend, SupportsComputeStream
from fastserve.backends.model_errors import end_if_lost
from fastserve.util.memory import gc_freeze, keep_freed_memory
from fastserve.workers.arena import Arena, WorkerContext
from fastserve.workers.control import ControlChannel, PeerGone
from fastserve.workers.device.base import ComputeDevice, open_device, runs_there
from fastserve.workers.isolation import fail_slot
from fastserve.workers.pinning import PRIORITY

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.backends.base import ElementBackend, RequestBackend
    from fastserve.backends.llm.protocols import TextBackend
    from fastserve.workers.text_loop import TextLoop
    from fastserve.workers.warmup import SyntheticInput

log = logging.getLogger(__name__)

CONTROL_SPOKE = -2
# A worker that just finished looks for the next batch this long before it sleeps: a wake-up across
# cores costs 30 to 70 us, one on the same core 3. Worth it only when nobody needs this core.
SPIN_NS = 20_000


class Runner(Protocol):
    """Turns a taken slot into responses; one for each form of arena."""

    def run(self, slot: int) -> bool | None:
        """Answers every place of the slot. Raises what the backend raised. True: it publishes the slot by
        itself, now or later."""

    def warm_up(self, rows: int, guess: SyntheticInput) -> None:
        """Run the backend once on `rows` synthetic rows. Raises what the backend raises."""


def serve(
    backend: Backend,
    control: ControlChannel,
    config: Mapping[str, Any],
    message: Mapping[str, Any],
    fds: list[int],
) -> None:
    """Join the arena, warm up, say ready, and run batches until told to stop.

    `config` is model.yaml as plain values; `message` holds the arena's geometry and this worker's number, and
    whether the last of `fds` is of recorded requests.

    Raises what the backend raises during warm-up: a version that cannot run does not become ready.
    """
    recorded = fds.pop() if message.get("recorded") else -1
    arena = Arena.join(message, fds)
    runner: Any = None
    try:
        worker = int(message["worker"])
        ring = arena.ring(worker=worker, control=control.fileno())
        if arena.geometry.window:
            loop = make_text_loop(arena, ring, worker, backend, config, control)
            _say_ready(control)
            loop.run(lambda: _told_to_stop(control))
            return
        runner = make_runner(WorkerContext(arena, ring, backend, config))
        warm_up(runner, arena, backend, config)
        recorded_ns = _run_recorded(backend, recorded, config["max_batch_size"]) if recorded >= 0 else 0
        stopped = (
            open_line(control, arena, ring)
            if arena.geometry.requests
            else lambda: _told_to_stop(control, runner)
        )
        _say_ready(control, recorded_ns)
        run_batches(ring, runner, stopped, control.fileno())
    finally:
        try:
            getattr(runner, "close", lambda: None)()
        finally:
            arena.close()


def make_text_loop(
    arena: Arena,
    ring: BatchRing,
    worker: int,
    backend: Backend,
    config: Mapping[str, Any],
    control: ControlChannel,
) -> TextLoop:
    """Make the loop of a text engine, which has no runner and warms up when it loads."""
    from fastserve.workers.text_loop import TextLoop

    engine, limit_ms = cast("TextBackend", backend), int(config["run_timeout_ms"])
    return TextLoop(arena, ring, worker, engine, control.fileno(), limit_ms=limit_ms)


def _say_ready(control: ControlChannel, recorded_ns: int = 0) -> None:
    if threading.current_thread() is threading.main_thread():  # a thread's model comes and goes beside others
        gc_freeze()  # of a loaded model
    keep_freed_memory()  # for the arrays of the next batch
    PRIORITY.step_forward()
    control.send({"op": "ready", **({"recorded_ns": recorded_ns} if recorded_ns else {})})


def make_runner(place: WorkerContext) -> Runner:
    """The runner for this arena's form. numpy is first needed here."""
    arena, ring, backend, config = place
    if "transformer" in config:
        from fastserve.codec.object_codecs import CODECS
        from fastserve.workers.object_batches import LibraryRunner

        wanted = config["transformer"]
        codec = CODECS[wanted["transport"]]
        return LibraryRunner(arena, ring, cast("ElementBackend", backend), codec, whole=wanted["whole"])
    if arena.geometry.requests:
        from fastserve.workers.requests import RequestRunner

        return RequestRunner(arena, ring, cast("RequestBackend", backend), config)
    if runs_there(config, backend):
        stream = backend.compute_stream if isinstance(backend, SupportsComputeStream) else None
        return make_device_runner(place, open_device(config, stream))
    if arena.geometry.dense:
        from fastserve.workers.runners import DenseRunner

        return DenseRunner(place)
    from fastserve.workers.runners import SlabRunner

    return SlabRunner(place)


def make_device_runner(place: WorkerContext, device: ComputeDevice) -> Runner:
    """The runner for batches that go over a device."""
    if place.arena.geometry.dense:
        from fastserve.workers.device.dense_batches import DeviceDenseRunner

        return DeviceDenseRunner(place, device)
    from fastserve.workers.device.slabs import DeviceSlabRunner

    return DeviceSlabRunner(place, device)


def open_line(control: ControlChannel, arena: Arena, ring: BatchRing) -> Callable[[], bool]:
    """Let the model call other models; returns the callback for messages of the control channel."""
    from fastserve.workers.bls import BlsClient

    return BlsClient.open(control, arena, ring).turn


def run_batches(ring: BatchRing, runner: Runner, stopped: Callable[[], bool], control_fd: int) -> None:
    """Run batches until `stopped`, which is called when a message arrives, returns True."""
    spin_ns = SPIN_NS if len(os.sched_getaffinity(0)) > 1 else 0
    if hasattr(runner, "land"):
        from fastserve.workers.device.pipeline import run_flights

        run_flights(ring, runner, stopped, spin_ns, control_fd)
        return
    while True:
        slot = ring.take_or_wait(spin_ns)
        if slot >= 0:
            answer(ring, runner, slot)
        elif slot == CONTROL_SPOKE and stopped():
            return


def answer(ring: BatchRing, runner: Runner, slot: int) -> None:
    """Run one batch and publish it, as an error when the backend raised. Raises DeviceLost, and then nothing
    is published: what was in this worker's hands is run elsewhere."""
    try:
        if runner.run(slot):
            return
    except Exception as error:
        end_if_lost(error)
        fail_slot(ring, slot, error)
    ring.publish(slot)


def _told_to_stop(control: ControlChannel, runner: Any = None) -> bool:
    try:
        message = control.receive().message
    except PeerGone:
        return True
    if message["op"] == "close_lent":
        getattr(runner, "close_lent", lambda handle: None)(bytes.fromhex(message["handle"]))
        model_callbacks.notify("lent_closed", number=message["number"])
    return bool(message["op"] == "stop")


def _run_recorded(backend: Backend, fd: int, max_rows: int) -> int:
    """Run recorded requests; returns the nanoseconds they took."""
    from fastserve.workers.warmup import run_recorded

    began_ns = time.monotonic_ns()
    try:
        run_recorded(backend, fd, max_rows)
    finally:
        os.close(fd)
    return time.monotonic_ns() - began_ns


def warm_up(runner: Runner, arena: Arena, backend: Backend, config: Mapping[str, Any]) -> None:
    """Run the backend as its configuration says, before it is ready."""
    samples = config.get("warmup", "auto")
    if samples == "off":
        return
    if samples != "auto":
        from fastserve.workers.warmup import run_samples

        run_samples(backend, samples, batching=config["max_batch_size"] > 0)
        return
    from fastserve.workers.warmup import run_synthetic

    sizes = dict.fromkeys((1, *(config.get("allowed_batch_sizes") or ())))
    run_synthetic(runner.warm_up, [min(rows, arena.geometry.max_rows) for rows in sizes], backend.inputs)
