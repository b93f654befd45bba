"""The calls a CUDA device makes, on which stream and in which order; torch and the driver are stand-ins."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.backends.model_errors import DeviceLost
from fastserve.devices.cuda import CudaFault
from fastserve.workers.device import cuda as device_cuda
from fastserve.workers.device.base import COMPUTE, COPY_IN, COPY_OUT
from fastserve.workers.device.cuda import CudaDevice


class Recorded:
    """A recorder of calls, in their order; `broken` names what raises."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.current = "default"
        self._streams = iter(("copy-in", "compute", "copy-out"))
        cuda = SimpleNamespace(Stream=self._stream, Event=self._event, stream=self._enter)
        cuda.current_stream = lambda device: SimpleNamespace(
            synchronize=lambda: self.say("synchronize current")
        )
        self.torch = SimpleNamespace(cuda=cuda, empty=self._empty)

    def say(self, call: str) -> None:
        self.calls.append(call)
        if call.partition(" ")[0] in self.broken:
            raise RuntimeError("CUDA error: something")

    def _stream(self, device: Any) -> Any:
        name = next(self._streams)
        return SimpleNamespace(
            name=name,
            synchronize=lambda: self.say(f"synchronize {name}"),
            wait_event=lambda event: self.say(f"wait {name}"),
        )

    def _event(self, enable_timing: bool) -> Any:
        def query() -> bool:
            self.say("query")
            return True

        return SimpleNamespace(record=lambda stream: self.say(f"record {stream.name}"), query=query)

    @contextlib.contextmanager
    def _enter(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def _empty(self, shape: Any, **more: Any) -> str:
        self.say(f"empty on {self.current}")
        return "memory"

    # the driver
    def enter(self, device: int) -> None:
        self.say(f"enter {device}")

    def register(self, memory: Any) -> int:
        self.say("register")
        return 4096

    def unregister(self, start: int) -> None:
        self.say(f"unregister {start}")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(device_cuda, "import_torch", lambda: recorded.torch)
    monkeypatch.setattr(device_cuda, "open_device", lambda torch, name: name)
    monkeypatch.setattr(device_cuda, "Cuda", SimpleNamespace(load=lambda: recorded))
    return recorded


def test_the_arena_is_let_go_of_when_all_copies_are_over(made: Recorded) -> None:
    device = CudaDevice("cuda:1")
    assert device.pin(bytearray(4096)) == ""
    made.calls.clear()
    device.close()
    synchronized = [f"synchronize {name}" for name in ("copy-in", "compute", "copy-out")]
    assert made.calls == [*synchronized, "enter 1", "unregister 4096"]
    device.close()
    assert made.calls[5:] == []


def test_a_device_that_has_failed_is_let_go_of_all_the_same(made: Recorded) -> None:
    device = CudaDevice("cuda")
    device.pin(bytearray(4096))
    made.broken.add("synchronize")
    device.close()
    assert made.calls[-1] == "unregister 4096"


def test_why_memory_cannot_be_registered(made: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(memory: Any) -> int:
        raise CudaFault("cuMemHostRegister", 800, "CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(made, "register", refuse)
    device = CudaDevice("cuda")
    assert device.pin(bytearray(4096)) == "cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED"
    device.close()
    assert "unregister 4096" not in made.calls


def test_memory_of_a_berth_is_of_the_stream_that_writes_it_first(made: Recorded) -> None:
    CudaDevice("cuda").empty((4, 2), "float32")
    assert made.calls == ["empty on copy-in"]


@pytest.mark.parametrize("broken", ["record", "wait", "query"])
def test_without_events_nothing_goes_on(made: Recorded, broken: str) -> None:
    device = CudaDevice("cuda")
    made.broken.add(broken)

    def one_after_the_other() -> None:
        mark = device.mark(COPY_IN)
        device.after(COMPUTE, mark)
        device.reached(mark)

    with pytest.raises(DeviceLost, match="CUDA error: something"):
        one_after_the_other()


def test_a_backend_s_own_stream_is_the_one_that_computes(made: Recorded) -> None:
    found: list[str] = []
    device = CudaDevice("cuda", SimpleNamespace(name="ort"))
    for stream in (COPY_IN, COMPUTE, COPY_OUT):
        device.enqueue(stream, lambda: found.append(made.current))
    assert found == ["copy-in", "ort", "copy-out"]


@pytest.mark.parametrize("broken", [False, True])
def test_what_a_library_s_words_hide_is_asked_of_the_streams(made: Recorded, broken: bool) -> None:
    """Never of the device: another thread of a shared worker may be capturing a graph."""
    device = CudaDevice("cuda")
    made.broken.update({"synchronize"} if broken else ())
    with pytest.raises(DeviceLost, match="something") if broken else contextlib.nullcontext():
        device.check(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"))
    every = [f"synchronize {name}" for name in ("current", "copy-in", "compute", "copy-out")]
    assert made.calls == (every[:1] if broken else every)
    made.calls.clear()
    device.check(ValueError("no sevens"))
    assert made.calls == []
