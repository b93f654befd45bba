"""A server whose model runs in remote workers: real processes, killed, paused, replaced, and shut out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.errors import ServeError
from fastserve.workers.remote.keys import write_keys
from tests.running import free_port
from tests.server.rig import HOLD, KILL_ONCE, Served, release, run, seen, serving, write_model
from tests.warm import with_torch
from tests.workers.remote.rig import CableLink, Machine, machine

BEAT_S = 0.6  # three are a busy machine's pause; a worker that is stopped is given up after them
LOST_S = 30.0  # for answers after a worker is lost: far below what TCP itself would wait


@contextlib.contextmanager
def placed(folder: Path, **config: Any) -> Iterator[Machine]:
    """A model whose workers are remote, and a machine for them."""
    listen = f"127.0.0.1:{free_port()}"
    remote = {"listen": listen, "heartbeat_s": BEAT_S, **config.pop("remote", {})}
    write_model(folder, placement={"remote": remote}, **config)
    with machine(listen, folder / "cache") as made:
        yield made


async def all_right(served: Served, count: int) -> None:
    """Every one of so many concurrent requests gets its own answer."""
    told = await asyncio.gather(*(served.ask(float(number)) for number in range(1, count + 1)))
    assert told == [(200, [2.0 * number]) for number in range(1, count + 1)]


@pytest.mark.parametrize("shape", [[2], [-1]], ids=["columns", "slabs"])
def test_requests_are_answered_by_remote_workers(tmp_path: Path, shape: list[int]) -> None:
    tensor = {"dtype": "float32", "shape": shape}
    with placed(tmp_path, instances=2, inputs={"x": tensor}, outputs={"y": tensor}) as workers:
        workers.start(2)

        async def work() -> None:
            async with serving(tmp_path) as served:
                await all_right(served, 50)
                assert await served.ask(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0) == (
                    200,
                    [2.0, 4, 6, 8, 10, 12, 14],
                )

        run(work())
    copies = list((tmp_path / "cache").glob("*/model.py"))
    assert [copy.read_text() for copy in copies] == [(tmp_path / "twice" / "1" / "model.py").read_text()]


@pytest.mark.logs_errors
@pytest.mark.parametrize("isolate", [True, False])
def test_a_batch_whose_worker_died_runs_once_more_unless_runs_have_effects(
    tmp_path: Path, isolate: bool
) -> None:
    with placed(tmp_path, instances=2, isolate_failures=isolate) as workers:
        workers.start(2)

        async def work() -> None:
            async with serving(tmp_path) as served:
                status, body = await served.ask(KILL_ONCE)
                if isolate:
                    assert (status, body) == (200, [2 * KILL_ONCE])
                    assert len(seen(tmp_path)) == 2
                else:
                    assert status == 503
                    assert "died" in str(body)
                    assert len(seen(tmp_path)) == 1
                await all_right(served, 10)

        run(work())


@pytest.mark.logs_errors
def test_workers_are_killed_under_load_and_nothing_is_wrong(tmp_path: Path) -> None:
    with placed(tmp_path, instances=3) as workers:
        started = workers.start(3)

        async def work() -> None:
            async with serving(tmp_path) as served:
                loads = [asyncio.ensure_future(all_right(served, 100)) for _ in range(3)]
                for worker in started[:2]:
                    before = len(seen(tmp_path))
                    await served.until(lambda before=before: len(seen(tmp_path)) > before + 5)
                    worker.signal(signal.SIGKILL)
                    workers.await_end(worker)
                    workers.start()
                await asyncio.gather(*loads)

        run(work())


@pytest.mark.logs_errors
def test_what_a_paused_worker_had_runs_elsewhere_and_its_late_answer_counts_for_nothing(
    tmp_path: Path,
) -> None:
    with placed(tmp_path, instances=2, max_batch_size=1) as workers:
        one, two = workers.start(2)

        async def work() -> None:
            async with serving(tmp_path) as served:
                held = served.asking(HOLD)
                await served.until(lambda: len(seen(tmp_path)) == 1)
                before = {pid: _processor_time(pid) for pid in (one.pid, two.pid)}
                await served.until(lambda: any(_processor_time(pid) > before[pid] + 2 for pid in before))
                busy = max((one, two), key=lambda worker: _processor_time(worker.pid) - before[worker.pid])
                busy.signal(signal.SIGSTOP)
                await served.until(lambda: len(seen(tmp_path)) == 2)  # the other has it now
                release(tmp_path)
                assert await held == (200, [2 * HOLD])
                busy.signal(signal.SIGCONT)
                await all_right(served, 20)
                assert len(workers._workers) == 2

        run(work())


@pytest.mark.logs_errors
@pytest.mark.parametrize("how", ["stalls", "is cut"])
def test_what_is_beyond_a_link_that_breaks_runs_elsewhere_and_the_worker_comes_back(
    tmp_path: Path, how: str
) -> None:
    """Each end lives on, and only where the link is cut does TCP say anything."""
    with placed(tmp_path, instances=2, max_batch_size=1) as workers:

        async def work() -> None:
            async with CableLink(workers.listen) as link, _far(link.address, tmp_path) as far:
                (near,) = workers.start()
                far.start()
                async with serving(tmp_path) as served:
                    loads = [asyncio.ensure_future(all_right(served, 150)) for _ in range(2)]
                    await served.until(lambda: len(seen(tmp_path)) > 10)
                    link.flowing.clear()
                    if how == "is cut":
                        link.cut()
                    await asyncio.gather(*loads)
                    broken_s = time.monotonic()
                    await all_right(served, 20)  # with requests that the far worker may have had
                    assert time.monotonic() - broken_s < LOST_S
                    await until_connected(served, 1)
                    link.flowing.set()
                    await until_connected(served, 2)
                    near.signal(signal.SIGKILL)
                    workers.await_end(near)
                    await all_right(served, 20)

        run(work())


@contextlib.asynccontextmanager
async def _far(listen: str, folder: Path) -> AsyncIterator[Machine]:
    with machine(listen, folder / "far") as made:
        yield made


async def until_connected(served: Served, count: int) -> None:
    """Wait until so many remote workers serve."""
    client = await served.client()
    line = f'fastserve_remote_workers{{model="twice",node="{socket.gethostname()}",version="1"}} {count}.0'
    async with asyncio.timeout(60):
        while line not in (await client.get("/metrics"))[1].decode():
            await asyncio.sleep(0.05)
    client.close()


def _processor_time(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.logs_errors
def test_without_its_last_worker_requests_wait_for_the_next(tmp_path: Path) -> None:
    with placed(tmp_path) as workers:
        (only,) = workers.start()

        async def work() -> None:
            async with serving(tmp_path) as served:
                await all_right(served, 3)
                only.signal(signal.SIGKILL)
                workers.await_end(only)
                await served.until(lambda: not served.server.front.readiness.ready)
                asked = served.asking(5.0)
                workers.start()
                assert await asked == (200, [10.0])
                await served.until(lambda: served.server.front.readiness.ready)

        run(work())


@pytest.mark.logs_errors
def test_a_batch_that_hangs_fails_and_its_process_ends(tmp_path: Path) -> None:
    with placed(tmp_path, instances=2, max_batch_size=1, run_timeout_ms=1000) as workers:
        started = workers.start(2)

        async def work() -> None:
            async with serving(tmp_path) as served:
                status, body = await served.ask(HOLD)
                assert status == 504
                assert "run_timeout_ms 1000" in str(body)
                assert len(seen(tmp_path)) == 1
                await all_right(served, 10)
                ended: list[str] = []
                await served.until(lambda: any(_is_over(worker.pid) for worker in started))
                hung = next(worker for worker in started if _is_over(worker.pid))
                ended.append(workers.await_end(hung))
                assert ended == ["killed by SIGALRM"]

        run(work())


def _is_over(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_worker_keeps_its_model_when_the_server_begins_anew(tmp_path: Path) -> None:
    with placed(tmp_path) as workers:
        (only,) = workers.start()

        async def work() -> None:
            for _ in range(2):
                async with serving(tmp_path) as served:
                    await all_right(served, 3)

        run(work())
        assert os.path.exists(f"/proc/{only.pid}")


@pytest.mark.logs_errors
def test_a_model_that_cannot_be_loaded_there_says_why(tmp_path: Path) -> None:
    with placed(tmp_path) as workers:
        (tmp_path / "twice" / "1" / "model.py").write_text("raise RuntimeError('no weights')")
        workers.start()

        async def work() -> None:
            with pytest.raises(ServeError, match="RuntimeError: no weights"):
                async with serving(tmp_path):
                    pytest.fail("it serves")

        run(work())


STRINGS = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"y": inputs["x"] * 2}
"""


