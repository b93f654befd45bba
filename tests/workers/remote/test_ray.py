"""Remote workers that a real Ray places: a cluster of three nodes on this machine, and real servers (`make
test-ray`)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError, ServeError
from fastserve.repository.check import explain
from fastserve.settings import Settings
from tests import proc
from tests.running import until
from tests.server.rig import KILL_ONCE, Served, run, seen, serving, write_model
from tests.workers.remote.cluster import RayNodes

pytest.importorskip("ray")
SHARE = 0.1  # of a CPU: nodes have one each
ENDED_S = 20.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head, and two nodes that have resources of names of their own."""
    with RayNodes() as made:
        made.add("one", one=4)
        made.add("two", two=4)
        yield made


def placed(folder: Path, instances: Any = 1, **ray: Any) -> None:
    """Write a model whose workers Ray places, on node one unless it is asked for others."""
    ray.setdefault("resources", {"one": 1})
    config = ray.pop("config", {})
    placement = {"ray": {"num_cpus": SHARE, "heartbeat_s": 0.5, **ray}}
    write_model(folder, instances=instances, placement=placement, **config)


async def all_right(served: Served, count: int) -> None:
    """Every one of so many concurrent requests gets its own answer."""
    told = await asyncio.gather(*(served.ask(float(number)) for number in range(1, count + 1)))
    assert told == [(200, [2.0 * number]) for number in range(1, count + 1)]


def workers() -> list[int]:
    """Remote workers of this machine that Ray has placed."""
    found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    remote = (pid for pid in found if proc.name_of(pid) == "fs:remote")
    return sorted(pid for pid in remote if re.search(r'"place":[1-9]', proc.read(pid, "cmdline")))


def actor_of(worker: int) -> int:
    return int(proc.read(worker, "stat").rpartition(")")[2].split()[1])


def await_no_workers() -> None:
    until(lambda: not workers(), "all remote workers have ended", ENDED_S)


async def metrics(served: Served) -> str:
    client = await served.client()
    _, page = await client.get("/metrics")
    client.close()
    return page.decode()


def on(node: str, count: int) -> str:
    return f'fastserve_remote_workers{{model="twice",node="{node}",version="1"}} {count}.0'


async def until_shown(served: Served, *lines: str) -> None:
    async with asyncio.timeout(60):
        page = ""
        while not all(line in page for line in lines):
            await asyncio.sleep(0.1)
            page = await metrics(served)


@pytest.mark.logs_errors
def test_workers_die_and_are_placed_again_and_every_answer_is_right(tmp_path: Path, nodes: RayNodes) -> None:
    """Of two workers the model kills one at work, a test kills the other, and the actor of a third."""
    placed(tmp_path, 2)

    async def work() -> None:
        async with serving(tmp_path, ray=nodes.address) as served:
            await all_right(served, 50)
            assert len(workers()) == 2
            assert await served.ask(KILL_ONCE) == (200, [2 * KILL_ONCE])
            assert len(seen(tmp_path)[-1]) == 1
            two = on("one", 2)
            await until_shown(served, two, 'fastserve_remote_workers_wanted{model="twice",version="1"} 2.0')
            load = asyncio.ensure_future(all_right(served, 200))
            os.kill(workers()[0], signal.SIGKILL)
            await load
            await served.until(lambda: len(workers()) == 2)
            worker = workers()[1]
            os.kill(actor_of(worker), signal.SIGKILL)
            await served.until(lambda: worker not in workers())  # it has ended with its actor
            await served.until(lambda: len(workers()) == 2)
            await until_shown(served, two)
            await all_right(served, 50)

    run(work())
    await_no_workers()


