"""Workers that are forked from one process: real processes, whose fork server imports little."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ServeError
from fastserve.workers import forked_worker
from fastserve.workers.forked_worker import (
    IMPORTING,
    NUMPY,
    TORCH,
    ForkServer,
    ForkServers,
    may_fork,
    needed_imports,
)
from fastserve.workers.process import (
    ORPHANS,
    THREAD_VARIABLES,
    WorkerProcess,
    kill_group,
    worker_environment,
)
from tests import proc
from tests.workers.rig import FAKE_ENTRY, PLAIN, Watched, run, write_model

ENTRY = (sys.executable, "-m", "tests.workers.fake_fork_server")
LATE_S = 0.3  # longer than the load of a small model takes
# What a worker finds itself in, told by a load that fails; no folders, which are cut from what is told.
SURROUNDINGS = """
import os, signal, sys, threading
raise RuntimeError("|".join([
    *(os.environ.get(name, "-") for name in ("OMP_NUM_THREADS", "COLOUR", "HF_HUB_OFFLINE")),
    str(os.getsid(0) == os.getpid()), str(os.readlink("/proc/self/fd/0").endswith("null")),
    str(threading.active_count()), open("/proc/self/comm").read().strip(),
    str(len(os.listdir("/proc/self/fd")) - 1), str(os.path.basename(sys.argv[0]).endswith(".py")),
]))
"""


@pytest.fixture(autouse=True)
def forks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_worker, "needed_imports", lambda *given, **on_demand: TORCH)


@contextlib.asynccontextmanager
async def fork_servers(**options: Any) -> AsyncIterator[ForkServers]:
    servers = ForkServers(ENTRY, **options)
    yield servers
    await servers.close()
    assert not servers._servers


def parent(pid: int) -> int:
    return int(proc.read(pid, "stat").rpartition(")")[2].split()[1])


def only_server(servers: ForkServers) -> Any:
    (server,) = servers._servers.values()
    return server


async def until(true: Callable[[], object]) -> None:
    async def look() -> None:
        while not true():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), 60)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_workers_of_two_models_come_from_one_import_and_leave_nothing(tmp_path: Path, loop: str) -> None:
    async def scenario() -> None:
        async with fork_servers() as servers:
            folders = [write_model(tmp_path, PLAIN, name) for name in ("a", "b")]
            async with Watched(folders[0], forks=servers) as one:
                async with Watched(folders[1], forks=servers, threads=3) as other:
                    await asyncio.gather(one.group.start(), other.group.start())
                    server = only_server(servers).process.pid
                    pids = [*one.group.pids, *other.group.pids]
                    assert [parent(pid) for pid in (*pids, server)] == [os.getpid()] * 3
                    assert await one.arena.ask(0) == await other.arena.ask(0) == "{'y': [[1.0, 1.0]]}"
                assert await one.arena.ask(0) == "{'y': [[1.0, 1.0]]}"  # the other has left
                assert not Path(f"/proc/{pids[1]}").exists()  # and is reaped
                assert proc.children_of(server) == []
            assert (one.events, other.events) == ([], [])
        assert not Path(f"/proc/{server}").exists()

    run(scenario(), loop)


def test_a_forked_worker_finds_what_a_spawned_one_does(tmp_path: Path, monkeypatch: Any) -> None:
    told: list[list[str]] = []

    async def scenario() -> None:
        folder = write_model(tmp_path, SURROUNDINGS, "seen")
        async with fork_servers() as servers:
            for forks in (servers, None):
                async with Watched(folder, forks=forks, threads=3, env={"COLOUR": "red"}) as watched:
                    with pytest.raises(ServeError) as caught:
                        await watched.group.start()
                told.append(caught.value.message.split("|"))

    run(scenario())
    assert told[0] == told[1]
    assert told[0][:2] == ["RuntimeError: 3", "red"]


def test_a_killed_worker_is_forked_again_without_another_import(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fork_servers() as servers, Watched(write_model(tmp_path, PLAIN), forks=servers) as one:
            await one.group.start()
            server = only_server(servers).process.pid
            os.kill(one.group.pids[0], signal.SIGSEGV)
            await one.until(lambda: len(one.waits) == 1)
            assert one.group.trouble == "worker 0 died: killed by SIGSEGV"
            assert not one.group._instances[0].killed_outside
            assert not proc.children_of(server)
            one.retry()
            await one.until(lambda: one.group.alive == 1)
            assert only_server(servers).process.pid == server
            os.kill(one.group.pids[0], signal.SIGKILL)
            await one.until(lambda: len(one.waits) == 2)
            assert one.group._instances[0].killed_outside
            assert one.events == [("death", 0), ("alive", 0), ("death", 0)]

    run(scenario())


def test_workers_outlive_a_killed_fork_server_and_another_forks_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        folder = write_model(tmp_path, PLAIN)
        async with fork_servers() as servers, Watched(folder, forks=servers, instances=2) as both:
            await both.group.start()
            server, pids = only_server(servers), both.group.pids
            os.kill(server.process.pid, signal.SIGKILL)
            await until(lambda: not server.process.running)
            assert (both.group.pids, both.group.alive, both.events) == (pids, 2, [])
            assert await both.arena.ask(0) == "{'y': [[1.0, 1.0]]}"
            os.kill(pids[0], signal.SIGKILL)
            await both.until(lambda: len(both.waits) == 1)
            assert both.group._instances[0].killed_outside
            both.retry()
            await both.until(lambda: both.group.alive == 2)
            assert only_server(servers).process.pid != server.process.pid
            assert both.group.pids[1] == pids[1]
            assert [parent(pid) for pid in both.group.pids] == [os.getpid()] * 2

    run(scenario())
    assert caplog.text.count("the fork server died, its workers go on") == 1


def test_this_process_adopts_orphans_only_while_it_waits_for_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = forked_worker.ORPHANS.adopt

    def adopts() -> bool:
        found = ctypes.c_int()
        ctypes.CDLL(None).prctl(37, ctypes.byref(found), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
        return bool(found.value)

    async def scenario() -> None:
        async with fork_servers() as servers, Watched(write_model(tmp_path, PLAIN), forks=servers) as one:
            await one.group.start()
            assert not adopts()

    def adopt() -> None:
        real()
        seen.append(adopts())

    monkeypatch.setattr(forked_worker.ORPHANS, "adopt", adopt)
    run(scenario())
    assert seen == [True]
    assert not adopts()


def test_adopted_subprocesses_of_a_dead_worker_are_reaped() -> None:
    code = "import subprocess; start = lambda: subprocess.Popen(['sleep', '600']).pid\n"
    code += "print(start(), start(), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ORPHANS.adopt()
    try:
        with subprocess.Popen([sys.executable, "-c", code], **pipes, start_new_session=True) as worker:
            assert worker.stdout is not None
            orphans = [int(pid) for pid in worker.stdout.readline().split()]
            worker.kill()
        assert [parent(orphan) for orphan in orphans] == [os.getpid()] * 2
    finally:
        ORPHANS.leave()
    ORPHANS.reap(worker.pid)  # they live: a later call is to find them
    kill_group(worker.pid)
    for orphan in orphans:
        os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    ORPHANS.reap(orphans[0])  # no group: what is remembered is found
    assert not any(os.path.exists(f"/proc/{orphan}") for orphan in orphans)
    assert not ORPHANS._groups, "their numbers may be taken by others now"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("a thread", "RuntimeError: it has 2 threads after the imports"),
        ("no such module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("dies", "exit code 3"),
        ("hangs", "killed: it did not answer"),
    ],
)
def test_a_fork_server_that_does_not_start_leaves_it_to_spawns(
    tmp_path: Path, wrong: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = WorkerProcess.__init__
    monkeypatch.setattr(WorkerProcess, "__init__", lambda *given, entry=FAKE_ENTRY: real(*given, entry=entry))
    if wrong == "hangs":
        monkeypatch.setattr(forked_worker, "START_S", 0.5)

    async def scenario() -> None:
        folder = write_model(tmp_path, PLAIN)
        env = {"FAKE_FORKS": wrong}
        async with fork_servers() as servers, Watched(folder, forks=servers, instances=2, env=env) as both:
            await both.group.start()
            assert [parent(pid) for pid in both.group.pids] == [os.getpid()] * 2
            assert await both.arena.ask(0) == "{'y': [[1.0, 1.0]]}"

    run(scenario())
    assert caplog.text.count("workers are spawned instead") == 1
    assert words in caplog.text


def test_a_fork_that_the_system_refuses_is_a_load_that_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder, env = write_model(tmp_path, PLAIN), {"FAKE_FORKS": "no processes"}
        async with fork_servers() as servers, Watched(folder, forks=servers, env=env) as watched:
            with pytest.raises(ServeError, match=r"it could not be forked: .*temporarily unavailable"):
                await watched.group.start()

    run(scenario())


def test_a_load_is_given_up_while_the_fork_server_imports(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder, env = write_model(tmp_path, PLAIN), {"FAKE_FORKS": "hangs"}
        async with fork_servers() as servers, Watched(folder, forks=servers, env=env) as watched:
            starting = asyncio.ensure_future(watched.group.start())
            await until(lambda: watched.group.waits_for)
            assert (watched.group.waits_for, watched.group.pids) == (IMPORTING.format(TORCH), [0])
            await watched.group.stop(1)
            with pytest.raises(ServeError, match="unloaded while it was loading"):
                await starting

    run(scenario())


def test_a_stopped_fork_server_is_ended_when_it_owes_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_worker, "ANSWER_S", 0.5)

    async def scenario() -> None:
        async with fork_servers() as servers, Watched(write_model(tmp_path, PLAIN), forks=servers) as one:
            await one.group.start()
            before = only_server(servers).process.pid
            proc.stop(before)
            os.kill(one.group.pids[0], signal.SIGKILL)
            await one.until(lambda: len(one.waits) == 1)
            one.retry()
            await one.until(lambda: len(one.waits) == 2)
            assert "its fork server died: killed: it did not answer" in one.group.trouble
            one.retry()
            await one.until(lambda: one.group.alive == 1)
            assert only_server(servers).process.pid != before

    run(scenario())


def test_a_worker_that_is_ready_has_a_process_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own line may be read before that of the fork server, which told of it sooner."""
    hear = ForkServer._hear

    def hear_late(server: ForkServer, message: dict[str, Any]) -> None:
        if message["op"] == "forked":
            asyncio.get_running_loop().call_later(LATE_S, hear, server, message)
        else:
            hear(server, message)

    monkeypatch.setattr(ForkServer, "_hear", hear_late)

    async def scenario() -> None:
        async with fork_servers() as servers, Watched(write_model(tmp_path, PLAIN), forks=servers) as one:
            await one.group.start()
            (pid,) = one.group.pids
            assert parent(pid) == os.getpid()
            os.kill(pid, signal.SIGKILL)
            await one.until(lambda: len(one.waits) == 1)
            one.retry()
            await one.until(lambda: one.group.alive == 1)
            assert 0 != one.group.pids[0] != pid

    run(scenario())


