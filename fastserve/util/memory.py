"""Garbage collection at the start of a process, and views of zeros without memory of their own.

    with gc_paused():
        import much
    gc_freeze()      when the start is over

The objects that a process imports and builds at its start, about a hundred thousand, live until it ends.
Collections during the start took about an eighth of its CPU, in a server as in a worker with torch and
transformers (6.1 s, 5.3 without); every later full collection would scan these objects again.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection for imports. Not for a model's code, which may rely on it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def gc_freeze() -> None:
    """Collect garbage, and leave all present objects out of later collections."""
    gc.collect()
    gc.freeze()


_LEAST_BYTES = 16 << 20

_all = memoryview(b"")


def zero_view(nbytes: int) -> memoryview:
    """Return a read-only view of `nbytes` zeros. Raises MemoryError."""
    global _all
    if nbytes > len(_all):
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        try:
            _all = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{nbytes} bytes of address space") from error
    return _all[:nbytes]
