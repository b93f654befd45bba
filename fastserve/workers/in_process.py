"""Workers in the server's own process, each a thread of it: for breakpoints, debuggers and profilers.

    worker = InProcessWorker(title, environment, on_message, on_exit)   the face of a WorkerProcess
    worker.spawn()                                                      a thread, on a control channel

Engine, arena and batches are those of worker processes; the loop of the server goes on beside the thread. A
thread cannot be killed: one that does not end is left to itself, and has no part in anything any more. What
ends the process (a crash in native code, os._exit) ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from fastserve.devices.inventory import VISIBLE
from fastserve.errors import invalid
from fastserve.workers import main as worker
from fastserve.workers.control import ControlChannel, ControlFault, PeerGone
from fastserve.workers.process import Child, OnExit, OnMessage
from fastserve.workers.thread_host import forget_model, import_framework, thread_context

log = logging.getLogger(__name__)

# For a thread that was asked to end, or whose channel is closed, to do so.
END_GRACE_S = 1.0
SEVERAL_DEVICES = (
    f"in_process: models see the devices of {VISIBLE}={{!r}} already, allowed: one choice of GPUs a process"
)
_beginning = threading.Lock()
_threads: set[threading.Thread] = set()
_applied: dict[str, str] = {}


def thread_remains() -> bool:
    """Return whether a worker's thread still runs, in a breakpoint or a model that hangs."""
    return any(thread.is_alive() for thread in _threads)


def apply_environment(title: str, wanted: Mapping[str, str]) -> None:
    """Make a worker's variables those of this process. Of two models that differ in one, the first has its
    own. Raises ServeError INVALID_ARGUMENT where other GPUs would be seen than the model's."""
    if VISIBLE in wanted and _applied.get(VISIBLE, wanted[VISIBLE]) != wanted[VISIBLE]:
        raise invalid(SEVERAL_DEVICES.format(_applied[VISIBLE]))
    differ = []
    for name, value in wanted.items():
        if name == "PYTHONPATH" or os.environ.get(name) == value:
            continue
        if name in _applied:
            differ.append(name)
        else:
            os.environ[name] = _applied[name] = value
    if differ:
        names = ", ".join(sorted(differ))
        log.warning("%s: the variables %s are those of another model in this process", title, names)


class InProcessWorker(Child):
    """A worker that is a thread of the server's process."""

    def __init__(
        self, title: str, environment: Mapping[str, str], on_message: OnMessage, on_exit: OnExit
    ) -> None:
        super().__init__(on_message, on_exit)
        self._title, self._environment = title, environment
        self._reason = ""
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """The server's process id, 0 when the thread does not run."""
        return os.getpid() if self.running else 0

    @property
    def running(self) -> bool:
        """True from spawn until the thread has ended or was left to itself."""
        return self._control is not None

    def spawn(self) -> None:
        """Start the thread. Raises OSError, and ServeError for GPUs that this process does not see."""
        apply_environment(self._title, self._environment)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = ControlChannel(ours, owner=True)
        thread = threading.Thread(target=self._live, args=(loop, theirs), name=self._title, daemon=True)
        try:
            thread.start()
        except RuntimeError as fault:
            control.close()
            theirs.close()
            raise OSError(0, str(fault)) from fault
        _threads.add(thread)
        self._control, self._thread = control, thread
        self._exited = loop.create_future()
        control.watch(self._hear, self._lose)

    def kill(self, reason: str) -> None:
        """Close the channel to the thread, which ends at its next look; it is left to itself if it does
        not."""
        if self._control is None:
            return
        self._reason = self._reason or reason
        self._control.hang_up()
        self._leave_in(END_GRACE_S)

    async def stop(self, grace_s: float) -> None:
        """Ask the thread to end, and leave it to itself after `grace_s` seconds."""
        if self._control is None:
            return
        with contextlib.suppress(ControlFault):
            self.send({"op": "stop"})
        if not await self.wait(grace_s):
            self.kill(f"it did not stop within {grace_s:g} s")
            await self.wait()

    def abandon(self) -> None:
        """Close the channel to the thread, without the loop."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _live(self, loop: asyncio.AbstractEventLoop, line: socket.socket) -> None:
        """Run one worker to its end; the thread's own function."""
        control = ControlChannel(line, owner=False)
        try:
            order = control.receive().message
            if order["op"] == "load":
                with _beginning:
                    import_framework(order["config"])
                with thread_context(order, control):
                    worker.live(control, order, _serve)
        except PeerGone:
            log.debug("%s was let go of before it began", self._title)
        finally:
            forget_model()
            control.close()
            _threads.discard(threading.current_thread())
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._over, "its thread has ended")

    def _lose(self, reason: str) -> None:
        if reason:
            self.kill(f"it sent {reason}")

    def _leave_in(self, seconds: float) -> None:
        if self._hangup is None:
            self._hangup = asyncio.get_running_loop().call_later(seconds, self._leave)

    def _leave(self) -> None:
        log.warning("%s, in the server's process, is left to itself: %s", self._title, self._reason)
        self._over(f"left to itself: {self._reason}")

    def _over(self, words: str) -> None:
        """End this worker: its thread has ended, or nobody waits for that any more."""
        if self._control is None or self._exited is None:
            return
        self._control.drain(self._hear)
        self._control.close()
        self._control = None
        if self._hangup is not None:
            self._hangup.cancel()
        self._exited.set_result(None)
        self._on_exit(f"killed: {self._reason}" if self._reason else words)


def _serve(*given: Any) -> None:
    from fastserve.workers import loop

    loop.serve(*given)
