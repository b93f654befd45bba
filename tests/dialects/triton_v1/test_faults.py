"""Faults and their exact texts (spec 3.4): headers that lie, bodies that do not fit, regions that are not
there or go away, sequences, queues and times. Nothing hangs and nothing is left behind."""

from __future__ import annotations

import asyncio
import base64
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from fastserve.engine import fast_queue_of
from fastserve.engine.engine import scheduler_of
from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.lies import BODIES, COUNT, ECHO, LIES, ONE, ONES, PAIR, one
from tests.dialects.triton_v1.rig import V1, Result, Rig, make_request, rig, write_dense
from tests.server.rig import run


@pytest.mark.parametrize("dense", [False, True])
def test_headers_and_bodies_that_lie(tmp_path: Path, dense: bool) -> None:
    write_dense(tmp_path) if dense else models.write(tmp_path, "simple")
    models.write(tmp_path, "free", "text")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for model, header, inputs, text in LIES:
                for ask in served.ways:
                    result = await ask(model, header, *inputs)
                    assert result.status == invalid(text, model)
            for model, header, inputs, over_http, over_grpc in BODIES:
                for ask, text in zip(served.ways, (over_http, over_grpc, over_grpc), strict=True):
                    result = await ask(model, header, *inputs)
                    assert result.status == invalid(text, model)
            result = await served.over_grpc("simple", PAIR, COUNT, ONES, b"nobody's")
            assert result.status == "SUCCESS"
            assert (await served.over_http("simple", PAIR, COUNT, ONES)).status == "SUCCESS"

    run(ask())


def invalid(text: str, model: str) -> str:
    text = text.replace(" M", f" '{model}'")
    return f'INVALID_ARG msg: "{text}"'


def test_unknown_models_and_versions(tmp_path: Path) -> None:
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            prefix = "UNAVAILABLE msg: \"Request for unknown model: '"
            for ask in served.ways:
                assert (await ask("who", PAIR)).status == prefix + "who' is not found\""
            request = make_request("simple", PAIR, COUNT, ONES)
            request.model_version = -2
            reply = await served.grpc.Infer(request)
            assert reply.request_status.msg == "Request for unknown model: 'simple' version -2 is not found"
            await served.ask("POST", "/api/modelcontrol/unload/simple")
            _, headers, _ = await served.ask("POST", "/api/infer/simple/1", NV_InferRequest=PAIR)
            assert "'simple' version 1 is not at ready state" in headers["nv-status"]
            for ask in served.ways:
                assert (await ask("simple", PAIR)).status == prefix + "simple' has no available versions\""

    run(ask())


@pytest.mark.parametrize(
    "header",
    [
        "batch_size",
        "batch_size: -1",
        PAIR + " batch_size: 1",
        PAIR + " id: 18446744073709551616",
        PAIR + " unknown: 1",
        PAIR[:-1],
        '{"batch_size": 1}',
        quote(PAIR),
        base64.b64encode(make_request("m", PAIR).meta_data.SerializeToString()).decode(),
        make_request("m", PAIR).meta_data.SerializeToString().hex(),
        'batch_size: 1 input { name: "\xe9\xff" }',
    ],
)
def test_only_text_is_a_header(tmp_path: Path, header: str) -> None:
    """As in the original, what is not the text format is answered without a body and without NV-Status."""
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            raw = await speak(served, b"NV-InferRequest: " + header.encode("latin-1") + b"\r\n", COUNT + ONES)
            assert raw.startswith(b"HTTP/1.1 400 ")
            assert raw.endswith(b"\r\n\r\n")
            assert b"NV-" not in raw

    run(ask())


