"""The engine's public face: all that dialects and the serving floor may import from the engine."""

from fastserve._ext.fast_path import Ticket
from fastserve.engine.arena_io import (
    InputLayout,
    OutputLayout,
    SliceLease,
    lay_out_inputs,
    lay_out_outputs,
    read_response,
    request_note,
)
from fastserve.engine.batch_queue import QUEUED_TOO_LONG, BatchQueue
from fastserve.engine.counters import (
    BatchCounts,
    RequestCounters,
    ResponseCounts,
    SizeCounts,
    Took,
    VersionCounts,
    counters_of,
    counts_of,
)
from fastserve.engine.device_memory import lend
from fastserve.engine.engine import (
    Engine,
    Scheduler,
    cache_stage_of,
    fast_queue_of,
    sampler_of,
    scheduler_of,
)
from fastserve.engine.request_log import RequestSampler
from fastserve.engine.schedulers.cache import (
    CacheStage,
    Entry,
    InputForm,
    Miss,
    OutputForm,
    ResponseCache,
    keep_response,
    respond,
)

__all__ = [
    "QUEUED_TOO_LONG",
    "BatchCounts",
    "BatchQueue",
    "CacheStage",
    "Engine",
    "Entry",
    "InputForm",
    "InputLayout",
    "Miss",
    "OutputForm",
    "OutputLayout",
    "RequestCounters",
    "RequestSampler",
    "ResponseCache",
    "ResponseCounts",
    "Scheduler",
    "SizeCounts",
    "SliceLease",
    "Ticket",
    "Took",
    "VersionCounts",
    "cache_stage_of",
    "counters_of",
    "counts_of",
    "fast_queue_of",
    "keep_response",
    "lay_out_inputs",
    "lay_out_outputs",
    "lend",
    "read_response",
    "request_note",
    "respond",
    "sampler_of",
    "scheduler_of",
]
