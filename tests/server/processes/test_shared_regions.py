"""Client memory that is registered through one front process is known in all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.workers import liveness
from fastserve.workers.liveness import SilenceLimits
from tests import proc
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import HOLD, Served, release, run, seen, serving, write_model

PAGE, FRONTS = 4096, 3
BRISK = SilenceLimits(ping_s=0.2, silent_s=1.0, computing_s=2.0, starved_s=60.0)


@pytest.fixture
def key() -> Iterator[str]:
    """The key of a region of three pages; the first row of floats is at its start."""
    name = f"fastserve-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name
    path.write_bytes(struct.pack("2f", 1.5, 2.5) + bytes(3 * PAGE - 8))
    try:
        yield f"/{name}"
    finally:
        path.unlink(missing_ok=True)


def shared(folder: Path, **changes: Any) -> Any:
    return serving(folder, frontends=FRONTS, allow_client_shm=True, **changes)


async def register(client: Any, name: str, key: str, size: int = 3 * PAGE) -> tuple[int, bytes]:
    body = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
    return await client.post(f"/v2/systemsharedmemory/region/{name}/register", body)


async def unregister(client: Any, name: str) -> tuple[int, bytes]:
    return await client.post(f"/v2/systemsharedmemory/region/{name}/unregister")


async def names(client: Any) -> list[str]:
    status, body = await client.get("/v2/systemsharedmemory/status")
    assert status == 200
    return [region["name"] for region in json.loads(body)]


def request(name: str, out: int = PAGE) -> bytes:
    def at(offset: int) -> dict[str, Any]:
        return {
            "shared_memory_region": name,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": 8,
        }

    inputs = [{"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": at(0)}]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "y", "parameters": at(out)}]}).encode()


async def infer(client: Any, name: str, out: int = PAGE) -> tuple[int, bytes]:
    return await client.post("/v2/models/twice/infer", request(name, out))


def row(key: str, offset: int) -> tuple[float, ...]:
    with open(f"/dev/shm{key}", "rb") as file:
        file.seek(offset)
        return struct.unpack("2f", file.read(8))


def test_a_region_is_registered_and_unregistered_in_all_fronts_at_once(tmp_path, key):
    write_model(tmp_path)

    async def work() -> None:
        async with shared(tmp_path) as served:
            clients = await connect_to_each(served, FRONTS)
            for asked in clients.values():
                assert (await register(asked, "mine", key))[0] == 200
                for number, client in clients.items():
                    assert await names(client) == ["mine"]
                    answer = await infer(client, "mine", PAGE + 8 * number)
                    assert answer[0] == 200, answer
                    assert row(key, PAGE + 8 * number) == (3.0, 5.0)
                    status, body = await register(client, "mine", key)
                    assert (status, b"already in manager" in body) == (400, True)
                assert (await unregister(asked, "mine"))[0] == 200
                for client in clients.values():
                    assert await names(client) == []
                    status, body = await infer(client, "mine")
                    assert (status, b"Unable to find shared memory region" in body) == (404, True)

    run(work())


def test_v1_and_odd_names_through_every_front(tmp_path, key):
    write_model(tmp_path)
    odd = "a%20%C3%BC%FF"  # not UTF-8 in the end

    async def work() -> None:
        async with shared(tmp_path) as served:
            clients = await connect_to_each(served, FRONTS)
            for asked in clients.values():
                target = f"/api/sharedmemorycontrol/register/v1/{key}/0/64"
                answer = await asked.post(target)
                assert answer[0] == 200, (answer, asked.headers)
                answers = [await register(asked, odd, key), await register(asked, odd, key)]
                assert [status for status, _ in answers] == [200, 400]
                pages = [await client.get("/v2/systemsharedmemory/status") for client in clients.values()]
                assert len({body for _, body in pages}) == 1
                assert pages[0][1].count(b'"name"') == 2
                assert (await asked.post("/api/sharedmemorycontrol/unregisterall"))[0] == 200
                assert [await names(client) for client in clients.values()] == [[]] * FRONTS

    run(work())


def test_two_fronts_that_register_one_name_at_once(tmp_path, key):
    write_model(tmp_path)

    async def work() -> None:
        async with shared(tmp_path) as served:
            clients = await connect_to_each(served, FRONTS)
            for turn in range(20):
                asked = [register(c, "same", key, PAGE * (n + 1)) for n, c in clients.items()]
                found = await asyncio.gather(*asked)
                assert sorted(status for status, _ in found) == [200, 400, 400], turn
                told = [await client.get("/v2/systemsharedmemory/status") for client in clients.values()]
                assert told[0] == told[1] == told[2]
                gone = [unregister(client, "same") for client in clients.values()]
                assert [status for status, _ in await asyncio.gather(*gone)] == [200] * FRONTS

    run(work())


def test_a_request_that_runs_keeps_the_region_it_uses(tmp_path, key):
    write_model(tmp_path)
    Path(f"/dev/shm{key}").write_bytes(struct.pack("2f", HOLD, HOLD) + bytes(3 * PAGE - 8))

    async def work() -> None:
        async with shared(tmp_path) as served:
            clients = await connect_to_each(served, FRONTS)
            assert (await register(clients[0], "mine", key))[0] == 200
            running = asyncio.ensure_future(infer(clients[2], "mine"))
            await served.until(lambda: seen(tmp_path))
            assert (await unregister(clients[1], "mine"))[0] == 200
            assert not running.done()
            release(tmp_path)
            assert (await running)[0] == 200
            assert row(key, PAGE) == (2 * HOLD, 2 * HOLD)

    run(work())


@pytest.mark.logs_errors
def test_a_replaced_front_knows_all_regions(tmp_path, key):
    """More of them than one message carries descriptors, and the file's name is gone meanwhile."""
    write_model(tmp_path)
    many = [f"r{number:03}" for number in range(300)]

    async def work() -> None:
        async with shared(tmp_path) as served:
            clients = await connect_to_each(served, FRONTS)
            for number, name in enumerate(many):
                assert (await register(clients[number % FRONTS], name, key))[0] == 200
            file = os.open(f"/dev/shm{key}", os.O_RDWR)
            os.unlink(f"/dev/shm{key}")
            link = served.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            again = await connect_to_each(served, FRONTS)
            assert await names(again[1]) == many
            assert (await infer(again[1], many[-1]))[0] == 200
            assert struct.unpack("2f", os.pread(file, 8, PAGE)) == (3.0, 5.0)
            os.close(file)
            assert (await unregister(again[1], many[7]))[0] == 200
            for client in again.values():
                assert many[7] not in await names(client)

    run(work())


