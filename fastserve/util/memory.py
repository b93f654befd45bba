"""Memory of a process: the heap of the C library, garbage collection at the start, zeros, shared files.

    with gc_paused():
        import much
    gc_freeze()      when the start is over

The objects that a process imports and builds at its start, about a hundred thousand, live until it ends.
Collections during the start took about an eighth of its CPU, in a server as in a worker with torch and
transformers (6.1 s, 5.3 without); every later full collection would scan these objects again.

glibc gives freed memory back to the kernel in small steps and fetches it again for the next body, zeroed
page by page. Measured with 600 KB bodies over 32 connections: 204 us of CPU a request by default, 119 us
when up to 64 MiB of freed memory is kept. The same goes for the arrays of a model: a worker that reads a
copy of such a body took 514 us, three quarters of them in page faults, and 126 us when its memory is kept.

It also gives every thread a heap of its own, which keeps what was freed there for that thread. Large replies
are printed in threads: 40 of 5 MB left 30 MB behind in each thread that had printed one.

glibc keeps free memory between blocks in use without a bound, whatever the settings: 40 replies of 5 MB that
nobody reads left 640 MB behind. `HeapTrim` returns it once the burst is over. A trim takes 0.07 ms of CPU a
megabyte (40 ms for 600 MB), during which other threads that need the heap wait. During a load of equal bodies
a trim gains nothing, since each body reuses the memory of one before. Bodies of different sizes do not: one
hundred of 7 MB left 240 MB between them in a second, with 64 MB charged to the memory budget. So the heap is
trimmed at once when the process holds more than the charged bytes by 1/FREE_SHARE of the budget. From then
on, and when the budget is used up, blocks of PRESSED_KEPT_BYTES and more get mappings of their own, which are
returned when freed, until the charged bytes have fallen below that share. Mapping them always would take up
to twice the CPU for a JSON body of 2.5 MB (7.2 ms instead of 4.4).

Memory files without a name are made by one process and mapped by all, and never change their size:

    fd = make_shared_file("fastserve-metrics", nbytes)     its descriptor goes to other processes
    memory = map_shared_file(fd)                           in each of them
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    import asyncio

    from fastserve.util.memory_budget import MemoryBudget


KEPT_BYTES = 64 << 20
LARGEST_KEPT_BYTES = 32 << 20  # glibc's own ceiling for blocks that do not get a mapping of their own
TRIM_BYTES = 8 << 20
LOOKS = 4  # two seconds
REST_SHARE = 100  # no trim follows for so many times the duration of the last one
PRESSED_REST_SHARE = 5  # the same, while memory lies free that the budget does not allow
PRESSED_KEPT_BYTES = 1 << 20
FREE_SHARE = 4  # the part of the budget that may lie free in the heap
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def share_heap() -> bool:
    """Use one heap for all threads. Call it before any thread starts. False where the C library cannot."""
    return _set({_M_ARENA_MAX: 1})


def keep_freed_memory() -> bool:
    """Keep up to KEPT_BYTES of freed memory for the next bodies. Call it after the start, when its
    memory was given back. False where the C library cannot."""
    return _set({_M_TRIM_THRESHOLD: KEPT_BYTES, _M_MMAP_THRESHOLD: LARGEST_KEPT_BYTES})


def trim_heap() -> bool:
    """Give the kernel back every free page of the heap. False where nothing was given back."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError):
        return False


