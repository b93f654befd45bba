"""Smaller runs of a batch there was no memory for.

    [a b c d] no memory, [a b] no memory, [a] answers, [b] answers, [c d] is not tried, [c] ...

What is as large as something there was no memory for is not tried: a model that has room for nothing is run
log2(n) times and no more. Who answers what is the runner's; requests that fail alone are isolation.py's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

from fastserve.backends.device_faults import is_out_of_memory
from fastserve.backends.shortage import count_shortage, no_memory
from fastserve.errors import ServeError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def _as_many(rows: int) -> int:
    return rows


class Smaller:
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
            count_shortage()
            trace = None if isinstance(error, ServeError) else error
            log.warning("there was no memory for a batch of %d rows: %s", rows, error, exc_info=trace)
            self._forget(rows, error)
            self._too_large = sys.maxsize if whole else padded(rows)

    def anew(self) -> Smaller:
        """For rows that may be of another size."""
        made = copy(self)
        made._too_large = sys.maxsize
        return made

    @property
    def fault(self) -> Exception:
        """What the batch is told that is not run again."""
        if not self.short:
            return self._before
        told = ServeError(self._told.kind, self._told.message)
        told.__cause__ = self._before
        return told

    def run(self, rows: Sequence[int], call: Callable[[Sequence[int]], Result]) -> list[Result]:
        """What `call` returns for them, or for halves of them, in their order. Raises ServeError
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
        """What a framework keeps for later may be what is missing."""
        self._told = no_memory(rows, error)
        getattr(self._backend, "forget_memory", lambda: None)()