@pytest.mark.logs_errors
def test_a_node_that_is_lost_is_a_workers_death_and_another_node_is_found(
    tmp_path: Path, nodes: RayNodes
) -> None:
    nodes.add("three", two=4)
    placed(tmp_path, 2, resources={"two": 3}, config={"max_batch_size": 1})

    async def work() -> None:
        async with serving(tmp_path, ray=nodes.address) as served:
            await until_shown(served, on("two", 1), on("three", 1))
            loads = [asyncio.ensure_future(all_right(served, 100)) for _ in range(2)]
            await served.until(lambda: len(seen(tmp_path)) > 5)
            await asyncio.to_thread(nodes.remove, "three")
            await asyncio.gather(*loads)
            await until_shown(served, on("two", 1), on("three", 0))
            await all_right(served, 20)
            await asyncio.to_thread(nodes.add, "four", two=4)  # where the lost one finds a place
            await until_shown(served, on("two", 1), on("four", 1))
            await all_right(served, 20)
        await asyncio.to_thread(nodes.remove, "four")

    run(work())
    await_no_workers()


def test_more_workers_come_with_load_and_go_without(tmp_path: Path, nodes: RayNodes) -> None:
    placed(
        tmp_path,
        {"min": 1, "max": 3},
        queue_target_s=0.05,
        down_after_s=0.5,
        config={"max_batch_size": 1},
    )

    async def work() -> None:
        async with serving(tmp_path, ray=nodes.address) as served:
            stop = asyncio.Event()

            async def drive(number: int) -> None:
                while not stop.is_set():
                    assert await served.ask(float(number)) == (200, [2.0 * number])

            load = [asyncio.ensure_future(drive(number)) for number in range(1, 13)]
            await until_shown(served, on("one", 3))
            stop.set()
            await asyncio.gather(*load)
            await until_shown(served, on("one", 1))
            await served.until(lambda: len(workers()) == 1)
            await all_right(served, 10)

    (tmp_path / "twice" / "1" / "model.py").write_text(
        "import time\n"
        "class Model:\n"
        "    def __init__(self, config): pass\n"
        "    def run(self, inputs):\n"
        "        time.sleep(0.02)\n"
        "        return {'y': inputs['x'] * 2}\n"
    )
    run(work())
    await_no_workers()


def test_an_unload_and_a_reload_remove_the_actors(tmp_path: Path, nodes: RayNodes) -> None:
    placed(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, ray=nodes.address) as served:
            first = workers()
            assert len(first) == 1
            client = await served.client()
            status, _ = await client.post("/v2/repository/models/twice/unload")
            assert status == 200
            await served.until(lambda: not workers())
            status, _ = await client.post("/v2/repository/models/twice/load")
            assert status == 200
            assert len(workers()) == 1
            assert workers() != first
            await all_right(served, 5)

    run(work())
    await_no_workers()


@pytest.mark.logs_errors
def test_a_model_that_cannot_be_loaded_there_says_why(tmp_path: Path, nodes: RayNodes) -> None:
    placed(tmp_path)
    (tmp_path / "twice" / "1" / "model.py").write_text("raise RuntimeError('no weights')")

    async def work() -> None:
        with pytest.raises(ServeError, match="RuntimeError: no weights"):
            async with serving(tmp_path, ray=nodes.address):
                pytest.fail("it serves")

    run(work())
    await_no_workers()


@pytest.mark.logs_errors
def test_a_placement_that_fits_nowhere_says_so(tmp_path: Path, nodes: RayNodes) -> None:
    placed(tmp_path, resources={"moon": 1}, config={"load_timeout_s": 12.0})

    async def work() -> None:
        with pytest.raises(ServeError, match=r"no node of the cluster has .*1 moon: .*one has .*4 one"):
            async with serving(tmp_path, ray=nodes.address):
                pytest.fail("it serves")

    run(work())
    write_model(tmp_path, "many", instances=2, placement={"ray": {"num_cpus": 0, "resources": {"one": 3}}})
    write_model(tmp_path, "fits", instances=2, placement={"ray": {"num_cpus": 0, "resources": {"two": 2}}})
    report = explain(Settings(repository=str(tmp_path)), nodes.address)
    found = {model.name: model.problems for model in report.models}
    assert found["fits"] == []
    assert found["many"] == ["2 workers of 3 one are wanted, and the cluster has room for 1"]
    assert found["twice"][0].startswith("no node of the cluster has 0.1 CPU, 1 moon: ")


