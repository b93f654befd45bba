"""Traces with three front processes: settings, rates, counts and files are those of one server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fastserve.settings import TritonOptions
from tests.dialects.kserve.test_options import TWO, traced, written
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import HOLD, Client, release, run, seen, serving, write_model

FRONTS = 3
SETTING, INFER = "/v2/trace/setting", "/v2/models/twice/infer"


def options(file: Path, *more: str) -> dict[str, Any]:
    flags = (f"triton,file={file}", *more)
    return {"frontends": FRONTS, "triton": TritonOptions(trace_config=flags)}


async def change(client: Client, changes: dict[str, Any], path: str = SETTING) -> dict[str, Any]:
    status, body = await client.post(path, json.dumps(changes).encode())
    assert status == 200, body
    shown: dict[str, Any] = json.loads(body)
    return shown


async def infer(client: Client, times: int) -> None:
    for _ in range(times):
        assert (await client.post(INFER, json.dumps(TWO).encode()))[0] == 200


async def infer_at_once(clients: Iterable[Client], times: int) -> None:
    await asyncio.wait_for(asyncio.gather(*(infer(client, times) for client in clients)), 60)


def test_settings_hold_in_every_front(tmp_path: Path) -> None:
    write_model(tmp_path / "models")

    async def work() -> None:
        async with serving(tmp_path / "models", **options(tmp_path / "trace")) as served:
            clients = (await connect_to_each(served, FRONTS)).values()
            for path in (SETTING, "/v2/models/twice/trace/setting"):
                for number, client in enumerate(clients, 1):
                    shown = await change(client, {"trace_rate": str(number)}, path)
                    assert shown["trace_rate"] == str(number)
                    seen = [json.loads((await one.get(path))[1]) for one in clients]
                    assert seen == [shown] * FRONTS
                    bad = b'{"trace_level": ["TIMESTAMPS"], "trace_rate": "0"}'
                    status, text = await client.post(path, bad)
                    assert (status, b"sample rate must be non-zero" in text) == (400, True)
                    assert [json.loads((await one.get(path))[1]) for one in clients] == seen

    run(work())


def test_rates_and_counts_are_over_all_fronts(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    file = tmp_path / "trace"

    async def work() -> None:
        start = options(file, "level=TIMESTAMPS", "rate=4", "triton,log-frequency=6")
        async with serving(tmp_path / "models", **start) as served:
            clients = [*(await connect_to_each(served, FRONTS)).values()]
            await infer_at_once(clients, 24)  # 72 requests, 18 traces, three files
            found = [await written(tmp_path / f"trace.{number}") for number in range(3)]
            assert [len(one) for one in found] == [6, 6, 6]
            assert sorted(id for one in found for id in one) == list(range(1, 19))
            some = {"trace_rate": "1", "trace_count": "7", "log_frequency": "0"}
            await change(clients[1], some)
            await infer_at_once(clients, 20)
            assert len(await written(tmp_path / "trace.3")) == 7  # the last ones of a count
            assert not (tmp_path / "trace.4").exists()
            await change(clients[2], {"trace_count": "-1"})
            await infer_at_once(clients, 10)
            await change(clients[0], {"trace_level": ["OFF"]})
            await infer_at_once(clients, 2)
            # What was traced until the change was answered is there; the list is closed at the end.
            assert len(json.loads(file.read_text() + "]")) % 30 == 0
        assert len(traced(file)) == 30
        assert not (tmp_path / "trace.4").exists()

    run(work())


@pytest.mark.logs_errors
def test_what_a_dead_front_had_begun_counts_and_nothing_is_mixed(tmp_path: Path) -> None:
    """Its trace is lost with it. The last one of the count ends the file all the same."""
    models = tmp_path / "models"
    write_model(models, instances=2)
    file = tmp_path / "trace"

    async def work() -> None:
        start = options(file, "level=TIMESTAMPS", "level=TENSORS", "rate=1", "count=20")
        async with serving(models, **start) as served:
            clients = await connect_to_each(served, FRONTS)
            held = json.dumps({"inputs": [{**TWO["inputs"][0], "data": [HOLD, 0]}]}).encode()
            head = f"POST {INFER} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(held)}\r\n\r\n"
            clients[1].writer.write(head.encode() + held)  # a trace that has begun and will not end
            await served.until(lambda: seen(models))  # before that, another front's rows may join its batch
            await infer(clients[2], 9)
            link = served.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            release(models)
            clients = await connect_to_each(served, FRONTS)
            shown = [json.loads((await one.get(SETTING))[1]) for one in clients.values()]
            assert shown == [shown[0]] * FRONTS
            assert shown[0]["trace_count"] == "20"
            await infer_at_once(clients.values(), 10)
            found = await asyncio.wait_for(written(tmp_path / "trace.0"), 60)
            assert len(found) == 19
            assert sorted(found) == [*range(2, 21)], "the first one was the dead front's"
            assert all(one["times"]["REQUEST_END"] and len(one["tensors"]) == 2 for one in found.values())

    run(work())


def test_what_every_front_has_kept_is_written_at_the_end(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    file = tmp_path / "trace"

    async def work() -> None:
        start = options(file, "level=TIMESTAMPS", "rate=1")
        async with serving(tmp_path / "models", **start) as served:
            clients = await connect_to_each(served, FRONTS)
            await infer_at_once(clients.values(), 40)
        assert sorted(traced(file)) == list(range(1, 121))

    run(work())
