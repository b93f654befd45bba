"""Device memory of clients and rows of batches: one copy by the driver between the two, and none by us.

The driver is simulated (fake_cuda.c) and tells of each copy whose memory of the host it was; who copies, when
rows are given back, and what stays registered is real.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc as grpcio
import numpy as np
import pytest

from fastserve.errors import ServeError
from fastserve.request import Lent
from fastserve.workers import device_line
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.device_line import DeviceLine
from tests.devices.simulated import Allocation, FakeGpus
from tests.devices.test_client_memory import (
    V1,
    V1_SERVICE,
    ferry_of,
    place,
    register,
    sums,
    unregister,
)
from tests.dialects.kserve_v2.client_rig import COUNT, ONES
from tests.faults.rig import Http, tensor
from tests.running import Running, until

IN_ARENA = "registered, memfd:fastserve-arena"
ROW = 6 << 20  # two rows and a half to a chunk and a half: a chunk ends within the second


@pytest.mark.parametrize("model", ["sums", "simple"])
def test_each_tensor_of_a_cpu_model_is_copied_once(
    served: Running, http: Http, gpus: FakeGpus, model: str
) -> None:
    """Rows in columns, and requests in slabs."""
    at = gpus.allocate(4096)
    at.put(COUNT.tobytes() + ONES.tobytes())
    assert register(http, "r", at).status == 200
    for _ in range(3):
        with gpus.copies() as copies:
            assert http.post(f"/v2/models/{model}/infer", sums("r")).status == 200
        assert copies == [f"to host 64, {IN_ARENA}"] * 2 + [f"to device 64, {IN_ARENA}"]
        assert at.get(64, 1024) == (COUNT + ONES).tobytes()
    unregister(http, "r")


def test_tensors_of_any_shape_are_copied_once(served: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    at.put(np.arange(25, dtype=np.float32).tobytes())
    assert register(http, "r", at).status == 200
    body = {
        "inputs": [tensor("IN_FP32", [25], datatype="FP32", **place("r", 0, 100))],
        "outputs": [{"name": "OUT_FP32", "parameters": place("r", 1024, 100)}],
    }
    with gpus.copies() as copies:
        answer = http.post("/v2/models/types/infer", body)
    assert answer.status == 200, answer.error
    assert copies == [f"to host 100, {IN_ARENA}", f"to device 100, {IN_ARENA}"]
    assert at.get(100, 1024) == at.get(100)
    unregister(http, "r")


def test_triton_v1_copies_once(served: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    at.put(COUNT.tobytes() + ONES.tobytes())
    assert register(http, "r", at).status == 200
    there = 'shared_memory { name: "r" offset: %d byte_size: 64 }'
    inputs = "".join(f'input {{ name: "INPUT{n}" dims: 16 {there % (64 * n)} }} ' for n in (0, 1))
    header = f'batch_size: 1 {inputs}output {{ name: "OUTPUT0" {there % 128} }}'
    with gpus.copies() as copies:
        assert http.ask("POST", "/api/infer/sums", b"", NV_InferRequest=header).status == 200
    assert copies == [f"to host 64, {IN_ARENA}"] * 2 + [f"to device 64, {IN_ARENA}"]
    infer = V1.InferRequest(model_name="sums", model_version=-1)
    infer.meta_data.batch_size = 1
    for n, add in enumerate([infer.meta_data.input.add] * 2 + [infer.meta_data.output.add]):
        one = add(name=("INPUT0", "INPUT1", "OUTPUT1")[n])
        one.shared_memory.name, one.shared_memory.offset, one.shared_memory.byte_size = "r", 64 * n, 64
    with gpus.copies() as copies, grpcio.insecure_channel(served.grpc) as channel:
        channel.unary_unary(V1_SERVICE + "Infer")(infer.SerializeToString())
    assert copies == [f"to host 64, {IN_ARENA}"] * 2 + [f"to device 64, {IN_ARENA}"]
    assert at.get(64, 128) == (COUNT - ONES).tobytes()
    unregister(http, "r")


def test_what_is_split_or_looked_at_goes_through_the_ferry_s_own_memory(http: Http, gpus: FakeGpus) -> None:
    """More rows than a batch holds; and the output of a request that is answered in pieces."""
    at = gpus.allocate(1 << 16)
    assert register(http, "r", at).status == 200
    body: dict[str, Any] = {
        "inputs": [tensor("IN_BYTES", [1], datatype="BYTES", **place("r", 0, 7))],
        "outputs": [{"name": "OUT_BYTES", "parameters": place("r", 1024, 7)}],
    }
    at.put(b"\3\0\0\0abc")
    with gpus.copies() as copies:
        assert http.post("/v2/models/types/infer", body).status == 200
    assert copies[0] == "to host 7, registered, memfd:ferry"
    assert at.get(7, 1024) == at.get(7)
    unregister(http, "r")


def test_memory_that_cannot_be_registered_is_copied_all_the_same(
    served: Running, http: Http, gpus: FakeGpus
) -> None:
    at = gpus.allocate(4096)
    at.put(COUNT.tobytes() + ONES.tobytes())
    gpus.set("unpinnable")
    try:
        assert register(http, "r", at).status == 200
        with gpus.copies() as copies:
            assert http.post("/v2/models/sums/infer", sums("r")).status == 200
    finally:
        gpus.set("unpinnable", on=False)
    assert len(copies) == 3
    assert all(line.endswith("not registered, memfd:fastserve-arena") for line in copies)
    assert at.get(64, 1024) == (COUNT + ONES).tobytes()
    unregister(http, "r")


def test_without_regions_nothing_is_held(served: Running, http: Http, gpus: FakeGpus) -> None:
    """The ferry lets go of arenas with the last handle: their pages may be given back again."""
    at = gpus.allocate(4096)
    assert register(http, "r", at).status == 200
    assert http.post("/v2/models/sums/infer", sums("r")).status == 200
    maps = Path(f"/proc/{ferry_of(served)}/maps")
    assert "memfd:fastserve-arena" in maps.read_text()
    unregister(http, "r")
    until(lambda: "memfd:fastserve-arena" not in maps.read_text(), "the ferry has let go of it")


def test_a_version_that_goes_takes_its_memory_along(served: Running, http: Http, gpus: FakeGpus) -> None:
    at = gpus.allocate(4096)
    assert register(http, "r", at).status == 200
    assert http.post("/v2/models/sums/infer", sums("r")).status == 200
    assert http.post("/v2/models/simple/infer", sums("r")).status == 200
    maps = Path(f"/proc/{ferry_of(served)}/maps")
    before = maps.read_text().count("memfd:fastserve-arena")
    assert before >= 2
    assert http.post("/v2/repository/models/simple/unload", {}).status == 200
    until(lambda: maps.read_text().count("memfd:fastserve-arena") < before, "its arena is let go of")
    assert http.post("/v2/repository/models/simple/load", {}).status == 200
    assert http.post("/v2/models/simple/infer", sums("r")).status == 200
    unregister(http, "r")


# --- the line by itself -----------------------------------------------------------------------------


@pytest.fixture
def at(gpus: FakeGpus) -> Iterator[Allocation]:
    made = gpus.allocate(3 * ROW)
    made.put(b"begin")
    made.put(b"end", 3 * ROW - 3)
    with gpus.here():
        yield made
    gpus.set("hang", on=False)


@asynccontextmanager
async def opened(at: Allocation) -> AsyncIterator[tuple[DeviceLine, Arena, Lent]]:
    line, arena = DeviceLine(), Arena.create(Geometry(2, 3, (ROW,), (ROW,), 16, 0, 1, 1))
    lent = Lent(at.handle, 0, 0, 3 * ROW, "r")
    try:
        await line.open(lent)
        await line.join(arena, 0)
        await line.ready(lent, arena)
        yield line, arena, lent
    finally:
        line.stop()
        arena.close()


def room_of(arena: Arena) -> memoryview:
    ring = arena.ring(front=0)
    return ring.input_rows(ring.reserve(3), 3, 0)


def test_a_copy_ends_where_what_is_registered_does(gpus: FakeGpus, at: Allocation) -> None:
    """The driver refuses one that goes on beyond it, and beyond the next chunk's end too."""

    async def work() -> None:
        async with opened(at) as (line, arena, lent):
            room = room_of(arena)
            with gpus.copies() as copies:
                await line.read_into(lent, room)
            assert bytes(room[:5]) == b"begin"
            assert bytes(room[-3:]) == b"end"
            sizes = [int(line.split()[2].rstrip(",")) for line in copies]
            assert sum(sizes) == 3 * ROW
            assert len(sizes) == 3
            assert all(IN_ARENA in line for line in copies)
            room[:5] = b"BEGIN"
            await line.write(lent, room)
            assert at.get(5) == b"BEGIN"

    asyncio.run(work())
    assert gpus.broken == ""