OWNER = """
import asyncio, os, sys
from pathlib import Path
from fastserve.workers import forked_worker
from fastserve.workers.forked_worker import ForkServers
from tests.workers.rig import Watched
from tests.workers.test_forked_worker import ENTRY

async def main():
    forked_worker.needed_imports = lambda *given, **on_demand: "numpy"
    servers = ForkServers(ENTRY)
    watched = Watched(Path(sys.argv[1]), forks=servers, instances=2)
    await watched.group.start()
    print(*watched.group.pids, *(one.process.pid for one in servers._servers.values()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_owner_leaves_no_fork_server_and_no_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(write_model(tmp_path, PLAIN))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(handles) == 3
        owner.kill()
        asyncio.run(all_end(handles))


async def all_end(handles: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for handle in handles:
        end = loop.create_future()
        loop.add_reader(handle, lambda end=end: end.done() or end.set_result(None))
        await asyncio.wait_for(end, 30)
        loop.remove_reader(handle)
        os.close(handle)


@pytest.mark.parametrize(
    ("config", "env", "may"),
    [
        ({"backend": "text"}, {}, True),
        ({"backend": "text", "threads": 4, "device": "cpu"}, {"COLOUR": "red"}, True),
        ({"backend": "text", "device": "cuda:0"}, {}, False),
        ({"backend": "text", "threads": 0}, {}, False),
        ({"backend": "text"}, {"OMP_NUM_THREADS": "4"}, False),
        ({"backend": "text_python"}, {}, False),
        ({"backend": "torch"}, {}, False),
    ],
)
def test_which_workers_fork(config: dict[str, Any], env: dict[str, str], may: bool) -> None:
    assert may_fork(config, worker_environment(config.get("threads", 1), env)) is may


def test_one_environment_is_one_fork_server_whatever_its_threads() -> None:
    parts = [forked_worker._shared_part(TORCH, worker_environment(threads, {})) for threads in (1, 4)]
    assert parts[0] == parts[1]
    assert dict(parts[0][1])[THREAD_VARIABLES[0]] == "1"
    assert forked_worker._shared_part(TORCH, worker_environment(1, {"COLOUR": "red"})) != parts[0]


@pytest.mark.parametrize(
    ("config", "imports"),
    [
        ({"backend": "text"}, TORCH),
        ({"backend": "python"}, NUMPY),
        ({"backend": "onnx", "threads": 2}, ""),
        ({"backend": "python", "env": {"COLOUR": "red"}}, ""),
    ],
)
def test_which_workers_fork_where_models_load_on_demand(config: dict[str, Any], imports: str) -> None:
    environment = worker_environment(config.get("threads", 1), config.get("env", {}))
    assert needed_imports(config, environment, on_demand=True) == imports
    assert needed_imports(config, environment, on_demand=False) == (imports if imports == TORCH else "")


def test_where_models_load_on_demand_a_fork_server_stays_without_models(tmp_path: Path) -> None:
    async def scenario() -> None:
        folders = [write_model(tmp_path, PLAIN, name) for name in ("a", "b", "other")]
        async with fork_servers(on_demand=True) as servers:
            pids = []
            for folder, env in zip(folders, ({}, {}, {"COLOUR": "red"}), strict=True):
                async with Watched(folder, forks=servers, env=env) as one:
                    await one.group.start()
                    pids += [server.process.pid for server in servers._servers.values()]
                    assert await one.arena.ask(0) == "{'y': [[1.0, 1.0]]}"
            assert pids[0] == pids[1] == pids[2] != pids[3]
            assert only_server(servers).process.pid == pids[3]  # of each kind the last one
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    run(scenario())
