"""Every field of InferRequestHeader, end to end with real models: HTTP, Infer and StreamInfer alike."""

from __future__ import annotations

import asyncio
import os
import struct
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from fastserve.engine.engine import scheduler_of
from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.rig import V1, Ask, Result, Rig, rig, write_dense
from tests.server.rig import run

COUNT, ONES = struct.pack("<16i", *range(16)), struct.pack("<16i", *[1] * 16)
PAIR = 'batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" } output { name: "OUTPUT0" }'
ECHO = 'batch_size: 1 input { name: "IN"%s } output { name: "OUT"%s }'


def dims_of(result: Result) -> list[list[int]]:
    return [list(output.raw.dims) for output in result.header.output]


@pytest.mark.parametrize("dense", [False, True])
def test_inputs_by_name_outputs_as_wanted(tmp_path: Path, dense: bool) -> None:
    write_dense(tmp_path) if dense else models.write(tmp_path, "simple")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                swapped = 'batch_size: 1 input { name: "INPUT1" } input { name: "INPUT0" } '
                both = swapped + 'output { name: "OUTPUT1" } output { name: "OUTPUT0" }'
                result = await ask("simple", both, ONES, COUNT)
                assert [o.name for o in result.header.output] == ["OUTPUT1", "OUTPUT0"]
                assert result.raws == [
                    struct.pack("<16i", *range(-1, 15)),
                    struct.pack("<16i", *range(1, 17)),
                ]
                nothing = await ask("simple", swapped, ONES, COUNT)  # none listed, none sent
                assert (nothing.raws, len(nothing.header.output)) == ([], 0)
                assert nothing.header.model_name == "simple"
                sized = 'input { name: "INPUT%d" dims: 16 batch_byte_size: 192 }'
                three = f'batch_size: 3 {sized % 0} {sized % 1} output {{ name: "OUTPUT0" }}'
                result = await ask("simple", three, COUNT * 3, ONES * 3)
                assert (result.header.batch_size, dims_of(result)) == (3, [[16]])
                assert result.raws == [struct.pack("<16i", *range(1, 17)) * 3]
                assert result.header.output[0].raw.batch_byte_size == 192

    run(ask())


def test_ids_come_back(tmp_path: Path) -> None:
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                for number in (1, 127, 128, 2**32, 2**64 - 1, 0):
                    tail = f" id: {number}" if number else ""
                    assert (await ask("simple", PAIR + tail, COUNT, ONES)).header.id == number
                    failed = await ask("simple", PAIR + tail, COUNT)
                    assert failed.status.startswith("INVALID_ARG")
                    assert failed.header == V1.InferResponseHeader(id=number)

    run(ask())


