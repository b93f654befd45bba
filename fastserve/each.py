"""Work on many at once, where the failure of one is no other's: connections flushed, answers heard together.

    each(gathered, methodcaller("flush"), methodcaller("abort"))

Not for what has a caller to raise to: here nobody else would hear of it, so it is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


def each(
    things: Iterable[T], work: Callable[[T], object], give_up: Callable[[T], object] | None = None
) -> None:
    """`work` on every one; `give_up` ends one on which it failed, and must not fail itself."""
    for thing in things:
        try:
            work(thing)
        except Exception:
            log.exception("one of many failed; the others go on")
            if give_up is not None:
                give_up(thing)
