"""When Python searches for garbage, and among what. A search finds circles; all else is freed at once.

    with unsearched():
        import much
    keep_what_is()      when the start is over

What a process imports and builds at its start stays until it ends: a hundred thousand objects. Looking
through them while they were made took about an eighth of the CPU of a start, of a server's as of a worker's
with torch and transformers (6.1 s, 5.3 without); later every full search would look at them again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unsearched() -> Iterator[None]:
    """For imports, which make next to no garbage. Not for code of a model's: it may rely on the search."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def keep_what_is() -> None:
    """What exists now is not looked at again, but for what is garbage already."""
    gc.collect()
    gc.freeze()
