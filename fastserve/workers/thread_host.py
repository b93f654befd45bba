"""The entry of a worker process that models share: `python -m fastserve.workers.thread_host FD`.

    read "join" {id, title, logs} + a descriptor
        -> a thread, which lives on that control channel as a worker in a process of its own (main.py)
        -> say "freed" {id} when it has let go of its arena -> say "left" {id}

The main thread only listens to the owner. Threads are the right thing here because what a model does for long
it does without the interpreter's lock: a batch in numpy, ONNX Runtime or torch, a wait for the next one. Of
what a process has once, the import system is separated by backends/frameworks/python.py, log fields and the
control channel by thread; the rest (environment, thread pools, the device's context) is what is meant to be
shared.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from fastserve.backends import model_callbacks
from fastserve.backends.model_errors import DeviceLost
from fastserve.backends.registry import find_backend
from fastserve.util.logs import log_fields
from fastserve.util.memory import gc_freeze
from fastserve.workers import main as worker
from fastserve.workers.control import (
    ControlChannel,
    ControlFault,
    LoadChannel,
    PeerGone,
    enter_child,
    exit_now,
    name_process,
)

log = logging.getLogger(__name__)


class ThreadHost:
    """The thread workers of this process."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._known = self._broken = self._frozen = False
        self._beginning = threading.Lock()

    def admit(self, message: Mapping[str, Any], fd: int) -> None:
        """One more, from now on."""
        if not self._known:
            self._known = True
            _introduce(message)
        number = int(message["id"])
        thread = threading.Thread(target=self._live, args=(number, fd), name=f"tenant-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: only the new worker fails
            log.exception("thread worker %d could not get a thread", number)
            os.close(fd)
            self._say("left", number)

    def _live(self, number: int, fd: int) -> None:
        control = ControlChannel(socket.socket(fileno=fd), owner=False)
        try:
            order = control.receive().message
            with self._beginning:
                import_framework(order["config"])
                if not self._frozen:  # what models share, while there is none yet
                    self._frozen = True
                    gc_freeze()
            with thread_context(order, control):
                worker.live(control, order, lambda *given: self._serve(number, *given))
        except PeerGone:
            log.debug("thread worker %d was let go of before it began", number)
        finally:
            if self._broken:  # the device's context is everybody's here
                exit_now(1)
            gc.collect()  # a model's module and its functions are a circle
            self._say("left", number)
            control.close()

    def _serve(self, number: int, *given: Any) -> None:
        from fastserve.workers import loop

        try:
            loop.serve(*given)
        except DeviceLost:
            self._broken = True
            raise
        finally:
            self._say("freed", number)

    def _say(self, op: str, number: int) -> None:
        with contextlib.suppress(ControlFault):
            self._control.send({"op": op, "id": number})


def import_framework(config: Mapping[str, Any]) -> None:
    """Import what two threads must not import at once: a framework imports itself in circles, and msgspec
    builds its decoders without a lock (two at once end the process).

    One lock for all frameworks, though TensorFlow's import takes seconds that another's load then waits:
    they import common packages (numpy, and what else is installed), which have circles of their own, and two
    threads that meet in one find it half made. A model's own code is not imported here, so what a load waits
    for under the lock is installed packages, each once in the life of the process."""
    from fastserve.settings.model_options import read_options, read_torch
    from fastserve.workers import loop  # noqa: F401

    read_options({})
    read_torch({})
    with contextlib.suppress(Exception):  # told where the model is loaded, in words for it
        entry = find_backend(str(config.get("backend")))
        on_device = str(config.get("device") or "cpu") != "cpu"
        beside = "torch" if on_device and (config.get("device_tensors") or entry.name == "onnx") else ""
        for name in filter(None, ("numpy", beside, entry.framework, entry.entry_point.partition(":")[0])):
            with contextlib.suppress(ImportError):  # torch is not what an ONNX model has to have
                importlib.import_module(name)


@contextlib.contextmanager
def thread_context(order: Mapping[str, Any], control: ControlChannel) -> Iterator[None]:
    """Give this thread its own title, log fields and control channel."""
    title = worker.title_of(order)
    threading.current_thread().name = title
    sys.path.extend(path for path in order["sys_path"] if path not in sys.path)
    model_callbacks.thread.channel = LoadChannel(control)
    try:
        with log_fields(worker=title):
            yield
    finally:
        model_callbacks.thread.channel = None


def forget_model() -> None:
    """Find the garbage of a model that ended in a process that may have frozen it: the server's own, which
    freezes all at the end of its start. With torch that takes a third of a second, in which nobody else has
    the interpreter's lock; a process that models share freezes none of them."""
    gc.unfreeze()
    gc_freeze()


def _introduce(message: Mapping[str, Any]) -> None:
    name_process(message["title"])
    worker.open_logs(message["logs"], str(message["title"]))


def main(arguments: list[str]) -> int:
    """Runs until the owner says stop, or is gone."""
    control = enter_child(int(arguments[0]))
    host = ThreadHost(control)
    try:
        while True:
            message, fds = control.receive()
            if message["op"] == "stop":
                return 0
            host.admit(message, fds[0])
    except PeerGone:
        return 0


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))  # threads that still run are of models that nobody waits for
