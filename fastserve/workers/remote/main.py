"""The entry of a remote worker's process: `python -m fastserve.workers.remote.main FD JSON`.

FD is its tie to the supervisor, JSON a WorkerOrder. It ends with status 0 when it was told to stop or its one
connection ended, and with 1 when it could not load the version.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from fastserve.util.logs import log_prints, log_uncaught, setup_logs
from fastserve.util.memory import share_heap
from fastserve.workers.control import die_with_owner, name_process
from fastserve.workers.process import ENTRY
from fastserve.workers.remote.keys import read_key
from fastserve.workers.remote.worker import LoadFailed, OtherEnvironment, RemoteWorker


class WorkerOrder(msgspec.Struct):
    """The settings of one worker, as its supervisor gives them."""

    connect: str
    key: str
    cache: str
    device: str = ""
    log_level: str = "info"
    log_format: str = "text"
    once: bool = False
    place: int = 0
    node: str = ""


def main(arguments: list[str]) -> int:
    """Run one remote worker to its end; the exit status."""
    share_heap()  # with libzmq's threads, which receive what is freed here
    fd, order = int(arguments[0]), msgspec.json.decode(arguments[1], type=WorkerOrder)
    die_with_owner(fd)
    name_process("remote")
    setup_logs(order.log_level, order.log_format, fields={"worker": f"{order.connect}#{os.getpid()}"})
    log_uncaught()
    if order.log_format:
        log_prints()
    key = read_key(Path(order.key), "worker") if order.key else None
    worker = RemoteWorker(
        order.connect, key, Path(order.cache), device=order.device, place=order.place, node=order.node
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    try:
        worker.run(once=order.once)
    except OtherEnvironment as other:
        os.execve(ENTRY[0], [*ENTRY[:-1], "fastserve.workers.remote.main", *arguments], other.environment)
    except LoadFailed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