@pytest.mark.logs_errors
def test_workers_end_when_the_server_is_killed(tmp_path: Path, nodes: RayNodes) -> None:
    """Also one that is in a batch, and one that has been stopped: none of them can end by itself."""
    placed(tmp_path, 2, config={"max_batch_size": 1})
    code = (
        "import sys; from fastserve.cli import main; import threading, time\n"
        "def tell():\n"
        "    sys.stdin.readline(); print([n for n in ('zmq', 'ray') if n in sys.modules], flush=True)\n"
        "threading.Thread(target=tell, daemon=True).start()\n"
        f"main(['serve', {str(tmp_path)!r}, '--ray', {nodes.address!r}, '--http', '127.0.0.1:0',"
        " '--grpc', 'off'])"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdin is not None
        line = server.stdout.readline()
        assert line.startswith("fastserve is ready"), line
        until(lambda: len(workers()) == 2, "two workers")
        server.stdin.write("now\n")
        server.stdin.flush()
        while not (told := server.stdout.readline()).startswith("["):
            assert told
        assert told == "[]\n"  # the server imports neither
        proc.stop(workers()[0])
    finally:
        server.kill()
        server.communicate(timeout=60)
    await_no_workers()


@pytest.mark.logs_errors
def test_the_placers_death_is_its_workers_and_it_is_started_again(tmp_path: Path, nodes: RayNodes) -> None:
    placed(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, ray=nodes.address) as served:
            await all_right(served, 5)
            before, placer = workers(), served.server.placer
            assert placer is not None
            os.kill(placer.pid, signal.SIGKILL)
            await served.until(lambda: not set(workers()) & set(before))
            await served.until(lambda: served.server.front.readiness.ready and len(workers()) == 1)
            await all_right(served, 5)

    run(work())
    await_no_workers()


def raylet_of(nodes: RayNodes, name: str) -> int:
    found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    commands = {pid: proc.read(pid, "cmdline").split("\0") for pid in found}
    (pid,) = [
        pid
        for pid, words in commands.items()
        if words[0].endswith("/raylet")
        and {f"--node-name={name}", f"--gcs-address={nodes.address}"} <= {*words}
    ]
    return pid


@pytest.mark.logs_errors
def test_workers_serve_on_when_the_servers_own_node_of_ray_dies_and_others_take_their_place(
    tmp_path: Path, nodes: RayNodes
) -> None:
    """Ray ends its driver's workers 15 s after it has missed the node; until then, others are there."""
    placed(tmp_path, 2)

    async def work() -> None:
        async with serving(tmp_path, ray=nodes.address) as served:
            await all_right(served, 5)
            before, placer = workers(), served.server.placer
            assert placer is not None
            pid, stop = placer.pid, asyncio.Event()

            async def drive(number: float) -> None:
                while not stop.is_set():
                    assert await served.ask(number) == (200, [2 * number])
                    await asyncio.sleep(0.05)

            load = [asyncio.ensure_future(drive(float(number))) for number in range(1, 5)]
            os.kill(raylet_of(nodes, "head"), signal.SIGKILL)
            await served.until(lambda: placer.pid not in (0, pid))
            async with asyncio.timeout(90):
                while set(workers()) & set(before) or len(workers()) < 2 or os.path.exists(f"/proc/{pid}"):
                    await asyncio.sleep(0.1)
            await all_right(served, 20)
            stop.set()
            await asyncio.gather(*load)

    run(work())
    await_no_workers()


@pytest.mark.logs_errors
def test_a_cluster_that_is_not_there_says_so(tmp_path: Path) -> None:
    placed(tmp_path)

    async def work(ray: str, words: str) -> None:
        with pytest.raises((ServeError, ConfigError), match=words):
            async with serving(tmp_path, ray=ray):
                pytest.fail("it serves")

    run(work("127.0.0.1:9", r"Ray \(127\.0\.0\.1:9\) cannot be used"))
    run(work("", "allowed: with --ray"))
