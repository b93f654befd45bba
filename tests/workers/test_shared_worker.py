"""Shared worker processes without a process: what is one tenant's trouble is nobody else's."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastserve.workers import shared_worker, thread_host
from fastserve.workers.control import ControlChannel
from fastserve.workers.shared_worker import SharedWorkerKey, SharedWorkers


class NoProcess:
    """Runs, and hears what it is told."""

    killed_outside = False

    def __init__(self, environment: Any, hear: Any, end: Callable[[str], None], *, entry: Any) -> None:
        self.end, self.running, self.pid, self.told = end, False, 1, []
        made.append(self)

    def spawn(self) -> None:
        self.running = True

    def send(self, message: dict[str, Any], fds: Any = ()) -> None:
        self.told.append(message["op"])


made: list[NoProcess] = []


def test_all_tenants_hear_of_the_end_of_their_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_worker, "WorkerProcess", NoProcess)
    heard: list[str] = []

    def first(words: str) -> None:
        heard.append("first")
        raise RuntimeError("this one cannot cope")

    async def run() -> None:
        workers = SharedWorkers()
        others = [
            workers.thread_worker(SharedWorkerKey("all"), "m", {}, print, end)
            for end in (first, heard.append)
        ]
        for tenant in others:
            tenant.spawn()
        process = made.pop()
        assert (made, process.told) == ([], ["join", "join"])
        process.end("killed")
        assert not any(tenant.running for tenant in others)

    asyncio.run(run())
    assert heard == ["first", "killed"]
    assert "this one cannot cope" in caplog.text


def test_a_tenant_for_whom_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, control = ControlChannel(ours, owner=True), ControlChannel(theirs, owner=False)
    reading, fd = os.pipe()
    try:
        house = thread_host.ThreadHost(control)
        house._known = True
        monkeypatch.setattr(threading.Thread, "start", refuse)
        house.admit({"id": 7, "title": "all#0", "logs": {}}, fd)
        assert owner.receive().message == {"op": "left", "id": 7}
        assert os.read(reading, 1) == b""  # its line is closed
    finally:
        os.close(reading)
        owner.close()
        control.close()


def test_one_that_nobody_waits_for_still_has_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that is cancelled ends no process at once, which others share, and leaves none that hangs."""
    monkeypatch.setattr(shared_worker, "WorkerProcess", NoProcess)
    killed: list[str] = []
    lines: list[int] = []
    monkeypatch.setattr(NoProcess, "kill", lambda self, reason: killed.append(reason), raising=False)
    monkeypatch.setattr(NoProcess, "send", lambda self, message, fds=(): lines.extend(map(os.dup, fds)))

    async def run() -> None:
        workers = SharedWorkers()
        hanging, leaving = (
            workers.thread_worker(SharedWorkerKey("all"), "m", {}, print, print) for _ in range(2)
        )
        for tenant in (hanging, leaving):
            tenant.spawn()
            tenant.send({"op": "serve"})
            stopping = asyncio.ensure_future(tenant.stop(1.0))
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
        assert killed == []
        leaving.over("it has left")
        for _ in range(6000):
            if killed:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert killed == ["m: it did not stop within 1 s"]
        made.pop().end("killed")

    try:
        asyncio.run(run())
    finally:
        for line in lines:
            os.close(line)