def test_every_type_and_shape(tmp_path: Path) -> None:
    models.write(tmp_path, "every", "reshaped", "free", "text", "unbatched")
    sizes = {"BOOL": 1, "FP16": 2, "FP32": 4, "FP64": 8}
    sizes |= {name: int(name.partition("INT")[2]) // 8 for name in models.INTEGERS}
    values = {name: bytes([1, 0, 1] if name == "BOOL" else range(3 * size)) for name, size in sizes.items()}
    asked = [f'input {{ name: "{n}" dims: 3 batch_byte_size: {3 * s} }}' for n, s in sizes.items()]
    every = f"batch_size: 1 {' '.join(asked)} " + " ".join(f'output {{ name: "{n}_OUT" }}' for n in sizes)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                result = await ask("every", every, *values.values())
                assert (result.status, result.raws) == ("SUCCESS", list(values.values()))
                await check_shapes(ask)

    run(ask())


async def check_shapes(ask: Ask) -> None:
    four = struct.pack("<4f", 1, 2, 3, 4)
    result = await ask("reshaped", ECHO % (" dims: 4", ""), four)
    assert (result.status, dims_of(result), result.raws) == ("SUCCESS", [[4]], [four])
    result = await ask("free", ECHO % (" dims: 2", ""), four[:8])
    assert (dims_of(result), result.raws) == ([[2]], [four[:8]])
    packed = struct.pack("<I3sI", 3, b"abc", 0)
    result = await ask("text", ECHO % (f" dims: 2 batch_byte_size: {len(packed)}", ""), packed)
    assert (dims_of(result), result.raws) == ([[2]], [packed])
    two = 'input { name: "INPUT%d" dims: 1 dims: 2 }'
    result = await ask(
        "unbatched", f'batch_size: 1 {two % 0} {two % 1} output {{ name: "OUTPUT0" }}', four[:8], four[8:]
    )
    assert (dims_of(result), result.raws) == ([[1, 2]], [struct.pack("<2f", 4, 6)])


def test_classes(tmp_path: Path) -> None:
    models.write(tmp_path, "labelled", "text")
    rows = struct.pack("<6f", 0.25, 3, 2, -1, -2, -0.5)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                header = ECHO.replace("batch_size: 1", "batch_size: 2") % ("", " cls { count: %d }")
                result = await ask("labelled", header % 2, rows)
                assert (result.raws, result.header.output[0].HasField("raw")) == ([b""], False)
                assert classes_of(result) == [[(1, 3, "one"), (2, 2, "")], [(2, -0.5, ""), (0, -1, "zero")]]
                assert [len(row) for row in classes_of(await ask("labelled", header % 9, rows))] == [3, 3]
                assert (await ask("labelled", header % 0, rows)).raws == [rows]
                result = await ask(
                    "text", ECHO % (" dims: 1 batch_byte_size: 4", " cls { count: 1 }"), bytes(4)
                )
                text = "class result not available for output 'OUT' due to unsupported type 'TYPE_STRING'"
                assert result.status == f'INVALID_ARG msg: "{text}"'

    run(ask())


def classes_of(result: Result) -> list[list[tuple[int, float, str]]]:
    return [[(c.idx, c.value, c.label) for c in row.cls] for row in result.header.output[0].batch_classes]


@pytest.mark.parametrize("dense", [False, True])
def test_shared_memory(tmp_path: Path, dense: bool) -> None:
    write_dense(tmp_path) if dense else models.write(tmp_path, "simple")
    key = f"fastserve-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm", key)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            at = "/api/sharedmemorycontrol/register"
            path.write_bytes(bytes(4096) + ONES + COUNT + bytes(128))
            # The region's own offset counts once, the request's from there.
            assert (await served.ask("POST", f"{at}/mine//{key}/4096/256"))[0] == 200
            place = 'shared_memory {{ name: "mine" offset: {} byte_size: {} }}'.format
            for ask in served.ways:
                path.write_bytes(bytes(4096) + ONES + COUNT + bytes(128))
                header = PAIR.replace('"INPUT0"', f'"INPUT0" {place(64, 64)}')
                header = header.replace('"OUTPUT0"', f'"OUTPUT0" {place(128, 80)}')
                result = await ask("simple", f'{header} output {{ name: "OUTPUT1" }}', ONES)
                assert result.raws == [b"", struct.pack("<16i", *range(-1, 15))]
                assert [o.raw.batch_byte_size for o in result.header.output] == [64, 64]
                assert path.read_bytes()[4096 + 128 :] == struct.pack("<16i", *range(1, 17)) + bytes(64)
                both = header.replace('"INPUT1"', f'"INPUT1" {place(0, 64)}')
                assert (await ask("simple", both)).raws == [b""]

    try:
        run(ask())
    finally:
        os.unlink(path)


# --- flags and correlation_id ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["seq", "oldest"])
def test_sequences(tmp_path: Path, model: str) -> None:
    models.write(tmp_path, model)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                await interleave(ask, model)

    run(ask())


async def step(ask: Ask, model: str, who: int, value: int, flags: int = 0) -> list[int]:
    header = 'batch_size: 1 input { name: "INPUT" } output { name: "OUTPUT" } output { name: "SEEN" }'
    result = await ask(model, f"{header} correlation_id: {who} flags: {flags}", struct.pack("<i", value))
    assert result.status == "SUCCESS", result.status
    return [struct.unpack("<i", raw)[0] for raw in result.raws]


