"""Schedulers that the owner alone has, asked through real front processes: one order for all of them, and a
front that dies or stops costs its own clients and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import HOLD, Client, Served, release, run, seen, serving, write_model
from tests.server.scheduling import test_ensembles as ensembles
from tests.server.scheduling.test_priorities import CONFIG as LEVELS
from tests.server.scheduling.test_priorities import SOURCE as SLOW
from tests.server.scheduling.test_sequence_faults import scheduler_of, write_one_slot
from tests.server.scheduling.test_sequences import write_seq

NOTED = """        with open(self.folder / "order", "a") as order:
            print(x.ravel()[0], file=order)
        (self.folder"""


def write_slow(folder: Path, config: str = LEVELS) -> Path:
    (folder / "slow" / "1").mkdir(parents=True)
    (folder / "slow" / "config.pbtxt").write_text(config)
    (folder / "slow" / "1" / "model.py").write_text(SLOW.replace("        (self.folder", NOTED, 1))
    return folder / "slow"


async def infer(client: Client, model: str, number: int, **parameters: Any) -> Any:
    """The first output of a V2 request over the client's connection, or the error's text."""
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    client.writer.write(
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b"
        % (model.encode(), len(body), body)
    )
    status, text = await client.page()
    told = json.loads(text)
    return told["outputs"][0]["data"] if status == 200 else told["error"]


def relayed(at: Served) -> int:
    """Requests of other fronts that the owner has."""
    return sum(link.relay_server.running for link in at.links if link.relay_server is not None)


def test_a_sequence_goes_on_through_any_front(tmp_path: Path) -> None:
    write_seq(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as at:
            clients = await connect_to_each(at, 3)
            sums = []
            for turn in range(6):
                flags = {"sequence_start": turn == 0, "sequence_end": turn == 5}
                sums.append((await infer(clients[turn % 3], "seq", 10, sequence_id=7, **flags))[:2])
            assert sums == [[10 * n, 10 * n] for n in range(1, 7)]
            told = [await infer(client, "seq", 1, sequence_id=7) for client in clients.values()]
            assert len(set(told)) == 1
            assert "must specify the START flag" in told[0]

    run(work())


def test_levels_are_one_order_over_all_fronts(tmp_path: Path) -> None:
    folder = write_slow(tmp_path, LEVELS.replace("max_queue_size: 2", "max_queue_size: 3"))

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as at:
            clients, more = await connect_to_each(at, 3), await connect_to_each(at, 3)

            async def ask(client: Client, number: int, priority: int) -> None:
                assert await infer(client, "slow", number, priority=priority) == [number]

            asking = [asyncio.ensure_future(ask(clients[1], 0, 0))]
            await at.until((folder / "begun").exists)
            for index, (client, number, priority) in enumerate(
                ((clients[2], 1, 2), (more[1], 2, 2), (more[2], 3, 1)), start=2
            ):
                asking.append(asyncio.ensure_future(ask(client, number, priority)))
                await at.until(lambda index=index: relayed(at) == index)
            assert "Request timeout expired" in await infer(clients[0], "slow", 9, priority=1, timeout=1000)
            (folder / "go").touch()
            await asyncio.gather(*asking)
            assert (folder / "order").read_text().split() == ["0", "3", "1", "2"]

    run(work())


def test_an_ensemble_of_every_front_comes_and_goes(tmp_path: Path) -> None:
    ensembles.write_ensemble(tmp_path)
    write_model(tmp_path, "twice")
    write_model(tmp_path, "other", parameters={"add": 1})

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as at:
            clients = await connect_to_each(at, 3)
            for client in clients.values():
                assert await client.predict(1.0, model="ens") == (200, [5.0])
            running = asyncio.ensure_future(clients[1].predict(HOLD, model="ens"))
            await at.until(lambda: seen(tmp_path)[-1:] == [[HOLD]])
            unloading = asyncio.ensure_future(at.server.loads.unload("ens", False))
            await asyncio.sleep(0)
            release(tmp_path)
            assert await running == (200, [HOLD * 4 + 1]), "what runs is answered"
            await unloading
            for client in clients.values():
                assert (await client.predict(1.0, model="ens"))[0] == 404
            await at.server.loads.load("ens", None)
            for client in clients.values():
                assert await client.predict(2.0, model="ens") == (200, [9.0])

    run(work())


def test_ten_megabytes_through_every_front(tmp_path: Path) -> None:
    config = """
backend: "python" max_batch_size: 2 dynamic_batching { priority_levels: 2 default_priority_level: 1 }
input [ { name: "IN" data_type: TYPE_FP64 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP64 dims: [ -1 ] } ]
"""
    folder = write_slow(tmp_path, config)
    (folder / "go").touch()
    numbers = [float(n % 1000 + 1) for n in range(1_250_000)]
    tensor = {"name": "IN", "shape": [1, len(numbers)], "datatype": "FP64", "data": numbers}
    body = json.dumps({"inputs": [tensor]}).encode()

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as at:
            for client in (await connect_to_each(at, 2)).values():
                status, text = await client.post("/v2/models/slow/infer", body)
                assert status == 200, text[:300]
                assert json.loads(text)["outputs"][0]["data"] == numbers

    run(work())


def test_a_client_that_leaves_a_front_frees_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_one_slot(tmp_path, monkeypatch)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as at:
            clients, others = await connect_to_each(at, 2), await connect_to_each(at, 2)
            assert (await infer(clients[1], "seq", 5, sequence_id=1, sequence_start=True))[:2] == [5, 5]
            held = asyncio.ensure_future(infer(clients[1], "seq", 0, sequence_id=1))
            await at.until((tmp_path / "held").exists)
            flags = {"sequence_start": True, "sequence_end": True}
            waits = asyncio.ensure_future(infer(others[0], "seq", 3, sequence_id=2, **flags))
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 2)
            clients[1].writer.transport.abort()
            await asyncio.gather(held, return_exceptions=True)
            await at.until(lambda: scheduler_of(at).sequences.outstanding == 1)
            (tmp_path / "go").touch()
            assert (await waits)[:2] == [3, 3]
            await at.until(lambda: relayed(at) == 0)

    run(work())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_front_that_ends_or_stops_holds_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: signal.Signals
) -> None:
    """Its sequence keeps its slot while the front lives, as that of a client who is silent does."""
    killed = how is signal.SIGKILL
    write_one_slot(tmp_path, monkeypatch, slots=1 if killed else 2)
    flags = {"sequence_start": True, "sequence_end": True}

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as at:
            clients, others = await connect_to_each(at, 3), await connect_to_each(at, 3)
            assert (await infer(clients[1], "seq", 5, sequence_id=1, sequence_start=True))[:2] == [5, 5]
            held = asyncio.ensure_future(infer(clients[1], "seq", 0, sequence_id=1))
            await at.until((tmp_path / "held").exists)
            victim, slots = at.links[0].pid, scheduler_of(at).sequences
            os.kill(victim, how)
            if killed:  # what it had asked is cancelled, and its sequence ends with that
                await at.until(lambda: slots.outstanding == 0)
            waits = asyncio.ensure_future(infer(others[2], "seq", 2, sequence_id=2, **flags))
            await at.until(lambda: slots.outstanding == (1 if killed else 2))
            (tmp_path / "go").touch()
            assert (await waits)[:2] == [2, 2]
            if killed:
                await asyncio.gather(held, return_exceptions=True)
                assert "START flag" in await infer(clients[2], "seq", 1, sequence_id=1)
                await at.until(lambda: at.links[0].pid not in (0, victim) and at.links[0]._listening)
                again = await connect_to_each(at, 3)
                assert (await infer(again[1], "seq", 4, sequence_id=9, **flags))[:2] == [4, 4]
            else:
                os.kill(victim, signal.SIGCONT)
                assert (await held)[:2] == [5, 5]
                assert (await infer(clients[1], "seq", 1, sequence_id=1, sequence_end=True))[:2] == [6, 6]
            await at.until(lambda: relayed(at) == 0)

    run(work())
    caplog.clear()