def own_bytes() -> int:
    """Return the bytes of resident memory that no other process shares; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            fields = file.read(200).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


class HeapTrim:
    """Trims the heap of a process when the bytes charged to its budget have fallen by TRIM_BYTES and stayed
    there for LOOKS looks; and when its memory exceeds the charged bytes by 1/FREE_SHARE of the budget more
    than after the last trim."""

    def __init__(
        self,
        budget: MemoryBudget,
        trim: Callable[[], object] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], int] = own_bytes,
    ) -> None:
        self._budget, self._trim, self._clock, self._own = budget, trim, clock, own
        self._most_free = budget.limit // FREE_SHARE
        self._besides: int | None = None  # bytes that the budget does not count and no trim gives back
        budget.on_turnover, budget.on_strain = self.relieve, self._press
        self._recent: deque[int] = deque([0] * LOOKS, maxlen=LOOKS)
        self._high = 0  # at most, since the heap was trimmed
        self._pressed = False  # blocks from PRESSED_KEPT_BYTES on have mappings of their own
        self._rest_until_s = self._pressed_until_s = 0.0
        self._running: asyncio.Future[None] | None = None

    def look(self) -> asyncio.Future[None] | None:
        """Called twice a second. Return the trim, which runs in a thread, if one begins now."""
        self._recent.append(self._budget.take_peak())
        self._high = max(self._high, self._recent[-1])
        held = max(self._recent)
        burst = self._high - held >= TRIM_BYTES  # one is over
        if self._besides is None or (held < TRIM_BYTES and not burst and not self._busy):
            self._besides = self._own() - self._budget.used
        if self._pressed and held < self._most_free and not self._busy:
            self._pressed, self._rest_until_s = False, 0.0
            self._map_from(LARGEST_KEPT_BYTES)
        if self._busy or not burst or self._clock() < self._rest_until_s:
            return None
        self._high = held
        return self._begin(pressed=False)

    def relieve(self) -> asyncio.Future[None] | None:
        """Called when much memory was given back. Return the trim, if one begins now."""
        if self._besides is None or self._busy or self._clock() < self._pressed_until_s:
            return None
        if self._own() - self._budget.used - self._besides < self._most_free:
            return None
        self._press()
        return self._begin(pressed=True)

    def _press(self) -> None:
        if not self._pressed:
            self._pressed = True
            self._map_from(PRESSED_KEPT_BYTES)

    @property
    def _busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def _map_from(self, nbytes: int) -> None:
        _set({_M_MMAP_THRESHOLD: nbytes})

    def _begin(self, *, pressed: bool) -> asyncio.Future[None]:
        import asyncio  # workers import this module too, and start without a loop

        self._running = asyncio.get_running_loop().run_in_executor(None, self._run, pressed)
        return self._running

    def _run(self, pressed: bool) -> None:
        began_s = self._clock()
        if not pressed:
            gc.collect()  # a refusal's traceback may keep its body until then
        self._trim()
        ended_s = self._clock()
        self._pressed_until_s = ended_s + (ended_s - began_s) * PRESSED_REST_SHARE
        if not pressed:
            self._besides = self._own() - self._budget.used
            self._rest_until_s = ended_s + (ended_s - began_s) * REST_SHARE


def _set(wanted: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(name, value) for name, value in wanted.items())


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


def own_memory_bytes(pid: int) -> int:
    """Return the resident memory of a process that is neither of files nor shared, as arenas are; 0 for a
    process that has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read(200).split()
            return (int(resident) - int(shared)) * _PAGE_BYTES
    except (OSError, ValueError):  # it ended, before or while it was read
        return 0


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process, of pages that several have its part (PSS); 0 for a process that has
    ended. Where the kernel does not tell, what is neither of files nor shared. It takes 0.1 ms and 1 ms for
    each 100 MB."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return own_memory_bytes(pid)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@contextmanager
def new_files(name: str, nbytes: int, flags: int = 0) -> Iterator[list[int]]:
    """Yield a list with the descriptor of a new file of zeros; its pages are allocated as they are written.
    Descriptors in the list are closed where the block raises; an OSError becomes ServeError UNAVAILABLE."""
    fds: list[int] = []
    try:
        fds.append(os.memfd_create(name, os.MFD_CLOEXEC | flags))
        os.ftruncate(fds[0], nbytes)
        yield fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            text = f"no shared memory of {nbytes} bytes for {name}: {error.strerror}"
            raise ServeError(Kind.UNAVAILABLE, text) from None
        raise


def make_shared_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a new file of zeros. Raises ServeError where there is no memory for it."""
    with new_files(name, nbytes, os.MFD_ALLOW_SEALING) as fds:
        fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, SEALS)  # nobody can shrink it under a reader (SIGBUS)
    return fds[0]


def map_shared_file(fd: int) -> mmap.mmap:
    """Map a whole file; the descriptor stays the caller's. Raises ValueError if its size may change."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError as error:
        raise ValueError("not a file of shared memory: it cannot be sealed") from error
    if not sealed:
        raise ValueError("not a file of shared memory: its size is not sealed")
    return mmap.mmap(fd, os.fstat(fd).st_size)
