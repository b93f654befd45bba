"""A child process's tie to its owner: when the owner goes, the child goes, whatever its threads do.

Two ties, each where the other cannot hold. The kernel sends SIGKILL when the thread that made the child
ends (PR_SET_PDEATHSIG), which reaches a model stuck in native code and a process that is stopped. It does not
reach a child whose owner died before it could ask for that: there the control line reads as hung up already.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def tie_to_owner(fd: int) -> None:
    """Ends this process with its owner, to which the control line `fd` leads, and leaves it to the owner to
    stop it. Call it first of all, on the main thread.

    SIGTERM may reach every process of a service at once (systemd does that): a child must go on through the
    owner's drain. Handled by a function, not SIG_IGN: what a model executes would inherit an ignored signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    line = select.poll()
    line.register(fd, 0)
    # A dying process closes its files before the kernel tells its children: one of the two ties holds.
    if any(events & select.POLLHUP for _, events in line.poll(0)):
        os._exit(0)


def leave(status: int) -> NoReturn:
    """Ends this process at once. An interpreter that ends in the usual way joins threads, and one that does
    not end (of a library, of a model) would keep the process and its ports."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or full: nobody reads it
            continue
    os._exit(status)