@pytest.mark.parametrize("way", ["read_into", "write"])
def test_who_leaves_meanwhile_hears_of_it_when_the_copy_is_over(
    gpus: FakeGpus, at: Allocation, way: str
) -> None:
    """The rows would be another request's, and a copy under way would read or write those."""

    async def work() -> None:
        async with opened(at) as (line, arena, lent):
            room = room_of(arena)
            gpus.set("hang")
            task = asyncio.ensure_future(getattr(line, way)(lent, room))
            for _ in range(20):
                await asyncio.sleep(0.01)
                task.cancel()
            assert not task.done()
            gpus.set("hang", on=False)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 10)
            assert at.get(5) == (b"begin" if way == "read_into" else bytes(5))
            assert bytes(room[:5]) == at.get(5)

    asyncio.run(work())


def test_a_driver_that_hangs_is_dead_before_rows_are_given_back(
    gpus: FakeGpus, at: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with opened(at) as (line, arena, lent):
            room, ferry = room_of(arena), line.pid
            gpus.set("hang")
            with monkeypatch.context() as short:  # not for the one that comes next, which answers
                short.setattr(device_line, "ROWS_S", 0.2)
                with pytest.raises(ServeError, match="the driver does not answer"):
                    await line.read_into(lent, room)
            assert not Path(f"/proc/{ferry}").exists()
            gpus.set("hang", on=False)
            with pytest.raises(ServeError, match="its process has ended"):
                await line.read_into(lent, room)
            await line.ready(lent, arena)
            await line.read_into(lent, room)
            assert bytes(room[:5]) == b"begin"

    asyncio.run(work())


def test_a_batch_does_not_wait_for_another_ferry(gpus: FakeGpus, at: Allocation) -> None:
    """It takes seconds until a process has a context: outputs wait for one, rows of a batch do not."""

    async def work() -> None:
        async with opened(at) as (line, arena, lent):
            room, ferry = room_of(arena), line.pid
            os.kill(ferry, signal.SIGKILL)
            with pytest.raises(ServeError, match="device memory cannot be reached"):
                await line.read_into(lent, room)
            room[:5] = b"there"
            await line.write(lent, room)
            assert line.pid not in (0, ferry)
            assert at.get(5) == b"there"

    asyncio.run(work())


def test_an_arena_that_cannot_be_shared_is_not_taken_for_shared(
    gpus: FakeGpus, at: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one who asks has it shared, and the ferry is not asked for memory it has not."""

    async def work() -> None:
        line, arena = DeviceLine(), Arena.create(Geometry(2, 3, (ROW,), (ROW,), 16, 0, 1, 1))
        lent, good = Lent(at.handle, 0, 0, 3 * ROW, "r"), arena.memory_fd
        try:
            await line.open(lent)
            await line.join(arena, 0)
            ferry = line.pid
            arena.memory_fd = os.open("/dev/null", os.O_RDWR)  # which cannot be mapped
            try:
                with pytest.raises(ServeError):
                    await line.ready(lent, arena)
            finally:
                os.close(arena.memory_fd)
                arena.memory_fd = good
            await line.ready(lent, arena)
            room = room_of(arena)
            await line.read_into(lent, room)
            assert bytes(room[:5]) == b"begin"
            assert line.pid == ferry
        finally:
            line.stop()
            arena.close()

    asyncio.run(work())


def test_a_model_that_is_unloaded_before_its_memory_is_shared(gpus: FakeGpus, at: Allocation) -> None:
    async def work() -> None:
        line, arena = DeviceLine(), Arena.create(Geometry(2, 3, (ROW,), (ROW,), 16, 0, 1, 1))
        lent = Lent(at.handle, 0, 0, 3 * ROW, "r")
        try:
            await line.open(lent)
            await line.join(arena, 0)
            os.kill(line.pid, signal.SIGSTOP)
            first = asyncio.ensure_future(line.read(lent))  # has its turn, and waits
            waiting = asyncio.ensure_future(line.ready(lent, arena))
            while not line._turn._waiters:
                await asyncio.sleep(0)
            arena.close()
            os.kill(line.pid, signal.SIGCONT)
            assert bytes((await first)[:5]) == b"begin"
            with pytest.raises(ServeError, match="the model's memory is gone"):
                await waiting
        finally:
            line.stop()

    asyncio.run(work())
