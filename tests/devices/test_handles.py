"""Handles of a client's memory that a process has open, and their closing: each once, whatever its threads
do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastserve.devices.cuda import CudaFault, OpenHandles
from tests.devices.simulated import FakeGpus
from tests.devices.test_cuda import say

ONE, OTHER = bytes(64), b"\1" * 64


class OldDriver:
    """One that does not count: a handle is opened once, and closed once."""

    def __init__(self) -> None:
        self.open: dict[int, bytes] = {}
        self.calls: list[str] = []
        self.refuses = False
        self.on_close: Callable[[], None] = lambda: None

    def enter(self, device: int) -> None:
        pass

    def open_handle(self, handle: bytes) -> int:
        self.calls.append("open")
        if self.refuses or handle in self.open.values():
            raise CudaFault("cuIpcOpenMemHandle", 208, "CUDA_ERROR_ALREADY_MAPPED")
        address = 4096 * len(self.calls)
        self.open[address] = handle
        return address

    def close_handle(self, address: int) -> None:
        self.calls.append("close")
        self.on_close()
        del self.open[address]


def opened() -> tuple[OpenHandles, OldDriver]:
    driver: Any = OldDriver()
    return OpenHandles(driver), driver


def test_the_driver_sees_the_first_and_the_last() -> None:
    handles, driver = opened()
    first, second = object(), object()
    at = handles.open(first, 0, ONE)
    assert handles.open(first, 0, ONE) == handles.open(second, 0, ONE) == at
    assert handles.open(first, 0, OTHER) != at
    for _ in range(2):
        handles.close(first, 0, ONE)
    assert not handles.has(first, 0, ONE)
    assert handles.has(second, 0, ONE)
    assert driver.calls == ["open", "open"]
    handles.close(second, 0, ONE)
    assert driver.calls == ["open", "open", "close"]
    handles.close(second, 0, ONE)
    assert list(driver.open.values()) == [OTHER]


def test_who_has_not_opened_it_closes_nothing() -> None:
    handles, driver = opened()
    owner = object()
    handles.open(owner, 0, ONE)
    handles.close(object(), 0, ONE)
    handles.close(owner, 1, ONE)
    handles.close(owner, 0, OTHER)
    assert driver.calls == ["open"]


def test_one_that_cannot_be_opened_is_nobody_s() -> None:
    handles, driver = opened()
    owner = object()
    driver.refuses = True
    with pytest.raises(CudaFault):
        handles.open(owner, 0, ONE)
    handles.close(owner, 0, ONE)
    driver.refuses = False
    handles.open(owner, 0, ONE)
    assert driver.calls == ["open", "open"]


def test_who_comes_while_it_is_being_closed_opens_it_anew() -> None:
    """And is not given the address that goes."""
    handles, driver = opened()
    first, second = object(), object()
    found: list[int] = []
    comes = threading.Thread(target=lambda: found.append(handles.open(second, 0, ONE)))

    def meanwhile() -> None:
        comes.start()
        comes.join(0.05)
        assert not found

    at = handles.open(first, 0, ONE)
    driver.on_close = meanwhile
    handles.close(first, 0, ONE)
    comes.join()
    assert found != [at]
    assert driver.open == {found[0]: ONE}


def test_threads_of_a_process(tmp_path: Path) -> None:
    """Four models in one process, each its own owner: the driver never hears of a handle twice."""
    gpus = FakeGpus(tmp_path)
    with gpus.handles() as told:
        done = say(
            gpus,
            """
from fastserve.devices.cuda import process_handles
sys.setswitchinterval(1e-5)
def work():
    owner, handles = object(), process_handles()
    for _ in range(300):
        handles.open(owner, 0, handle)
        handles.close(owner, 0, handle)
threads = [threading.Thread(target=work) for _ in range(4)]
[one.start() for one in threads]; [one.join() for one in threads]
""",
            gpus.allocate(64).handle,
        )
        calls = [(line.split()[1], line.split()[3]) for line in told()]
    assert (done, gpus.broken) == ("", "")
    assert calls == [("open", "1"), ("close", "0")] * (len(calls) // 2)
    assert len(calls) >= 2
