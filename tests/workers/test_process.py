"""One child process: its surroundings, its end in words, and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastserve.workers import process
from fastserve.workers.control import ControlFault
from fastserve.workers.process import WorkerProcess, explain_exit, worker_environment
from tests.workers.rig import run

# A child that speaks the control line by hand. `line` is its end.
PRELUDE = """
import json, os, select, signal, socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
def say(**message): line.send(json.dumps(message).encode())
"""


class Child:
    """A WorkerProcess around a few lines of Python, and what it told us."""

    def __init__(self, code: str, *, env: dict[str, str] | None = None) -> None:
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        entry: Sequence[str] = (sys.executable, "-c", PRELUDE + code)
        self.process = WorkerProcess(
            worker_environment(1, env or {}), self.heard.put_nowait, self.exit.set_result, entry=entry
        )
        self.process.spawn()

    async def word(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.heard.get(), 30)

    async def end(self) -> str:
        return await asyncio.wait_for(self.exit, 30)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "exit code 0"),
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"killed by signal {signal.SIGRTMIN + 1}"),
        (
            "os.write(line.fileno(), b'rubbish'); select.select([], [], [])",
            "killed: it sent a message that is",
        ),
        (
            "line.send(b'x' * 70000); select.select([], [], [])",
            "killed: it sent a message of more than 65536",
        ),
        ("line.close(); select.select([], [], [])", "killed: it closed its control line"),
    ],
)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_end_is_explained(code: str, words: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who exits hangs up first, and may take its time.
    monkeypatch.setattr(process, "HANGUP_GRACE_S", 0.3 if "line.close()" in code else 20)

    async def scenario() -> None:
        assert (await Child(code).end()).startswith(words)

    run(scenario(), loop)


def test_last_words_come_before_the_end() -> None:
    async def scenario() -> None:
        child = Child("say(op='failed'); say(op='again'); os._exit(1)")
        assert await child.end() == "exit code 1"
        assert [child.heard.get_nowait()["op"] for _ in range(2)] == ["failed", "again"]

    run(scenario())


def test_stop_asks_first() -> None:
    async def scenario() -> None:
        child = Child("say(op='up'); sys.exit(7 if json.loads(line.recv(100)) == {'op': 'stop'} else 1)")
        await child.word()
        await child.process.stop(30)
        assert await child.end() == "exit code 7"
        await child.process.stop(30)
        assert not child.process.running
        with pytest.raises(ControlFault):
            child.process.send({"op": "stop"})

    run(scenario())


def test_stop_kills_whoever_does_not_listen() -> None:
    async def scenario() -> None:
        child = Child("say(op='up'); select.select([], [], [])")
        await child.word()
        await child.process.stop(0.1)
        assert await child.end() == "killed: it did not stop within 0.1 s"

    run(scenario())


def test_a_cancelled_stop_still_ends_the_child() -> None:
    async def scenario() -> None:
        child = Child("say(op='up'); select.select([], [], [])")
        await child.word()
        stopping = asyncio.ensure_future(child.process.stop(60))
        await asyncio.sleep(0)
        stopping.cancel()
        assert await child.end() == "killed: nobody waits for it any more"
        assert stopping.cancelled()

    run(scenario())


def test_the_first_reason_to_kill_is_the_one_told() -> None:
    async def scenario() -> None:
        child = Child("select.select([], [], [])")
        child.process.kill("it ran too long")
        child.process.kill("again")
        assert await child.end() == "killed: it ran too long"
        child.process.kill("too late")

    run(scenario())


def test_the_child_holds_standard_streams_and_its_line_only() -> None:
    async def scenario() -> None:
        stray = os.memfd_create("stray")
        os.set_inheritable(stray, True)
        child = Child(
            "fds = {}\n"
            "for fd in os.listdir('/proc/self/fd'):\n"
            "    if os.path.islink('/proc/self/fd/' + fd): fds[fd] = os.readlink('/proc/self/fd/' + fd)\n"
            "say(op='fds', fds=fds, line=line.fileno(), leader=os.getpgid(0) == os.getpid())"
        )
        word = await child.word()
        await child.end()
        os.close(stray)
        held = {fd: target for fd, target in word["fds"].items() if not target.startswith("/proc/")}
        assert set(held) == {"0", "1", "2", str(word["line"])}
        assert held["0"] == "/dev/null"
        assert held["1"] == held["2"]
        assert word["leader"]

    run(scenario())


def test_what_the_child_leaves_behind_ends_with_it() -> None:
    async def scenario() -> None:
        child = Child(
            "import subprocess\n"
            "left = subprocess.Popen([sys.executable, '-c', 'import select; select.select([], [], [])'])\n"
            "say(op='left', pid=left.pid); line.recv(100); os._exit(0)"
        )
        pid = (await child.word())["pid"]
        pidfd = os.pidfd_open(pid)  # while it surely lives
        child.process.send({"op": "leave"})
        await child.end()
        gone = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
        await asyncio.wait_for(gone, 60)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    run(scenario())


def test_an_adopted_subprocess_is_reaped_with_a_later_child_at_the_latest() -> None:
    async def scenario() -> None:
        code = "import subprocess; say(op='left', pid=subprocess.Popen(['sleep', '600']).pid); line.recv(100)"
        process.ORPHANS.adopt()
        try:
            child = Child(code)
            orphan = (await child.word())["pid"]
            child.process.send({"op": "leave"})
            await child.end()
        finally:
            process.ORPHANS.leave()
        with contextlib.suppress(ChildProcessError):  # the kernel was quick, and it is reaped
            os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
        await Child("").end()
        assert not os.path.exists(f"/proc/{orphan}")

    run(scenario())


def test_the_environment_limits_threads_unless_the_model_says() -> None:
    environment = worker_environment(3, {"MKL_NUM_THREADS": "8", "HELLO": "there"})
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "3"
    assert (environment["MKL_NUM_THREADS"], environment["HELLO"]) == ("8", "there")

    assert worker_environment(0, {}).get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")

    async def scenario() -> None:
        child = Child("say(op='env', hello=os.environ['HELLO'])", env={"HELLO": "there"})
        assert (await child.word())["hello"] == "there"
        await child.end()

    run(scenario())


def test_a_machine_without_descriptors_fails_cleanly() -> None:
    """EMFILE at each step of spawn (hardening I6): an OSError, and nothing left."""

    async def scenario() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        fillers = [os.memfd_create("filler") for _ in range(64)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, hard))
        outcomes: list[str | None] = []
        while fillers and outcomes[-1:] != ["started"]:
            try:
                child = Child("")
            except OSError as error:
                outcomes.append(error.strerror)
            else:
                outcomes.append("started")
                await child.end()
            os.close(fillers.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
        assert outcomes == ["Too many open files"] * (len(outcomes) - 1) + ["started"]
        assert len(outcomes) > 4

    run(scenario())


OWNER = """
import asyncio, os, signal, sys
from fastserve.workers.process import WorkerProcess, worker_environment
async def own():
    child = WorkerProcess(worker_environment(1, {}), print, print, entry=sys.argv[1:] or {entry})
    child.spawn()
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(own())
"""


def test_a_worker_does_not_outlive_its_owner(tmp_path: Path) -> None:
    code = OWNER.replace("{entry}", repr(process.ENTRY))
    owner = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, text=True)
    assert owner.returncode == -signal.SIGKILL
    pid = int(owner.stdout)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    ended, _, _ = select.select([pidfd], [], [], 60)
    os.close(pidfd)
    assert ended


def test_exit_words() -> None:
    assert explain_exit(0) == "exit code 0"
    assert explain_exit(-11) == "killed by SIGSEGV"
