"""tritonclient against a server of two front processes: whichever the kernel picks, all is the same."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import Belongings
from tests.dialects.kserve.client_models import write_streams, write_sums
from tests.dialects.kserve.client_rig import (
    COUNT,
    FLAVOURS,
    ONES,
    Client,
    connected,
    region,
    run,
    shared_memory,
    warm_up,
)
from tests.running import Running, until

CLIENTS = 8  # 1 of 128 times the kernel gives them all to one front


@pytest.fixture(scope="module")
def two_fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fronts") / "models"
    folder.mkdir()
    write_sums(folder)
    write_streams(folder)
    options = ("--frontends", "2", "--model-control", "explicit", "--load-model", "*")
    options += ("--admin-file-overrides", "--admin-log-settings", "--allow-client-shm")
    with Running(folder, folder.parent / "log", *options) as running:
        warm_up(running)
        yield running


@pytest.fixture
def served(two_fronts: Running) -> Iterator[Running]:
    ours, holds = Belongings.count(), two_fronts.holds()
    yield two_fronts
    gc.collect()
    until(lambda: not ours.gained(), "the client gives everything back")
    two_fronts.settles(holds)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_inference_and_metadata(served: Running, flavour: str) -> None:
    async def ask(number: int) -> str:
        async with connected(flavour, served) as client:
            assert await client.is_server_ready()
            assert await client.is_model_ready("simple")
            result = await client.infer(("sums", "simple")[number % 2], client.pair(COUNT * number))
            assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT * number + ONES)
            names = ("get_server_metadata", "get_model_repository_index", "get_trace_settings")
            told = [await client.told(name) for name in names]
            told += [await client.told(f"get_model_{kind}", "simple") for kind in ("metadata", "config")]
            return json.dumps(told, sort_keys=True)

    async def work() -> None:
        found = [await ask(number) for number in range(CLIENTS)]
        assert len(set(found)) == 1, "every front says the same"

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_statistics_are_of_the_whole_server(served: Running, flavour: str) -> None:
    """Statistics that the last connection is shown include those of many others."""

    async def count(client: Client) -> int:
        told = await client.told("get_inference_statistics", "sums")
        return int(told["model_stats"][0]["inference_stats"]["success"].get("count", 0))

    async def work() -> None:
        async with connected(flavour, served) as last:
            before = await count(last)
            for _ in range(CLIENTS):
                async with connected(flavour, served) as client:
                    await client.infer("sums", client.pair())
            end = time.monotonic() + 60
            while (found := await count(last)) != before + CLIENTS:
                assert time.monotonic() < end, (before, found)
                await asyncio.sleep(0.01)

    run(work())


def test_streams(served: Running) -> None:
    async def stream(number: int) -> None:
        async with connected("grpc.aio", served) as client:

            async def asking() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "repeat", "inputs": client.numbers(number, -1, number + 1)}
                yield {"model_name": "simple", "inputs": client.pair(COUNT * number)}

            found = [answer async for answer in await client.stream_infer(asking())]
            assert [error.message() for _, error in found if error is not None] == ["a bad value"]
            results = [result for result, _ in found if result is not None]
            numbers = [int(r.as_numpy("OUT")[0]) for r in results if r.as_numpy("OUT") is not None]
            (sums,) = [r.as_numpy("OUTPUT0") for r in results if r.as_numpy("OUTPUT0") is not None]
            assert numbers == [number, number + 1]
            assert np.array_equal(sums, COUNT * number + ONES)

    async def work() -> None:
        await asyncio.gather(*(stream(number) for number in range(CLIENTS)))

    run(work())


def test_a_stream_that_is_left_frees_its_model(served: Running) -> None:
    async def work() -> None:
        for _ in range(CLIENTS):
            async with connected("grpc.aio", served) as client:

                async def asking(client: Client = client) -> AsyncIterator[dict[str, Any]]:
                    yield {"model_name": "repeat", "inputs": client.numbers(1, -2)}
                    await asyncio.Event().wait()

                stream = await client.stream_infer(asking())
                await anext(stream)
                stream.cancel()
        async with connected("grpc.aio", served) as client:

            async def once() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "repeat", "inputs": client.numbers(4)}

            found = [int(r.as_numpy("OUT")[0]) async for r, _ in await client.stream_infer(once())]
            assert found == [4]

    run(work())


def test_models_come_and_go_on_every_front(served: Running) -> None:
    """Whichever front is asked to load or unload, it is done on that front when the call returns."""

    async def work() -> None:
        for flavour in ("http.aio", "grpc.aio") * (CLIENTS // 2):
            async with connected(flavour, served) as client:
                await client.unload_model("held")
                assert not await client.is_model_ready("held")
                await client.load_model("held")
                assert await client.is_model_ready("held")
                assert (await client.told("get_model_metadata", "held"))["versions"] == ["1"]

    run(work())


def test_client_memory_is_known_on_every_front(served: Running) -> None:
    """A region that one client registers is read and written for others, over HTTP and gRPC."""
    size = COUNT.nbytes

    async def infer(flavour: str, name: str, memory: Any, number: int) -> None:
        async with connected(flavour, served) as client:
            inputs = client.pair()
            inputs[0].set_shared_memory(name, size)
            output = client.output("OUTPUT0")
            output.set_shared_memory(name, size, offset=size * (1 + number))
            await client.infer("sums", inputs, outputs=[output])
            found = shared_memory.get_contents_as_numpy(memory, np.int32, [1, 16], size * (1 + number))
            assert np.array_equal(found, COUNT * 7 + ONES), flavour

    async def work() -> None:
        with region(4096) as (memory, name, key):
            shared_memory.set_shared_memory_region(memory, [COUNT * 7])
            for flavour in ("http.aio", "grpc.aio"):
                async with connected(flavour, served) as client:
                    await client.register_system_shared_memory(name, key, 4096)
                for number in range(CLIENTS):
                    await infer(("http.aio", "grpc.aio")[number % 2], name, memory, number)
                async with connected(flavour, served) as client:
                    await client.unregister_system_shared_memory(name)
                for _ in range(CLIENTS):
                    async with connected(flavour, served) as client:
                        told = await client.told("get_system_shared_memory_status")
                        assert not (told if flavour == "http.aio" else told.get("regions"))

    run(work())