async def speak(served: Rig, lines: bytes, body: bytes = b"") -> bytes:
    """All that is answered to one inference with these header lines, on a connection of its own."""
    reader, writer = await asyncio.open_connection(*served.http)
    writer.write(b"POST /api/infer/simple HTTP/1.1\r\nHost: t\r\nConnection: close\r\n")
    writer.write(lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    try:
        return await asyncio.wait_for(reader.read(-1), 60)
    finally:
        writer.close()


def test_headers_missing_binary_and_too_long(tmp_path: Path) -> None:
    write_dense(tmp_path)
    binary = make_request("m", PAIR + " id: 3").meta_data.SerializeToString()

    async def ask() -> None:
        async with rig(tmp_path) as served:
            raw = await speak(served, b"")
            assert raw.startswith(b"HTTP/1.1 400 ")
            assert raw.endswith(b"\r\n\r\nThe request header should contain 'NV-InferRequest'")
            twice = b"NV-InferRequest: %b\r\n" % PAIR.encode() * 2
            raw = await speak(served, twice, COUNT + ONES)
            assert raw.startswith(b"HTTP/1.1 400 ")
            assert raw.endswith(b"\r\n\r\nThe request header should contain 'NV-InferRequest' once")
            raw = await speak(served, b"NV-InferRequest: " + binary + b"\r\n")  # control characters
            assert raw.startswith(b"HTTP/1.1 400 ")
            assert b"NV-" not in raw
            for many, code in ((1000, b"400"), (3000, b"431")):  # 25 KB, and beyond 64 KB
                long = PAIR + ' output { name: "who" }' * many
                raw = await speak(served, b"nv-inferrequest: %b\r\n" % long.encode(), COUNT + ONES)
                assert raw.startswith(b"HTTP/1.1 " + code)
                assert (b"output 'who' already requested" in raw) == (code == b"400")
            assert (await served.over_http("simple", PAIR, COUNT, ONES)).status == "SUCCESS"

    run(ask())


# --- shared memory ------------------------------------------------------------------------------------------


@pytest.fixture
def region() -> Iterator[Path]:
    path = Path("/dev/shm", f"fastserve-test-{uuid.uuid4().hex}")
    path.write_bytes(ONES + bytes(4096 - 64))
    yield path
    path.unlink(missing_ok=True)


def place(offset: int, byte_size: int, name: str = "mine") -> str:
    return f'shared_memory {{ name: "{name}" offset: {offset} byte_size: {byte_size} }}'


async def register(served: Rig, region: Path, byte_size: int = 256) -> None:
    target = f"/api/sharedmemorycontrol/register/mine//{region.name}/0/{byte_size}"
    assert (await served.ask("POST", target))[0] == 200


def test_places_that_are_not_there(tmp_path: Path, region: Path) -> None:
    write_dense(tmp_path)
    beyond = "INVALID_ARG msg: \"Invalid offset + byte size for shared memory region: 'mine'\""
    before = "INVALID_ARG msg: \"Invalid offset for shared memory region: 'mine'\""
    unknown = "NOT_FOUND msg: \"Unable to find shared memory region: 'who'\""
    small = (
        "INTERNAL msg: \"shared memory size specified with the request for output 'OUTPUT0' (63 bytes) "
        'should be at least 64 bytes to hold the results"'
    )
    faults = [
        (place(193, 64), beyond), (place(256, 64), before), (place(2**64 - 1, 64), before),
        (place(2**64 - 64, 64), before), (place(0, 64, "who"), unknown),
    ]  # fmt: skip

    async def ask() -> None:
        async with rig(tmp_path) as served:
            await register(served, region)
            for ask in served.ways:
                for where, text in faults:
                    asked = await ask("simple", PAIR.replace('"INPUT0"', f'"INPUT0" {where}'), ONES)
                    wanted = await ask("simple", PAIR.replace('"OUTPUT0"', f'"OUTPUT0" {where}'), COUNT, ONES)
                    assert [asked.status, wanted.status] == [text, text]
                for where in (place(0, 60), place(0, 2**64 - 1)):
                    asked = await ask("simple", PAIR.replace('"INPUT0"', f'"INPUT0" {where}'), ONES)
                    size = where.partition("byte_size: ")[2].partition(" ")[0]
                    text = (
                        f"unexpected shared-memory size {size} for input 'INPUT0', expecting 64 for model M"
                    )
                    assert asked.status == invalid(text, "simple")
                wanted = await ask(
                    "simple", PAIR.replace('"OUTPUT0"', f'"OUTPUT0" {place(0, 63)}'), COUNT, ONES
                )
                assert wanted.status == small
                wanted = await ask(
                    "simple", PAIR.replace('"OUTPUT0"', f'"OUTPUT0" {place(0, 0)}'), COUNT, ONES
                )
                assert wanted.status == beyond
            assert region.read_bytes()[:64] == ONES

    run(ask())


def test_a_place_larger_than_memory(tmp_path: Path, region: Path) -> None:
    """A size that a header claims takes no memory before the region was looked at."""
    models.write(tmp_path, "free")
    where = place(0, 2**45)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            await register(served, region)
            for ask in served.ways:
                result = await ask("free", one(f"dims: {2**43} {where}"))
                assert "Invalid offset + byte size for shared memory region: 'mine'" in result.status

    run(ask())


@pytest.mark.parametrize("gone", ["unregistered", "unlinked", "shrunk"])
def test_a_region_that_goes_under_a_running_request(tmp_path: Path, region: Path, gone: str) -> None:
    models.write(tmp_path, "held")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            await register(served, region)
            header = ECHO.replace('"IN"', f'"IN" {place(0, 4)}').replace('"OUT"', f'"OUT" {place(128, 4)}')
            with region.open("rb") as file:
                asked = [asyncio.ensure_future(ask("held", header)) for ask in served.ways]
                queue = queue_of(served, "held")
                await served.served.until(lambda: queue.waiting == len(asked))
                await remove(served, region, gone)
                models.release(tmp_path, "held")
                statuses = {result.status for result in await asyncio.gather(*asked)}
                file.seek(128)
                written = file.read(4)
            if gone == "shrunk":
                assert (written, len(statuses)) == (b"", 1)
                assert "Invalid offset + byte size for shared memory region: 'mine'" in statuses.pop()
            else:
                assert (written, statuses) == (ONE, {"SUCCESS"})

    run(ask())


def queue_of(served: Rig, model: str) -> Any:
    version: Any = served.server.catalog.available(model)
    return scheduler_of(version).queue


async def remove(served: Rig, region: Path, how: str) -> None:
    if how == "unregistered":
        assert (await served.ask("POST", "/api/sharedmemorycontrol/unregister/mine"))[0] == 200
    elif how == "unlinked":
        region.unlink()
    else:
        os.truncate(region, 64)


# --- sequences and queues ---------------------------------------------------------------------------------


def test_sequences(tmp_path: Path) -> None:
    models.write(tmp_path, "seq")
    header = 'batch_size: %d input { name: "INPUT" } output { name: "OUTPUT" }'
    wanted = {
        header % 1: "inference request to model 'seq' must specify a non-zero correlation ID",
        header % 1 + " correlation_id: 7": "inference request for sequence 7 to model 'seq' must specify the "
        "START flag on the first request of the sequence",
        header % 2
        + " correlation_id: 7 flags: 1": "inference request to model 'seq' must specify batch-size 1 "
        "due to requirements of sequence batcher",
    }

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                for asked, text in wanted.items():
                    value = ONE * (2 if "batch_size: 2" in asked else 1)
                    assert (await ask("seq", asked, value)).status == f'INVALID_ARG msg: "{text}"'
                done = await ask("seq", header % 1 + " correlation_id: 7 flags: 3", ONE)
                after = await ask("seq", header % 1 + " correlation_id: 7", ONE)  # its END freed the slot
                assert [done.status, after.status[:11]] == ["SUCCESS", "INVALID_ARG"]

    run(ask())


def test_a_full_queue_by_policy(tmp_path: Path) -> None:
    models.write(tmp_path, "queued")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            results = await crowd(served, tmp_path, "queued", 3)
            assert results == ["SUCCESS"] * 3

    run(ask())


async def crowd(served: Rig, folder: Path, model: str, most: int) -> list[str]:
    """One runs and the others wait; whoever comes then is refused, over every way. What the first came to."""
    asked: list[asyncio.Task[Result]] = []
    version: Any = served.server.catalog.available(model)
    queue = fast_queue_of(version)
    ring = None if queue is None else queue.ring
    queued = scheduler_of(version).pending if ring is None else ring.queued
    for count in range(most):
        asked.append(asyncio.ensure_future(served.over_http(model, ECHO, ONE)))
        if count == 0:
            await served.until_running(folder, model)
            # Of a model that a warm-up ran before, what runs may not be this one yet.
            await served.served.until(lambda: queued() == 0 and (ring is None or ring.outstanding()))
    await served.served.until(lambda: queued() == most - 1)
    for ask in served.ways:
        refused = await ask(model, ECHO + " id: 9", ONE)
        assert refused.status == 'UNAVAILABLE msg: "Exceeds maximum queue size"'
        assert refused.header == V1.InferResponseHeader(id=9)
    models.release(folder, model)
    return [result.status for result in await asyncio.gather(*asked)]


def test_a_full_queue_of_rows(tmp_path: Path) -> None:
    write_dense(tmp_path, "held")
    path = tmp_path / "held" / "model.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "max_queue_rows": 2}))

    async def ask() -> None:
        async with rig(tmp_path) as served:
            assert await crowd(served, tmp_path, "held", 1 + 2) == ["SUCCESS"] * 3

    run(ask())


def test_what_a_model_says(tmp_path: Path) -> None:
    models.write(tmp_path, "refusing")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                result = await ask("refusing", ECHO + " id: 2", ONE)
                assert result.status == 'UNAVAILABLE msg: "the model will not"'
                assert result.header == V1.InferResponseHeader(id=2)

    run(ask())