@pytest.mark.logs_errors
def test_a_stopped_front_does_not_hold_the_others_for_ever(tmp_path, key, monkeypatch):
    monkeypatch.setattr(liveness, "SILENCE_LIMITS", BRISK)
    write_model(tmp_path)

    async def work() -> None:
        async with shared(tmp_path) as served:
            clients = await connect_to_each(served, FRONTS)
            link = served.links[1]
            victim = link.pid
            proc.stop(victim)
            asked = asyncio.ensure_future(register(clients[1], "mine", key))
            await served.until(lambda: link._waiting)
            assert not asked.done(), "one front does not know it yet"
            assert (await asked)[0] == 200
            assert victim != link.pid, "it was ended"
            await served.until(lambda: link.pid and link._listening)
            again = await connect_to_each(served, FRONTS)
            assert [await names(client) for client in again.values()] == [["mine"]] * FRONTS

    run(work())


@pytest.mark.logs_errors
def test_regions_come_and_go_while_fronts_are_killed(tmp_path, key):
    """What a client was told of the last change to its name is so in all fronts afterwards."""
    write_model(tmp_path)

    async def work() -> None:
        async with shared(tmp_path) as served:
            told: dict[str, bool] = {}
            over = asyncio.Event()

            async def change(number: int) -> None:
                turn = 0
                while not over.is_set():
                    name, turn = f"c{number}-{turn % 5}", turn + 1
                    client = await served.client()
                    try:
                        await register(client, name, key)
                        told[name] = True
                        if turn % 2:
                            await unregister(client, name)
                            told[name] = False
                    except (OSError, asyncio.IncompleteReadError):
                        told.pop(name, None)  # its front was killed: it may be so or so
                    finally:
                        client.close()

            changing = [asyncio.ensure_future(change(number)) for number in range(4)]
            for turn in range(4):
                link = served.links[turn % 2]
                victim = link.pid
                os.kill(victim, signal.SIGKILL)
                await served.until(
                    lambda link=link, victim=victim: link.pid not in (0, victim) and link._listening
                )
            over.set()
            await asyncio.gather(*changing)
            clients = await connect_to_each(served, FRONTS)
            found = [set(await names(client)) for client in clients.values()]
            assert found[0] == found[1] == found[2]
            assert {name for name, there in told.items() if there} <= found[0]
            assert not {name for name, there in told.items() if not there} & found[0]
            assert len(told) > 5

    run(work())


def held_descriptors(served: Served, path: str) -> int:
    """How many descriptors of a file the other front processes hold."""
    count = 0
    for link in served.links:
        for name in os.listdir(f"/proc/{link.pid}/fd"):
            try:
                count += os.readlink(f"/proc/{link.pid}/fd/{name}").startswith(path)
            except OSError:
                continue
    return count


def test_descriptors_are_given_back(tmp_path, key):
    write_model(tmp_path)

    async def work() -> None:
        async with shared(tmp_path) as served:
            client = await served.client()
            for name in ("a", "b"):
                assert (await register(client, name, key))[0] == 200
            assert held_descriptors(served, f"/dev/shm{key}") == 2 * len(served.links)
            assert (await client.post("/v2/systemsharedmemory/unregister"))[0] == 200
            assert held_descriptors(served, f"/dev/shm{key}") == 0

    run(work())
