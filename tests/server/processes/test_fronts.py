"""Several front processes on one port: one picture, one queue, and none of them matters alone."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import Version, VersionState
from fastserve.server.front_messages import CatalogChanges, apply_catalog, catalog_message
from tests import proc
from tests.server.rig import HOLD, Served, release, run, seen, serving, write_model

TRITON_SOURCE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 3)]) for x in rows]
"""


async def connect_to_each(served: Served, fronts: int) -> dict[int, object]:
    """A connection to every front process. Which front the kernel gives us, its metrics do not say; the
    owner's listener counts its own, and followers are told apart by what they hold open."""
    found: dict[int, object] = {}
    for _ in range(400):
        client = await served.client()
        front = await front_of(served, client)
        if front in found:
            client.close()
        else:
            found[front] = client
        if len(found) == fronts:
            return found
    raise AssertionError(f"only fronts {sorted(found)} accept connections")


async def front_of(served: Served, client) -> int:
    """The process that has accepted the client's connection, by the socket's inode in /proc."""
    await client.get("/healthz/live")
    ours, theirs = (client.writer.get_extra_info(name)[1] for name in ("sockname", "peername"))
    pids = [os.getpid(), *(link.pid for link in served.links)]
    wanted = (f":{theirs:04X}", f":{ours:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(wanted[0]) and fields[2].endswith(wanted[1]):
            inode = f"socket:[{fields[9]}]"
            for number, pid in enumerate(pids):
                if pid and inode in links_of(pid):
                    return number
    raise AssertionError("nobody holds the connection")


def links_of(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return found


def total(text: bytes, name: str) -> float:
    return sum(
        float(line.split()[-1]) for line in text.decode().splitlines() if re.match(rf"{name}(\{{|\s)", line)
    )


@pytest.mark.parametrize("fronts", [2, 4])
def test_every_front_fills_the_same_batch_and_counts_into_one_sum(tmp_path, fronts):
    write_model(tmp_path, max_batch_size=4, max_queue_delay_us=20_000_000 if fronts == 4 else 0)

    async def work() -> None:
        async with serving(tmp_path, frontends=fronts) as served:
            clients = await connect_to_each(served, fronts)
            answers = await asyncio.gather(*(c.predict(float(n + 1)) for n, c in clients.items()))
            assert sorted(answers) == [(200, [2.0 * (n + 1)]) for n in range(fronts)]
            if fronts == 4:
                assert [sorted(batch) for batch in seen(tmp_path)] == [[1, 2, 3, 4]]
            for client in clients.values():
                _, text = await client.get("/metrics")
                assert total(text, "fastserve_rows_total") == fronts
                assert (await client.get("/healthz/ready"))[0] == 200

    run(work())


def test_versions_come_and_go_on_every_front(tmp_path):
    write_model(tmp_path, "first")

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as served:
            clients = await connect_to_each(served, 3)
            write_model(tmp_path, "second", parameters={"add": 10})
            await served.server.loads.load("second", None)
            for client in clients.values():
                assert await client.predict(1.0, model="second") == (200, [12.0])
            write_model(tmp_path, "second", (1, 2), parameters={"add": 20}, labels={"best": 2})
            await served.server.loads.load("second", None)
            for client in clients.values():
                assert await client.predict(1.0, model="second") == (200, [22.0])
            await served.server.loads.unload("first", False)
            for client in clients.values():
                status, text = await client.predict(1.0, model="first")
                assert status == 404, text
            assert [len(link._given) for link in served.links] == [1, 1]

    run(work())


def test_labels_alone_reach_every_front(tmp_path):
    write_model(tmp_path, "m", (1, 2), version_policy="all", labels={"best": 1})

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            client = (await connect_to_each(served, 2))[1]
            write_model(tmp_path, "m", (1, 2), version_policy="all", labels={"best": 2})
            await served.server.repository.load("m")
            target = "/v1/models/m/labels/best"

            async def says_two() -> bool:
                return b'"version": "2"' in (await client.get(target))[1]

            for _ in range(2000):
                if await says_two():
                    return
                await asyncio.sleep(0.005)
            raise AssertionError("the label never moved")

    run(work())


def test_a_load_is_answered_when_every_front_has_its_outcome(tmp_path):
    write_model(tmp_path, "m", (1, 2), version_policy="all", labels={"best": 1})

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            client = (await connect_to_each(served, 2))[1]
            write_model(tmp_path, "m", (1, 2), version_policy="all", labels={"best": 2})
            (link,) = served.links
            proc.stop(link.pid)
            loading = asyncio.ensure_future(served.server.loads.load("m", None))
            await served.until(lambda: link._waiting)
            assert not loading.done()
            os.kill(link.pid, signal.SIGCONT)
            await loading
            assert b'"version": "2"' in (await client.get("/v1/models/m/labels/best"))[1]

    run(work())


def test_a_killed_front_is_swept_and_replaced(tmp_path, caplog):
    write_model(tmp_path, max_batch_size=2)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            clients, others = await connect_to_each(served, 2), await connect_to_each(served, 2)
            running = asyncio.ensure_future(clients[0].predict(HOLD))
            await served.until(lambda: seen(tmp_path))
            clients[1].send(5.0)
            waiting = asyncio.ensure_future(others[0].predict(7.0))
            ring = next(iter(served.server.host.hosted.values())).queue.ring
            await served.until(lambda: ring.outstanding() >= 3)
            (link,) = served.links
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: link.pid not in (0, victim))
            release(tmp_path)
            assert await running == (200, [HOLD * 2])
            assert await waiting == (200, [14.0])
            await served.until(lambda: link._given and not link._waiting)
            again = await connect_to_each(served, 2)
            assert await again[1].predict(3.0) == (200, [6.0])
            told = [record.message for record in caplog.records if "front process" in record.message]
            assert told == ["front process 1 ended: killed by SIGKILL; another is started"]
            _, text = await again[0].get("/metrics")
            assert total(text, "fastserve_front_restarts_total") == 1

    run(work())


@pytest.mark.logs_errors
def test_a_front_whose_start_fails_unforeseen_is_started_again(tmp_path, monkeypatch, caplog):
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            (link,) = served.links
            victim, open_version, failures = link.pid, link._open_version, []

            async def no_descriptors(hosted) -> None:
                if not failures:
                    failures.append(link.pid)
                    raise OSError(errno.EMFILE, "Too many open files")
                await open_version(hosted)

            monkeypatch.setattr(link, "_open_version", no_descriptors)
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: failures)
            await served.until(lambda: link.pid not in (0, victim, *failures) and link._given)
            clients = await connect_to_each(served, 2)
            assert await clients[1].predict(3.0) == (200, [6.0])
            told = [record.message.split(":")[0] for record in caplog.records]
            assert told == ["front process 1 ended", "front process 1 could not be started"]

    run(work())
    caplog.clear()  # the traceback in it holds the server


