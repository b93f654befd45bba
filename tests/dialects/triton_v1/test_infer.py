"""The fast paths: which requests they take, that they answer as the general path does, what they leave."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastserve.engine.engine import scheduler_of
from fastserve.errors import Kind, ServeError
from fastserve.settings import LogOptions
from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.rig import Result, Rig, make_request, rig, write_dense
from tests.server.rig import run

COUNT, ONES = struct.pack("<16i", *range(16)), struct.pack("<16i", *[1] * 16)
PAIR = 'batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" } output { name: "OUTPUT0" }'
BOTH = PAIR + ' output { name: "OUTPUT1" }'
ECHO = 'batch_size: 1 input { name: "IN"%s } output { name: "OUT"%s }'
FOUR = struct.pack("<4f", 1, 2, 3, 4)
ASKED = [
    ("simple", PAIR, [COUNT, ONES]),
    ("simple", BOTH + " id: 300", [COUNT, ONES]),
    ("simple", PAIR.replace("1", "4", 1), [COUNT * 4, ONES * 4]),
    ("simple", PAIR.partition(" output")[0], [COUNT, ONES]),
    ("simple", PAIR.replace('"OUTPUT0"', '"OUTPUT0" cls { count: 3 }') + " id: 2", [COUNT, ONES]),
    ("reshaped", ECHO % ("", ""), [FOUR]),
    ("free", ECHO % (" dims: 4", "") + " id: 7 priority: 1 timeout_microseconds: 9", [FOUR]),
    ("free", ECHO % (" dims: 2", ""), [FOUR[:8]]),
    ("unbatched", PAIR.replace('" }', '" dims: 1 dims: 2 }', 2), [FOUR[:8], FOUR[8:]]),
]
PLAIN = [("text", ECHO % (" dims: 1 batch_byte_size: 4", ""), [bytes(4)])]


async def ask_all(served: Rig, asked: list[Any]) -> list[Result]:
    return [await ask(model, header, *inputs) for model, header, inputs in asked for ask in served.ways]


@pytest.mark.parametrize("dense", [False, True])
def test_the_same_answers_by_both_paths(tmp_path: Path, dense: bool) -> None:
    write_dense(tmp_path) if dense else models.write(tmp_path, "simple")
    models.write(tmp_path, "reshaped", "free", "unbatched", "text")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            fast = await without_engine(served, ASKED)
            assert {result.status for result in fast} == {"SUCCESS"}
            generally = await without_fast_paths(served, ASKED)
            assert fast == generally
            refused = await without_engine(served, PLAIN)
            assert {result.status for result in refused} == {'INTERNAL msg: "the general path was asked"'}

    run(ask())


async def without_engine(served: Rig, asked: list[Any]) -> list[Result]:
    """Ask when only the fast paths can answer."""

    async def refuse(*_: object) -> None:
        raise ServeError(Kind.INTERNAL, "the general path was asked")

    engine: Any = served.server.front.engine
    engine.infer = refuse
    try:
        return await ask_all(served, asked)
    finally:
        del engine.infer


def test_a_request_that_the_fast_path_leaves_is_offered_once(tmp_path: Path) -> None:
    """Over gRPC too, where what is left to a coroutine could be offered again."""
    models.write(tmp_path, "text")
    offered: list[str] = []

    async def ask() -> None:
        async with rig(tmp_path) as served:
            with pytest.MonkeyPatch.context() as patch:
                for one in ("HttpHeaderCache", "RpcHeaderCache"):
                    note = partial(lambda one, *_: offered.append(one), one)  # None: not taken
                    patch.setattr(f"fastserve.dialects.triton_v1.infer.{one}.start", note)
                results = await ask_all(served, PLAIN)
        assert [result.status for result in results] == ["SUCCESS"] * len(offered)
        assert set(offered) == {"HttpHeaderCache", "RpcHeaderCache"}

    run(ask())


async def without_fast_paths(served: Rig, asked: list[Any]) -> list[Result]:
    """Ask when no header is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastserve.dialects.triton_v1.infer.HttpHeaderCache.start", lambda *_: False)
        patch.setattr("fastserve.dialects.triton_v1.infer.RpcHeaderCache.start", lambda *_: False)
        return await ask_all(served, asked)


@pytest.mark.parametrize("taken", [0, 64])  # the second ends where the region does
@pytest.mark.parametrize("dense", [False, True])
def test_shared_memory(tmp_path: Path, dense: bool, taken: int) -> None:
    write_dense(tmp_path) if dense else models.write(tmp_path, "simple")
    path = Path("/dev/shm", f"fastserve-test-{uuid.uuid4().hex}")
    path.write_bytes(ONES * 2)
    given = 64 - taken
    place = 'shared_memory {{ name: "mine" offset: {} byte_size: 64 }}'.format
    header = PAIR.replace('"INPUT1"', f'"INPUT1" {place(taken)}').replace(
        '"OUTPUT0"', f'"OUTPUT0" {place(given)}'
    )

    async def ask() -> None:
        async with rig(tmp_path) as served:
            await served.ask("POST", f"/api/sharedmemorycontrol/register/mine//{path.name}/0/128")
            for result in await without_engine(served, [("simple", header, [COUNT])]):
                assert (result.status, result.raws) == ("SUCCESS", [b""])
                assert path.read_bytes()[given : given + 64] == struct.pack("<16i", *range(1, 17))

    try:
        run(ask())
    finally:
        path.unlink()


