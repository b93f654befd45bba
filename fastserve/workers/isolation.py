"""Failure isolation and the out-of-memory split: a batch that failed is run again by halves.

    run [a b c d] raises, run [a b] answers, run [c d] raises, run [c] raises: c has failed, run [d] answers

So a bad request fails alone (`isolate`). It is bounded, and costs nothing while runs work: a model that fails
at everything is given up after FRUITLESS runs, and every request left fails with the error of its last run.
It is not for models whose runs change something (`isolate_failures: false`), for sequences, whose state a
second run would move on, nor for decoupled models, whose first responses may be on their way.

Where memory was short (`OomSplit`) rows as many as have failed are not tried again: a model that has room for
nothing is run log2(n) times and no more.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from fastserve.backends.base import SupportsMemoryRelease
from fastserve.backends.model_errors import (
    count_out_of_memory,
    end_if_lost,
    explain,
    is_out_of_memory,
    kind_of,
    out_of_memory_error,
)
from fastserve.errors import ServeError, pack_status

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing


log = logging.getLogger(__name__)
Part = TypeVar("Part")
# One bad request in n takes 2 log2(n) runs; three in a batch of 32 take 26 at most.
MOST_RUNS = 64
# Enough to find the one good half of any batch: 65535 rows are halved 16 times.
FRUITLESS = 17
LONGEST_S = 5.0  # those behind in the queue wait for it


def most_runs(parts: int, *, short: bool) -> int:
    """Return the bound on runs: where memory was short no part is at fault, and each may be run alone."""
    return max(MOST_RUNS, 2 * parts) if short else MOST_RUNS


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
    """Count the run of some rows of a batch, whatever comes of it."""
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        ring.count_rerun(slot, rows, began_ns)


def _halves(parts: Sequence[Part]) -> list[Sequence[Part]]:
    middle = len(parts) // 2
    return [half for half in (parts[:middle], parts[middle:]) if half]


def _log(fault: Exception, parts: int, id: str) -> None:
    if not isinstance(fault, ServeError):  # these are the model's own messages for its callers
        extra = {"request_ids": id} if id else None
        log.error("the model failed on one request of %d", parts, exc_info=fault, extra=extra)


Result = TypeVar("Result")


def _as_many(rows: int) -> int:
    return rows


class OomSplit:
    """Rows of one batch that has failed with `error`; `padded` says as how many some are run. `whole`: all of
    them may be tried once more, as what was in their way is gone."""

    def __init__(
        self,
        backend: Any,
        rows: int,
        error: Exception,
        *,
        padded: Callable[[int], int] = _as_many,
        whole: bool = False,
    ) -> None:
        self._backend, self._padded, self._before = backend, padded, error
        self._too_large = sys.maxsize
        self.short = is_out_of_memory(error)
        if self.short:
            count_out_of_memory()
            trace = None if isinstance(error, ServeError) else error
            log.warning("there was no memory for a batch of %d rows: %s", rows, error, exc_info=trace)
            self._forget(rows, error)
            self._too_large = sys.maxsize if whole else padded(rows)

    def anew(self) -> OomSplit:
        """Return a copy for rows that may be of another size."""
        made = copy(self)
        made._too_large = sys.maxsize
        return made

    @property
    def fault(self) -> Exception:
        """The error for a batch that is not run again."""
        if not self.short:
            return self._before
        told = ServeError(self._told.kind, self._told.message)
        told.__cause__ = self._before
        return told

    def run(self, rows: Sequence[int], call: Callable[[Sequence[int]], Result]) -> list[Result]:
        """Return the results of `call` for the rows, or for halves of them, in order. Raises ServeError
        RESOURCE_EXHAUSTED where no smaller ones are to be had, and what else `call` raises."""
        if self._padded(len(rows)) < self._too_large:
            try:
                return [call(rows)]
            except Exception as fault:
                if not is_out_of_memory(fault):
                    raise
                self._forget(len(rows), fault)
                self._too_large = self._padded(len(rows))
        half = len(rows) // 2
        if not half or self._padded(len(rows) - half) >= self._too_large:
            raise ServeError(self._told.kind, self._told.message)
        return self.run(rows[:half], call) + self.run(rows[half:], call)

    def _forget(self, rows: int, error: Exception) -> None:
        """Have the framework release its cached memory, which may be what is missing."""
        self._told = out_of_memory_error(rows, error)
        if isinstance(self._backend, SupportsMemoryRelease):
            self._backend.release_memory()


_loop_log = logging.getLogger("fastserve.workers.loop")


def fail_slot(ring: BatchRing, slot: int, error: Exception) -> None:
    """Fail the whole batch with `error`; the caller publishes it."""
    if isinstance(error, ServeError):
        ring.fail(slot, pack_status(error), error.message)
        return
    _loop_log.error("the model failed on a batch of %d rows", ring.batch_rows(slot), exc_info=error)
    ring.fail(slot, pack_status(kind_of(error)), explain(error))