def test_a_front_that_dies_while_a_version_opens_does_not_fail_the_load(tmp_path, caplog):
    write_model(tmp_path, "first")

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            (link,) = served.links
            victim = link.pid
            proc.stop(victim)
            write_model(tmp_path, "second")
            loading = asyncio.ensure_future(served.server.repository.load("second"))
            await served.until(lambda: link._waiting)
            os.kill(victim, signal.SIGKILL)
            await loading
            await served.until(lambda: link.pid not in (0, victim) and not link._waiting)
            clients = await connect_to_each(served, 2)
            for client in clients.values():
                assert await client.predict(1.0, model="second") == (200, [2.0])
            assert len([record for record in caplog.records if "front process" in record.message]) == 1

    run(work())


def test_any_front_loads_and_unloads_for_its_clients(tmp_path):
    write_model(tmp_path, "first")
    config = {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    long = "# " + "x" * 200_000 + "\n"  # more than one message of the control line
    files = {"file:1/model.py": base64.b64encode((TRITON_SOURCE + long).encode()).decode()}
    brought = json.dumps({"parameters": {"config": json.dumps(config), **files}}).encode()

    async def work() -> None:
        async with serving(tmp_path, frontends=2, load_models=()) as served:
            clients = await connect_to_each(served, 2)
            index = [json.loads((await c.post("/v2/repository/index"))[1]) for c in clients.values()]
            assert index == [[{"name": "first"}]] * 2
            for number in (1, 0, 1):
                asked, other = clients[number], clients[1 - number]
                assert await asked.post("/v2/repository/models/first/load") == (200, b"")
                assert await asked.predict(1.0, model="first") == (200, [2.0])
                assert await other.predict(1.0, model="first") == (200, [2.0])
                assert await asked.post("/v2/repository/models/first/unload") == (200, b"")
                assert (await asked.predict(1.0, model="first"))[0] == 404
            wrong = [await c.post("/v2/repository/models/none/load") for c in clients.values()]
            assert wrong[0] == wrong[1]
            assert wrong[0][0] == 500
            (tmp_path / "broken").mkdir()
            (tmp_path / "broken" / "model.yaml").write_text("backend: none")
            assert (await clients[1].post("/v2/repository/models/broken/load"))[0] in (400, 500)
            index = [json.loads((await c.post("/v2/repository/index"))[1]) for c in clients.values()]
            assert index[0] == index[1]
            assert "backend" in index[1][0]["reason"]
            assert await clients[1].post("/v2/repository/models/brought/load", brought) == (200, b"")
            for client in clients.values():
                assert await client.predict(1.0, model="brought") == (200, [3.0])

    run(work())


def change_something(catalog: Catalog, draw: random.Random) -> None:
    """Change one model as loads, clients and readiness do."""
    model = catalog.model(f"m{draw.randrange(20)}")
    kind = draw.randrange(6)
    if kind == 0 or not model.versions:
        catalog.put(Version(model.name, draw.randrange(3), Path(), ModelConfig(backend="onnx")))
    elif kind == 1:
        model.labels[draw.choice("ab")] = draw.randrange(3)
    elif kind == 2:
        catalog.blame(model, draw.choice([None, ServeError(Kind.INTERNAL, f"{draw.random()}")]))
    elif kind == 3 and len(catalog.models) > 1:
        catalog.remove(model.name)
    else:
        version = draw.choice(list(model.versions.values()))
        version.down, version.dormant = draw.choice(["", "stuck"]), draw.random() < 0.5
        model.on_demand = draw.random() < 0.5
        version.state = draw.choice([VersionState.LOADING, VersionState.AVAILABLE, VersionState.END])


def shown(catalog: Catalog) -> dict[str, Any]:
    """Return the models of a catalog's message, without the owner's ids."""
    models = catalog_message(catalog)["models"]
    for model in models.values():
        model["versions"] = [[row[0], *row[2:]] for row in model["versions"]]
    return models


def test_changed_models_make_the_catalog_that_all_of_them_make() -> None:
    draw, owner, follower = random.Random(7), Catalog(), Catalog()
    changes = CatalogChanges(owner)
    for step in range(500):
        for _ in range(draw.randrange(3)):
            change_something(owner, draw)
        if step == 250:  # a front that has started anew
            follower = Catalog()
            apply_catalog(follower, json.loads(msgspec.json.encode(catalog_message(owner))), {})
        message = changes.take()
        if message is not None:
            apply_catalog(follower, json.loads(msgspec.json.encode(message)), {})
        assert shown(follower) == shown(owner), step
        assert changes.take() is None
    name, other = list(owner.models)[:2]
    owner.models[name].on_demand = not owner.models[name].on_demand
    assert changes.take(other) is None
    assert list(changes.take(name, other)["models"]) == [name], "the others are not sent again"
