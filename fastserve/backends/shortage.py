"""A batch that there was no memory for, a device's or the host's: what its requests are told, and its being
counted. Who runs it again smaller is its runner.
"""

from __future__ import annotations

from fastserve.backends import wishes
from fastserve.backends.base import explain
from fastserve.errors import Kind, ServeError

WORDS = "there is no memory for a batch of {} rows: {}"


def no_memory(rows: int, error: BaseException) -> ServeError:
    """What the requests of a batch are told that can be made no smaller."""
    return ServeError(Kind.RESOURCE_EXHAUSTED, WORDS.format(rows, explain(error)))


def count_shortage() -> None:
    """A batch has failed for want of memory, whatever becomes of it. Told at once: perhaps no batch comes
    after it that could."""
    wishes.tell("no_memory", batches=1)