def test_an_access_log_and_pipelined_requests(tmp_path: Path) -> None:
    write_dense(tmp_path)
    first = "POST /api/infer/simple HTTP/1.1\r\nHost: t\r\nContent-Length: 128\r\n"

    async def ask() -> None:
        async with rig(tmp_path, log=LogOptions(access=True)) as served:
            reader, writer = await asyncio.open_connection(*served.http)
            for number in range(1, 4):
                head = f"{first}NV-InferRequest: {PAIR} id: {number}\r\n\r\n"
                writer.write(head.encode() + COUNT + ONES)
            for number in range(1, 4):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(size)
                assert f" id: {number}\r\nNV-Status: code: SUCCESS" in head
                assert body.endswith(b"}\nid: %d\n" % number)
            writer.close()

    run(ask())


@pytest.mark.parametrize("dense", [False, True])
def test_clients_that_leave(tmp_path: Path, dense: bool) -> None:
    """Requests whose client is gone are given up, and their places come back (the rig looks)."""
    write_dense(tmp_path, "held") if dense else models.write(tmp_path, "held")
    header = ECHO % ("", "")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            version: Any = served.server.catalog.available("held")
            reader, writer = await asyncio.open_connection(*served.http)
            one = struct.pack("<i", 1)
            writer.write(
                f"POST /api/infer/held HTTP/1.1\r\nHost: t\r\nNV-InferRequest: {header}\r\n".encode()
            )
            writer.write(b"Content-Length: 4\r\n\r\n" + one)
            await served.until_running(tmp_path, "held")
            call = served.grpc.Infer(make_request("held", header, one))
            await served.served.until(lambda: scheduler_of(version).queue.waiting == 2)
            writer.close()
            call.cancel()
            await served.served.until(lambda: scheduler_of(version).queue.waiting == 0)
            models.release(tmp_path, "held")
            assert (await served.over_http("held", header, one)).raws == [one]
            del reader

    run(ask())


def test_a_version_loaded_again(tmp_path: Path) -> None:
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for _ in range(2):
                before = served.server.catalog.available("simple")
                assert {r.status for r in await without_engine(served, ASKED[:2])} == {"SUCCESS"}
                for action in ("unload", "load"):
                    await served.ask("POST", f"/api/modelcontrol/{action}/simple")
                assert served.server.catalog.available("simple") is not before

    run(ask())


@pytest.mark.logs_errors
def test_whatever_goes_wrong_gives_the_rows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault nobody foresaw, such as a descriptor too many, fails its request alone (the rig looks)."""
    write_dense(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            with monkeypatch.context() as patch:
                patch.setattr("fastserve.dialects.triton_v1.infer.PreparedBody.fill", fail)
                patch.setattr("fastserve.dialects.triton_v1.infer.PreparedMessage.fill", fail)
                for result in await ask_all(served, ASKED[:1]):
                    assert result.status == 'INTERNAL msg: "Internal error"'
            for result in await ask_all(served, ASKED[:1]):
                assert result.status == "SUCCESS"

    run(ask())
    caplog.clear()  # its tracebacks hold the server


def test_what_is_kept_is_answered_by_both_paths(tmp_path: Path) -> None:
    """Before a response cache too: a hit runs nothing, and is what the model answered."""
    config, source = models.MODELS["simple"]
    models.MODELS["kept"] = (config + " response_cache { enable: true }", source)
    try:
        models.write(tmp_path, "kept")
    finally:
        del models.MODELS["kept"]
    asked = [("kept", header, inputs) for model, header, inputs in ASKED if model == "simple"]

    async def ask() -> None:
        async with rig(tmp_path, response_cache_bytes=1 << 20) as served:
            counts = served.server.host.cache
            assert counts is not None
            first = await without_engine(served, asked)
            assert {result.status for result in first} == {"SUCCESS"}
            # The same rows are one key, whatever is asked besides: an id, and classes of outputs.
            assert (counts.misses, counts.hits) == (4, len(first) - 4)
            assert await without_engine(served, asked) == first
            assert await without_fast_paths(served, asked) == first
            assert (counts.misses, counts.hits) == (4, 3 * len(first) - 4)

    run(ask())


def test_what_was_unloaded_leaves_its_memory(tmp_path: Path) -> None:
    """The fast paths know its requests, and let go of it."""
    write_dense(tmp_path)

    def arenas() -> int:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum("fastserve-arena" in os.readlink(link) for link in links if os.path.islink(link))

    async def ask() -> None:
        before = arenas()
        async with rig(tmp_path) as served:
            for _ in range(2):
                await without_engine(served, ASKED[:2])
                assert arenas() > before
                await served.ask("POST", "/api/modelcontrol/unload/simple")
                await served.served.until(lambda: arenas() == before)
                await served.ask("POST", "/api/modelcontrol/load/simple")

    run(ask())
