"""The entry of a fork server: `python -m fastserve.workers.fork_server FD`. It imports torch and transformers
once, or only what every worker needs, and forks a worker for each that its owner asks for.

    read "begin" {logs, imports} -> import -> say "ready" {seconds}, or "unfit" {reason} and end
    read "fork" {id, environment} + a control line
        -> fork twice -> say "forked" {id, pid} or "unforked" {id, reason}

The process between the two forks ends at once, and the worker becomes a child of the owner, which adopts
orphans meanwhile (forked_worker.py): so a worker lives and dies with its owner, and this process may be
killed and started anew. A fork keeps one thread alone, so a process with more of them does not fork: the
numerical libraries are given one thread each while they are imported, and each child sets what its model asks
for. No code of a model's runs here and no device is touched. A child closes the fork server's line and
becomes a worker like any other (main.py).
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from struct import Struct
from typing import Any, NamedTuple

from fastserve.devices.inventory import VISIBLE
from fastserve.util.memory import gc_freeze, gc_paused
from fastserve.workers import main as worker
from fastserve.workers.control import (
    ControlChannel,
    PeerGone,
    die_with_owner,
    enter_child,
    exit_now,
    name_process,
)

log = logging.getLogger("fastserve.workers.fork_server")  # which is run as __main__

TITLE = "fork server"
IMPORTED: dict[str, tuple[str, ...]] = {
    "torch and transformers": (
        "fastserve.backends.llm.backend",
        "fastserve.backends.llm.loading",
        "fastserve.workers.loop",
        "fastserve.workers.text_loop",
        "transformers.generation.utils",  # for every class of models that write
        "transformers.modeling_layers",
    ),
    "numpy": (
        "fastserve.backends.frameworks.python",
        "fastserve.workers.loop",
        "fastserve.workers.runners",
        "fastserve.workers.warmup",
    ),
}
"""Modules that workers import, by the libraries that their models need at least."""
THREADS = "it has {} threads after the imports, and a process that forks has one"


_PID = Struct("<i")


class Born(NamedTuple):
    """The worker that a forked child is to become."""

    environment: Mapping[str, str]
    line: int
    between: int  # the process that forked it, and ends
    owner: int


def main(arguments: list[str]) -> int:
    """Runs the fork server, and in each of its children one worker, to its end; the exit status."""
    control = enter_child(int(arguments[0]))
    born: Born | None = None
    try:
        if _prepare(control):
            born = _serve(control)
    except PeerGone:
        exit_now(0)
    finally:
        control.close()
    if born is None:
        exit_now(0)
    return _live(born)


def _prepare(control: ControlChannel) -> bool:
    """Import what workers need; returns False, and notifies the owner, when this process cannot fork
    afterwards."""
    order = control.receive().message
    if order["op"] != "begin":
        return False
    name_process(TITLE)
    worker.open_logs(order["logs"], TITLE)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when the hub's client is imported
    os.environ[VISIBLE] = ""  # a device's context is not to be inherited: none is found here
    imports = str(order["imports"])
    log.info("imports %s, once for all models", imports)
    began_s = time.monotonic()
    try:
        with gc_paused():
            for name in IMPORTED[imports]:
                importlib.import_module(name)
        _stay_single()
    except Exception as error:  # a broken installation raises anything: the worker that is spawned says what
        control.send({"op": "unfit", "reason": f"{type(error).__name__}: {error}"[:400]})
        return False
    gc_freeze()
    seconds = time.monotonic() - began_s
    log.info("imported them in %.1f s", seconds)
    control.send({"op": "ready", "seconds": seconds})
    return True


def _stay_single() -> None:
    """Raises RuntimeError when a thread runs here beside this one, also one that Python does not know of."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(THREADS.format(threads))


def _serve(control: ControlChannel) -> Born | None:
    """Fork on demand. Returns the worker to become in each child, and None here when the owner says stop."""
    while True:
        message, fds = control.receive()
        if message["op"] != "fork":
            return None
        born = _fork(control, message, fds[0])
        if born is not None:
            return born


def _fork(control: ControlChannel, message: Mapping[str, Any], line: int) -> Born | None:
    """Fork a worker that is the owner's child. Returns its part in the worker, and None here."""
    owner, number = os.getppid(), message["id"]
    for stream in (sys.stdout, sys.stderr):  # what waits in them would be written twice
        stream.flush()
    try:
        _stay_single()
        ours, theirs = os.pipe()
        between = os.fork()
    except (OSError, RuntimeError) as error:
        os.close(line)
        control.send({"op": "unforked", "id": number, "reason": str(error)})
        return None
    if between == 0:
        os.close(ours)
        between = os.getpid()
        if _fork_again(theirs):
            return Born(message["environment"], line, between, owner)
    for fd in (line, theirs):
        os.close(fd)
    with open(ours, "rb") as pipe:
        found = pipe.read(_PID.size)
    os.waitpid(between, 0)
    pid = _PID.unpack(found)[0] if found else -errno.ECHILD
    if pid > 0:
        control.send({"op": "forked", "id": number, "pid": pid})
    else:
        control.send({"op": "unforked", "id": number, "reason": os.strerror(-pid)})
    return None


def _fork_again(report: int) -> bool:
    """Fork, write the child's pid or the negative error number, and end; returns True in the child."""
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid:
        os.write(report, _PID.pack(pid))
        os._exit(0)
    os.close(report)
    return True


def _live(born: Born) -> int:
    """Bring this process to the state of a spawned worker, and run the worker."""
    while os.getppid() == born.between:
        time.sleep(0.0005)
    die_with_owner(born.line)
    if os.getppid() != born.owner:  # it died before the tie held
        return 0
    os.setsid()
    os.environ.clear()
    os.environ.update(born.environment)
    # The worker's logs begin with the real streams. What has kept the others still reaches its loggers.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    importlib.import_module("numpy").random.seed()  # siblings would draw the same numbers
    return worker.main([str(born.line)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