async def v2(served: Served, model: str, datatype: str, shape: list[int], data: list[Any]) -> list[Any]:
    """The first output of one request of V2."""
    client = await served.client()
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "data": data}
    status, body = await client.post(f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
    client.close()
    assert status == 200, body
    found: list[Any] = json.loads(body)["outputs"][0]["data"]
    return found


def test_each_backend_runs_remotely_as_it_does_here(tmp_path: Path) -> None:
    """Strings, and models of ONNX Runtime and PyTorch, beside the same models in a local worker."""
    torch_models = pytest.importorskip("tests.backends.frameworks.torch_models")
    pytest.importorskip("onnx")
    from tests.backends import models

    def write(root: Path, name: str, **config: Any) -> None:
        folder = root / name
        folder.mkdir(parents=True)
        text = {"dtype": "bytes", "shape": [1]}
        if name == "strings":
            (folder / "1").mkdir()
            (folder / "1" / "model.py").write_text(STRINGS)
            config |= {"backend": "python", "inputs": {"x": text}, "outputs": {"y": text}}
        elif name == "onnx":
            models.affine(folder).parent.joinpath("1").rename(folder / "1")
            config |= {"backend": "onnx"}
        else:
            torch_models.save_script(root, torch_models.net(), name)
            config |= torch_models.CONFIG
        (folder / "model.yaml").write_text(yaml.safe_dump({"max_batch_size": 8, **config}))

    async def answers(folder: Path) -> list[Any]:
        async with serving(folder) as served:
            rows = [[float(number + column) for column in range(4)] for number in range(3)]
            flat = [number for row in rows for number in row]
            three = [number for row in rows for number in row[:3]]
            return [
                await v2(served, "strings", "BYTES", [3, 1], ["a", "\u00e9\u4e00", ""]),
                await v2(served, "onnx", "FP32", [3, 3], three),
                await v2(served, "torch", "FP32", [3, 4], flat),
            ]

    here, there = tmp_path / "here", tmp_path / "there"
    with with_torch(), contextlib.ExitStack() as stack:
        for name in ("strings", "onnx", "torch"):
            write(here, name)
            listen = f"127.0.0.1:{free_port()}"
            write(there, name, placement={"remote": {"listen": listen, "heartbeat_s": BEAT_S}})
            stack.enter_context(machine(listen, tmp_path / "cache")).start()
        found: list[list[Any]] = []
        for folder in (here, there):
            run(_kept(answers(folder), found))
    assert found[0] == found[1]
    assert found[1][0] == ["aa", "\u00e9\u4e00" * 2, ""]
    assert found[1][1] == [2.0 * (row + column) + 1 for row in range(3) for column in range(3)]


async def _kept(asked: Coroutine[Any, Any, list[Any]], found: list[list[Any]]) -> None:
    found.append(await asked)


def test_only_workers_with_the_key_serve(tmp_path: Path) -> None:
    server, worker = write_keys(tmp_path / "keys")
    _, other = write_keys(tmp_path / "others")
    with placed(tmp_path, remote={"key": str(server)}) as plain:
        listen = plain.listen
        with (
            machine(listen, tmp_path / "c", other) as strangers,
            machine(listen, tmp_path / "c", worker) as own,
        ):
            strangers.start()
            plain.start()

            async def work() -> None:
                opening = asyncio.ensure_future(_serve_once(tmp_path))
                await asyncio.sleep(0)
                own.start()
                await opening

            run(work())


async def _serve_once(folder: Path) -> None:
    async with serving(folder) as served:
        await all_right(served, 5)


def test_no_front_imports_zmq_or_ray(tmp_path: Path) -> None:
    with placed(tmp_path) as workers:
        workers.start()
        code = (
            "import sys; from fastserve.cli import main; import atexit;"
            "atexit.register(lambda: print('imported', [n for n in ('zmq', 'ray') if n in sys.modules]));"
            f"main(['serve', {str(tmp_path)!r}, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'])"
        )
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline().startswith("fastserve is ready")
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=60)
        assert "imported []" in out
