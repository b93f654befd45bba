"""The arena, the shared memory of a version's processes: planned, created and joined here.

One memfd (no name anywhere) holds the batch ring and the slabs; each process has an eventfd as its doorbell.
The owner makes an arena when the first worker has reported its tensors; workers and other front processes
join it with the descriptors that they are sent. Layout: ext/include/arena.h.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from fastserve._ext import batch_ring
from fastserve._ext.arena_maintenance import WorkerHeartbeat
from fastserve._ext.batch_ring import BatchRing
from fastserve.backends.registry import find_backend
from fastserve.settings.model_options import TextOptions, read_options
from fastserve.tensor import TensorSpec
from fastserve.util.memory import new_files
from fastserve.workers.pinning import NO_NODE, prefer_node
from fastserve.workers.trace_notes import KEY_BYTES, TraceNotes

MAX_ROWS = 65535  # MAX_BATCH_ROWS of arena.h
MAX_SLOTS = 65536
MOST_SLOTS = 256  # a worker scans all slots when it takes one
# Unread parts of a response after which the model waits for its reader.
WINDOW_PARTS = 64
MOST_STREAMS = 1024  # an answer in parts holds its slot until the last of them
# Batches are sealed before they are full, and held while they run and are answered: slots beside those that
# a full queue needs. Where none is left requests wait for one; what refuses them are rows and bytes.
SPARE_SLOTS = 8
LEAST_SLOTS = 16
MOST_SPARE_BYTES = 1 << 30  # of columns: a bound, not a cost, as pages that are never touched take no memory
MOST_PINNED_BYTES = 1 << 28  # of columns that a device has registered: all of their pages are touched by that
REMOTE_HANDS = 64  # batches that remote workers may have at a time beside a full queue, halved
SLAB_PAGE = 4096
WORDS_PAGES = 64  # of an arena of columns: for the errors of requests that failed alone
LENT_PAGES = 1024  # and for requests with device memory of clients: a page each
MOST_SLAB_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Geometry:
    """Size and form of an arena. `inputs` and `outputs` are bytes of a row, empty in the slab form."""

    slots: int
    max_rows: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    slab_pages: int
    max_delay_ns: int
    workers: int
    fronts: int
    requests: bool = False  # the worker sees requests one by one: slabs, with notes
    decoupled: bool = False  # and answers each of them in parts
    max_queued: int = 0  # rows that may wait for a worker at a time, 0 for any number
    pinned: bool = False  # registered with devices, whose DMA would not notice that a page was exchanged
    window: int = 0  # of text: tokens a reader may be behind; 0 in any other form

    @property
    def dense(self) -> bool:
        """True when rows lie in columns; false when each request brings its own slab."""
        return bool(self.inputs)


def plan_geometry(
    config: Mapping[str, Any],
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    *,
    fronts: int = 1,
    parted: bool = False,
) -> Geometry:
    """Plan the arena for a model's tensors; `config` is model.yaml as plain values. `parted`: a request
    brings some of the inputs only.

    Columns when every row has a known size, slabs otherwise. The queue's bound in bytes is one in rows
    where rows have a size.
    """
    if find_backend(str(config["backend"])).takes == "text":
        return plan_text(config, fronts=fronts)
    max_batch = min(int(config["max_batch_size"]), MAX_ROWS)
    rows_in, rows_out = _row_bytes(inputs), _row_bytes(outputs)
    requests = find_backend(str(config["backend"])).takes == "requests"
    dense = max_batch > 0 and rows_in is not None and rows_out is not None and not requests
    options = read_options(config)
    dense = dense and not (options.tells_requests or parted)
    columns = (rows_in or (), rows_out or ()) if dense else ((), ())
    max_rows = max(max_batch, 1)
    queue_bytes, workers = int(config["max_queue_bytes"]), int(config["instances"])
    hands = REMOTE_HANDS if config.get("placement") else workers  # that may hold batches
    decoupled = requests and options.decoupled
    queued = int(config["max_queue_rows"])
    if dense:
        queued = min(queued, queue_bytes // max(sum(columns[0]), 1))
    queued = max(queued, max_rows)  # a request always finds an empty queue large enough
    pinned = uses_device(config)
    spare = MOST_PINNED_BYTES if pinned else MOST_SPARE_BYTES
    row_bytes = sum(columns[0]) + sum(columns[1])
    slots = count_slots(queued, max_rows, row_bytes, hands, decoupled=decoupled, spare_bytes=spare)
    pages = (
        WORDS_PAGES + (LENT_PAGES if pinned else 0)
        if dense
        else min(2 * queue_bytes, MOST_SLAB_BYTES) // SLAB_PAGE
    )
    return Geometry(
        slots=slots,
        max_rows=max_rows,
        inputs=columns[0],
        outputs=columns[1],
        slab_pages=pages,
        max_delay_ns=int(config["max_queue_delay_us"]) * 1000,
        workers=workers,
        fronts=fronts,
        requests=requests,
        decoupled=decoupled,
        max_queued=0 if config.get("queued_elsewhere") else queued,
        pinned=pinned,
    )


def uses_device(config: Mapping[str, Any]) -> bool:
    """Whether any worker of the version computes on something else than a CPU."""
    named = [config.get("device"), *(place["device"] for place in config.get("places") or ())]
    return any(name not in (None, "", "cpu") for name in named)


def plan_text(config: Mapping[str, Any], *, fronts: int) -> Geometry:
    """Plan the arena of a text model: a slot for every sequence that may run or wait, prompts in slabs. As
    much again as prompts may take is for tokens on their way."""
    text, workers = msgspec.convert(config.get("text") or {}, TextOptions), int(config["instances"])
    return Geometry(
        slots=min(text.max_sequences * workers + text.max_waiting, MAX_SLOTS),
        max_rows=1,
        inputs=(),
        outputs=(),
        slab_pages=min(2 * int(config["max_queue_bytes"]), MOST_SLAB_BYTES) // SLAB_PAGE,
        max_delay_ns=0,
        workers=workers,
        fronts=fronts,
        window=text.reader_tokens,
    )


def count_slots(
    queued: int,
    max_rows: int,
    row_bytes: int,
    workers: int,
    *,
    decoupled: bool,
    spare_bytes: int = MOST_SPARE_BYTES,
) -> int:
    """Count the slots for so many rows, sealed half full, and for batches that run or are being answered."""
    wanted = 2 * (queued // max_rows) + 2 * workers + SPARE_SLOTS
    affordable = spare_bytes // max(row_bytes * max_rows, 1)
    return max(min(wanted, affordable, MOST_STREAMS if decoupled else MOST_SLOTS), LEAST_SLOTS)


def _row_bytes(specs: Mapping[str, TensorSpec]) -> tuple[int, ...] | None:
    sizes = [spec.row_bytes for spec in specs.values()]
    return None if not sizes or None in sizes else tuple(size or 0 for size in sizes)


class Arena:
    """One process's mapping of an arena: memory, doorbells, the ring over them and the trace notes behind it.
    `close()` releases it."""

    def __init__(
        self,
        geometry: Geometry,
        memory_fd: int,
        worker_doorbells: Sequence[int],
        front_doorbells: Sequence[int],
    ):
        self.geometry = geometry
        self.memory_fd = memory_fd
        self.worker_doorbells = list(worker_doorbells)
        self.front_doorbells = list(front_doorbells)
        self.memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
        size = geometry.slots, geometry.fronts, geometry.max_rows
        self.traces = TraceNotes(self.memory, len(self.memory) - TraceNotes.measure(*size), *size)

    @classmethod
    def create(cls, geometry: Geometry, node: int = NO_NODE) -> Arena:
        """Create an arena with its doorbells, all descriptors close-on-exec; `node` is preferred for its
        memory. Raises ServeError where there is no memory for it."""
        layout, workers = _layout(geometry), geometry.workers
        ring_bytes = -(-batch_ring.measure(**layout) // mmap.PAGESIZE) * mmap.PAGESIZE
        notes_bytes = TraceNotes.measure(geometry.slots, geometry.fronts, geometry.max_rows)
        with new_files("fastserve-arena", ring_bytes + notes_bytes) as fds:
            os.pwrite(fds[0], os.urandom(KEY_BYTES), ring_bytes)
            for _ in range(workers + geometry.fronts):
                fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            arena = cls(geometry, fds[0], fds[1 : 1 + workers], fds[1 + workers :])
        if node != NO_NODE:
            prefer_node(arena.memory, node)  # before anything is touched
        layout |= {"max_delay_ns": geometry.max_delay_ns, "max_queued": geometry.max_queued}
        batch_ring.format_arena(arena.memory, **layout)
        return arena

    @classmethod
    def join(cls, message: Mapping[str, Any], fds: Sequence[int]) -> Arena:
        """Map the arena that another process has described with `message` and descriptors; owns the
        descriptors."""
        raw = dict(message["geometry"])
        raw["inputs"], raw["outputs"] = tuple(raw["inputs"]), tuple(raw["outputs"])
        geometry = Geometry(**raw)
        workers = geometry.workers
        return cls(geometry, fds[0], fds[1 : 1 + workers], fds[1 + workers :])

    def ring(self, *, front: int = -1, worker: int = -1, control: int = -1) -> BatchRing:
        """The ring as front `front` or as worker `worker` sees it; `control` also ends a worker's wait."""
        own = (
            self.front_doorbells[front]
            if front >= 0
            else self.worker_doorbells[worker]
            if worker >= 0
            else -1
        )
        return BatchRing(
            self.memory,
            front=front,
            worker=worker,
            own_doorbell=own,
            worker_doorbells=self.worker_doorbells,
            front_doorbells=self.front_doorbells,
            control=control,
        )

    def pulse(self) -> WorkerHeartbeat:
        """Return the owner's means to ask workers for signs of life."""
        return WorkerHeartbeat(self.memory, self.worker_doorbells, parted=self.geometry.decoupled)

    def fds_for_worker(self, worker: int) -> tuple[dict[str, Any], list[int]]:
        """The message and the descriptors that worker number `worker` is sent to join."""
        return self._described(worker=worker)

    def fds_for_front(self, front: int) -> tuple[dict[str, Any], list[int]]:
        """The message and the descriptors that another front process is sent to join."""
        return self._described(front=front)

    def _described(self, **who: int) -> tuple[dict[str, Any], list[int]]:
        geometry = {name: getattr(self.geometry, name) for name in Geometry.__slots__}
        return {"geometry": geometry, **who}, [self.memory_fd, *self.worker_doorbells, *self.front_doorbells]

    def close(self) -> None:
        """Close every descriptor. The memory goes when the last view of it does."""
        for fd in (self.memory_fd, *self.worker_doorbells, *self.front_doorbells):
            os.close(fd)
        self.worker_doorbells, self.front_doorbells, self.memory_fd = [], [], -1
        with contextlib.suppress(BufferError):  # a ring still looks at it; unmapped when that goes
            self.memory.close()
        del (
            self.memory,
            self.traces,
        )  # the arena itself may be in a circle with its workers until it is collected


def _layout(geometry: Geometry) -> dict[str, Any]:
    return {
        "slots": geometry.slots,
        "max_rows": geometry.max_rows,
        "inputs": geometry.inputs,
        "outputs": geometry.outputs,
        "workers": geometry.workers,
        "fronts": geometry.fronts,
        "slab_pages": geometry.slab_pages,
    }


class WorkerContext(NamedTuple):
    """The arena of a worker, its end of the ring, its backend, and model.yaml as plain values (`config`)."""

    arena: Arena
    ring: BatchRing
    backend: Any
    config: Mapping[str, Any]