async def interleave(ask: Ask, model: str) -> None:
    """Two sequences side by side, each with its own sum and told its own flags; then one anew."""
    big = 2**64 - 1
    assert await step(ask, model, big, 1, 1) == [1, 1]
    assert await step(ask, model, 5, 10, 1) == [10, 1]
    assert await step(ask, model, big, 2) == [3, 0]
    assert await step(ask, model, 5, 20) == [30, 0]
    assert await step(ask, model, 5, 30, 2) == [60, 2]
    assert await step(ask, model, 5, 7, 3) == [7, 3]
    assert await step(ask, model, big, 4, 1) == [4, 1]  # a START begins it again
    assert await step(ask, model, big, 3, 2) == [7, 2]


# --- priority and timeout_microseconds ----------------------------------------------------------------------


async def hold(served: Rig, folder: Path, model: str) -> asyncio.Task[Result]:
    """A request that keeps the model busy until it is released; the model's own limit may be short for a busy
    machine, and then it is asked again."""
    while True:
        task = asyncio.ensure_future(served.over_http(model, ECHO % ("", ""), struct.pack("<i", 1)))
        await served.served.until(lambda task=task: task.done() or models.is_running(folder, model))
        if not task.done():
            return task


def test_priorities(tmp_path: Path) -> None:
    models.write(tmp_path, "queued")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                models.hold(tmp_path, "queued")
                assert await order_of(served, tmp_path, ask) == ["first", "high", "default", "beyond"]

    run(ask())


async def order_of(served: Rig, folder: Path, ask: Ask) -> list[str]:
    """Return in which order requests of these priorities run, sent while the model is busy. The model says:
    answers that a late client finds on several connections have no order."""
    first, names = await hold(served, folder, "queued"), {1: "first"}
    tasks: list[asyncio.Task[Result]] = []
    # 0 and what is beyond the levels is the model's default, 2
    for number, (name, priority) in enumerate((("default", 0), ("beyond", 9), ("high", 1)), 2):
        names[number], header = name, ECHO % ("", "") + f" priority: {priority}"
        tasks.append(asyncio.ensure_future(ask("queued", header, struct.pack("<i", number))))
        await served.served.until(lambda: waiting(served, "queued") == len(tasks))
    models.release(folder, "queued")
    assert {result.status for result in await asyncio.gather(first, *tasks)} == {"SUCCESS"}
    return [names[number] for number in models.ran(folder, "queued")]


def waiting(served: Rig, model: str) -> int:
    """How many requests wait before the model's queue."""
    version: Any = served.server.catalog.available(model)
    return scheduler_of(version).pending()


@pytest.mark.parametrize(
    ("model", "timeout_us", "least_s", "most_s"),
    [
        ("queued", 30_000, 0.03, 10),  # shorter than the model's own 20 s
        ("brief", 60_000_000, 0.3, 10),  # longer than the model's own: no effect
        ("brief", 0, 0.3, 10),
        ("strict", 1_000, 0.3, 10),  # the model lets nobody choose
    ],
)
def test_timeouts(tmp_path: Path, model: str, timeout_us: int, least_s: float, most_s: float) -> None:
    models.write(tmp_path, model)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            first = await hold(served, tmp_path, model)
            header = ECHO % ("", "") + f" id: 3 timeout_microseconds: {timeout_us}"
            for ask in served.ways:
                began = time.monotonic()
                result = await ask(model, header, struct.pack("<i", 1))
                assert result.status == 'UNAVAILABLE msg: "Request timeout expired"'
                assert result.header == V1.InferResponseHeader(id=3)
                assert least_s <= time.monotonic() - began < most_s
            models.release(tmp_path, model)
            assert (await first).status == "SUCCESS"

    run(ask())


def test_a_delayed_request_is_answered_after_all(tmp_path: Path) -> None:
    models.write(tmp_path, "patient")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            first = await hold(served, tmp_path, "patient")
            header = ECHO % ("", "") + " timeout_microseconds: 1000"
            asked = [
                asyncio.ensure_future(ask("patient", header, struct.pack("<i", 1))) for ask in served.ways
            ]
            await served.served.until(lambda: waiting(served, "patient") == len(asked))
            await asyncio.sleep(0.05)  # let their time pass
            models.release(tmp_path, "patient")
            assert {r.status for r in await asyncio.gather(first, *asked)} == {"SUCCESS"}

    run(ask())
