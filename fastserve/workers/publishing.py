"""A batch that ends in an error: in the model's own words, or with a traceback in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastserve.backends.base import explain, kind_of
from fastserve.errors import ServeError

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing

log = logging.getLogger("fastserve.workers.loop")


def fail_slot(ring: BatchRing, slot: int, error: Exception) -> None:
    """Let the whole batch end in `error`; publishing follows."""
    if isinstance(error, ServeError):
        ring.fail(slot, error.kind.value, error.message)
        return
    log.error("the model failed on a batch of %d rows", ring.batch_rows(slot), exc_info=error)
    ring.fail(slot, kind_of(error).value, explain(error))
