"""The engine's face: what dialects and the serving floor may know of it; its modules are its own."""

from fastserve._ext.fast_path import Pending
from fastserve.engine.batch_queue import QUEUED_TOO_LONG, BatchQueue
from fastserve.engine.cache import CacheStage, Entry, Form, Miss, ResponseCache, Sort, keep_response, respond
from fastserve.engine.counters import (
    BatchCounts,
    Counters,
    ResponseCounts,
    Took,
    VersionCounts,
    counters_of,
    counts_of,
)
from fastserve.engine.engine import Engine
from fastserve.engine.forms import note_of
from fastserve.engine.layouts import (
    InputLayout,
    OutputLayout,
    Reservation,
    lay_out_inputs,
    lay_out_outputs,
    read_response,
)
from fastserve.engine.lending import landing, lend
from fastserve.engine.scheduler import Scheduler, cache_stage_of, fast_queue_of, scheduler_of

__all__ = [
    "QUEUED_TOO_LONG",
    "BatchCounts",
    "BatchQueue",
    "CacheStage",
    "Counters",
    "Engine",
    "Entry",
    "Form",
    "InputLayout",
    "Miss",
    "OutputLayout",
    "Pending",
    "Reservation",
    "ResponseCache",
    "ResponseCounts",
    "Scheduler",
    "Sort",
    "Took",
    "VersionCounts",
    "cache_stage_of",
    "counters_of",
    "counts_of",
    "fast_queue_of",
    "keep_response",
    "landing",
    "lay_out_inputs",
    "lay_out_outputs",
    "lend",
    "note_of",
    "read_response",
    "respond",
    "scheduler_of",
]
