"""The worker's entry as it runs in life: signals, name, log lines, sockets, and what it never loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.errors import RemoteTrace, ServeError
from tests import proc
from tests.workers.rig import PLAIN, Watched, run, write_model

SAYS = """
import logging, sys
print("to stdout")
print("to stderr", file=sys.stderr)
logging.getLogger("model").warning("100% ready")
"""


def test_signals_meant_for_the_owner_do_not_stop_a_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN)) as watched:
            await watched.group.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(watched.group.pids[0], number)
            assert await watched.arena.ask(0) == "{'y': [[1.0, 1.0]]}"

    run(scenario())


def test_a_worker_is_named_after_its_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN)) as watched:
            await watched.group.start()
            assert proc.name_of(watched.group.pids[0]) == "fs:demo/1#0"

    run(scenario())


def test_what_a_model_says_goes_to_stderr_with_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, SAYS + PLAIN)) as watched:
            await watched.group.start()

    run(scenario())
    out, err = capfd.readouterr()
    assert out == ""
    assert "to stdout\n" in err
    assert "to stderr\n" in err
    assert "WARNING model: 100% ready worker=demo/1#0\n" in err


def test_a_failed_load_tells_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, "def helper(): raise OSError('x')\nhelper()")) as watched:
            with pytest.raises(ServeError, match="OSError: x") as caught:
                await watched.group.start()
        assert isinstance(caught.value.__cause__, RemoteTrace)
        assert "in helper" in str(caught.value.__cause__)

    run(scenario())
    assert capfd.readouterr().err == ""  # the owner logs it, once


def sockets(pid: int) -> int:
    """How many sockets a process holds, its standard streams apart."""
    fds = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]
    return sum(os.readlink(fd).startswith("socket:") for fd in fds)


def test_a_worker_holds_no_socket_but_its_line(tmp_path: Path) -> None:
    """Hardening I2; the second socket is the fake arena's."""

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN)) as watched:
            await watched.group.start()
            assert sockets(watched.group.pids[0]) == 2

    run(scenario())


def test_a_models_subprocess_does_not_hold_the_line(tmp_path: Path) -> None:
    source = """
        import subprocess, sys
        class Model:
            def __init__(self, config): pass
            def run(self, inputs):
                import numpy as np
                code = "import os; print(sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(3, 64)))"
                count = int(subprocess.check_output([sys.executable, "-c", code], close_fds=False))
                return {"y": np.full((1, 2), count, np.float32)}
    """

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source)) as watched:
            await watched.group.start()
            assert await watched.arena.ask(0) == "{'y': [[0.0, 0.0]]}"

    run(scenario())


def test_a_large_config_arrives(tmp_path: Path) -> None:
    source = """
        import numpy as np
        class Model:
            def __init__(self, config): self.count = len(config["parameters"]["labels"])
            def run(self, inputs): return {"y": np.full((1, 2), self.count, np.float32)}
    """
    labels = [f"label {n}" for n in range(50_000)]

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source), parameters={"labels": labels}) as watched:
            await watched.group.start()
            assert await watched.arena.ask(0) == "{'y': [[50000.0, 50000.0]]}"

    run(scenario())


def test_env_and_threads_reach_the_model(tmp_path: Path) -> None:
    source = (
        """
import os
assert os.environ["HELLO"] == "there"
assert os.environ["OMP_NUM_THREADS"] == "2"
assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    """
        + PLAIN
    )

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source), env={"HELLO": "there"}, threads=2) as watched:
            await watched.group.start()

    run(scenario())


@pytest.mark.parametrize("said", [b"", b'{"op": "stop"}', b'{"op": "what"}'])
def test_an_owner_with_nothing_to_load_gets_a_quiet_exit(said: bytes) -> None:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if said:
            ours.send(said)
        worker = subprocess.Popen(
            [sys.executable, "-m", "fastserve.workers.main", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.shutdown(socket.SHUT_WR)
        assert worker.wait(120) == 0


# Runs in an interpreter of its own: an audit hook cannot be taken off again.
AUDITED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.workers.rig import Watched, run

seen = []
armed = False
bad = {"exec", "compile", "marshal.loads", "pickle.find_class", "os.fork", "os.forkpty"}
def hook(event, arguments):
    if armed and event in bad:
        seen.append(event)
sys.addaudithook(hook)

async def scenario():
    global armed
    async with Watched(Path(sys.argv[1]), instances=2) as watched:
        await watched.group.start()
        await watched.arena.ask(0)
        armed = True
        os.kill(watched.group.pids[0], signal.SIGKILL)
        await watched.until(lambda: bool(watched.waits))
        watched.retry()
        await watched.until(lambda: watched.group.alive == 2)
        await watched.arena.ask(0)
        await watched.group.stop(5)
        armed = False
run(scenario())
print(seen, "numpy" in sys.modules)
"""


def test_the_owner_neither_executes_nor_unpickles_nor_forks_nor_knows_numpy(tmp_path: Path) -> None:
    """Hardening I1, R11, through a death and a restart."""
    folder = write_model(tmp_path, PLAIN)
    arguments = [sys.executable, "-c", AUDITED, str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[] False"


def test_a_worker_loads_nothing_that_only_its_owner_uses() -> None:
    """Each of these would be a good part of the time that it takes to start."""
    code = (
        "import sys, fastserve.backends.frameworks.python\n"
        "import fastserve.workers.runners, fastserve.workers.loop, fastserve.workers.main\n"
        "print({'asyncio', 'ssl', 'yaml', 'grpc', 'google.protobuf', 'fastserve.engine'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
