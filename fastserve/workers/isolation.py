"""A bad request fails only itself: when the run of a batch raises, its requests are run again by halves.

    run [a b c d] raises, run [a b] answers, run [c d] raises, run [c] raises: c has failed, run [d] answers

Where memory was short that is also the smaller batch that may go through; rows of one request that is alone
are parted by its runner.

Bounded, and nothing at all while runs work. A model that fails at everything is left alone after FRUITLESS
runs, and whoever has not been told by then fails with what the last run raised that it was in. Not for models
that say a run changes something (`isolate_failures: false`), for sequences, whose state a second run would
move on, nor for decoupled models, whose first answers may be on their way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastserve.backends.device_faults import end_if_lost
from fastserve.config.options import read_options
from fastserve.errors import ServeError

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

log = logging.getLogger(__name__)

Part = TypeVar("Part")
# One bad request in n takes 2 log2(n) runs; three in a batch of 32 take 26 at most.
MOST_RUNS = 64
# Enough to find the one good half of any batch: 65535 rows are halved 16 times.
FRUITLESS = 17
LONGEST_S = 5.0  # those behind in the queue wait for it
SETTING = "isolate_failures"


def most_runs(parts: int, *, short: bool) -> int:
    """Where memory was short nothing is wrong with any of them, and each may be run alone."""
    return max(MOST_RUNS, 2 * parts) if short else MOST_RUNS


def may_isolate(config: Mapping[str, Any]) -> bool:
    """Whether the model's batches may run again in parts; `config` is model.yaml as plain values. A
    config.pbtxt says it by a parameter of the setting's name."""
    options = read_options(config)
    told = (config.get("parameters") or {}).get(SETTING) if options.origin != "model.yaml" else None
    wanted = config.get(SETTING, True) and str(told).lower() != "false"
    return bool(wanted) and options.sequences is None and not options.decoupled


def isolate(
    parts: Sequence[Part],
    error: Exception,
    *,
    run: Callable[[Sequence[Part]], None],
    fail: Callable[[Part, Exception], None],
    told: Exception | None = None,
    most: int = MOST_RUNS,
    id: Callable[[Part], str] = lambda part: "",
) -> None:
    """Run the parts of a batch again whose run raised `error`. Not to be called in a handler of it: it
    would be the context of what is raised now, and that be taken for the same. `run` answers those it is
    given, or raises; `fail` is called for each that cannot be answered, with `told` if it was in no other
    run. `id` is what the client calls a request, where that is known here: columns and plain slabs carry
    none."""
    end_if_lost(error)
    until, runs, fruitless = time.monotonic() + LONGEST_S, 0, 0
    waiting = [(half, told or error) for half in reversed(_halves(parts))]
    try:
        while waiting:
            group, error = waiting.pop()
            if runs >= most or fruitless == FRUITLESS or time.monotonic() > until:
                for part in group:
                    fail(part, error)
                continue
            runs += 1
            try:
                run(group)
                fruitless = -most  # some can be answered: the bound on all runs is the one that counts
            except Exception as fault:
                end_if_lost(fault)
                fruitless += 1
                if len(group) > 1:
                    waiting += [(half, fault) for half in reversed(_halves(group))]
                else:
                    _log(fault, len(parts), id(group[0]))
                    fail(group[0], fault)
    finally:
        del (
            error,
            told,
        )  # its traceback holds this frame: a circle, and in its frames requests with their slabs


@contextmanager
def counted(ring: BatchRing, slot: int, rows: int) -> Iterator[None]:
    """A run of some rows of the batch, which counts as one of the model's whatever comes of it."""
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        ring.count_rerun(slot, rows, began_ns)


def _halves(parts: Sequence[Part]) -> list[Sequence[Part]]:
    middle = len(parts) // 2
    return [half for half in (parts[:middle], parts[middle:]) if half]


def _log(fault: Exception, parts: int, id: str) -> None:
    if not isinstance(fault, ServeError):  # these are the model's own words for its callers
        extra = {"request_ids": id} if id else None
        log.error("the model failed on one request of %d", parts, exc_info=fault, extra=extra)
