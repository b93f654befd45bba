"""Memory files without a name that processes share: made by one, mapped by all, never of another size.

fd = make_shared_file("fastserve-metrics", nbytes)     its descriptor goes to other processes
memory = map_shared_file(fd)                           in each of them
"""

from __future__ import annotations

import fcntl
import mmap
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_shared_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a new file of zeros; its pages are allocated as they are written."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)  # nobody can shrink it under a reader (SIGBUS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_shared_file(fd: int) -> mmap.mmap:
    """Map a whole file; the descriptor stays the caller's. Raises ValueError if its size may change."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError as error:
        raise ValueError("not a file of shared memory: it cannot be sealed") from error
    if not sealed:
        raise ValueError("not a file of shared memory: its size is not sealed")
    return mmap.mmap(fd, os.fstat(fd).st_size)
