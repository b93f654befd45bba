"""Groups of real worker processes: started, killed in every way, restarted, stopped; nothing left over."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.workers.group import Backoff, WorkerState
from tests import proc
from tests.workers.rig import PLAIN, FakeArena, Watched, run, write_model


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_group_starts_runs_and_stops(tmp_path: Path, loop: str) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN), instances=2) as watched:
            await watched.group.start()
            assert watched.group.alive == 2
            assert watched.group.inputs["x"].shape == (2,)
            assert watched.group.outputs["y"].dtype.name == "float32"
            assert await watched.arena.ask(0) == await watched.arena.ask(1) == "{'y': [[1.0, 1.0]]}"
            await watched.group.stop(5)
            assert watched.group.alive == 0
            assert watched.events == []
            await watched.group.stop(5)

    run(scenario(), loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_warms_up_is_not_told_what_is_for_those_at_work(tmp_path: Path, loop: str) -> None:
    """It would hear of it when it is warm, perhaps minutes later. What it has said counts before the loop
    comes by: it may be in its first batch."""

    async def scenario() -> None:
        arena = FakeArena(warms_up_until="rung")
        async with Watched(write_model(tmp_path, PLAIN), arena=arena) as watched:
            starting = asyncio.ensure_future(watched.group.start())
            worker = watched.group._instances[0]
            while worker.state is not WorkerState.ATTACHING:
                await asyncio.sleep(0.005)
            assert not watched.group.notify_attached(0, {"op": "close_lent"})
            arena.ring(0)
            line = select.poll()
            line.register(worker._process._control.fileno(), select.POLLIN)  # type: ignore[union-attr]
            assert line.poll(30_000), "it has said that it is ready"
            assert worker.state is WorkerState.ATTACHING
            assert watched.group.notify_attached(0, {"op": "close_lent"})
            assert watched.group.alive == 1
            await starting
            assert watched.events == []

    run(scenario(), loop)


def test_a_worker_that_reads_no_device_memory_any_more_is_not_ready(tmp_path: Path) -> None:
    """It would answer requests whose rows lie there with what its columns hold."""

    async def scenario() -> None:
        folder = write_model(tmp_path, PLAIN)
        fickle = {"backend": "tests.workers.fake_worker:Fickle", "device": "cuda:0"}
        async with Watched(folder, **fickle) as watched:
            await watched.group.start()
            assert watched.group.on_device
            (folder / "no device").touch()
            os.kill(watched.group.pids[0], signal.SIGKILL)
            watched.retry()
            await watched.until(lambda: len(watched.waits) == 2)
            assert watched.group.trouble == "its batches do not go over the device any more"
            (folder / "no device").unlink()
            watched.retry()
            await watched.until(lambda: watched.group.alive == 1)

    run(scenario())


def fails(source: str, tmp_path: Path, **config: object) -> ServeError:
    """The error that starting this model ends in."""
    errors = []

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source), **config) as watched:
            with pytest.raises(ServeError) as caught:
                await watched.group.start()
            errors.append(caught.value)
            assert watched.group.alive == 0
            assert watched.group.pids == [0] * len(watched.group.pids)
            assert watched.events == []

    run(scenario())
    return errors[0]


DIED = "worker 0 died while it was loading: "
BROKEN = {
    "raise": (
        "raise RuntimeError('no weights in /srv/secret/w.bin')",
        "RuntimeError: no weights in w.bin",
    ),
    "os._exit": ("import os; os._exit(3)", DIED + "exit code 3"),
    "sys.exit": ("import sys; sys.exit(4)", "the model called exit(4)"),
    "segfault": (
        "import ctypes; ctypes.string_at(0)",
        DIED + "killed by SIGSEGV",
    ),
    "kill -9": (
        "import os; os.kill(os.getpid(), 9)",
        DIED + "killed by SIGKILL",
    ),
    "syntax": ("def :", "SyntaxError: invalid syntax (model.py, line 1)"),
    "no class": ("x = 1", "model.py has no class 'Model'"),
    "import": ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_load_that_breaks_says_why(tmp_path: Path, case: str) -> None:
    source, words = BROKEN[case]
    assert fails(source, tmp_path).message == words


def test_a_huge_error_text_is_cut(tmp_path: Path) -> None:
    message = fails("raise RuntimeError('x' * 10_000_000)", tmp_path).message
    assert message.startswith("RuntimeError: xxx")
    assert len(message) <= 2048


def test_the_models_own_kind_of_error_is_kept(tmp_path: Path) -> None:
    source = "from fastserve.errors import *\nraise ServeError(Kind.RESOURCE_EXHAUSTED, 'out of GPU memory')"
    error = fails(source, tmp_path)
    assert (error.kind, error.message) == (Kind.RESOURCE_EXHAUSTED, "out of GPU memory")


def test_a_load_that_hangs_is_bounded(tmp_path: Path) -> None:
    error = fails("import threading; threading.Event().wait()", tmp_path, load_timeout_s=0.5)
    assert error.kind is Kind.DEADLINE_EXCEEDED
    assert error.message == "worker 0 was still loading after 0.5 s (load_timeout_s)"


def test_one_broken_instance_fails_all(tmp_path: Path) -> None:
    source = """
        class Model:
            def __init__(self, config):
                if config["instance"] == 2:
                    raise RuntimeError("no third device")
            def run(self, inputs): ...
    """
    assert fails(source, tmp_path, instances=3).message == "RuntimeError: no third device"


def test_a_failed_warm_up_fails_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        arena = FakeArena(fail_warm_up=True)
        async with Watched(write_model(tmp_path, PLAIN), arena=arena) as watched:
            with pytest.raises(ServeError, match="ValueError: warm-up refused"):
                await watched.group.start()

    run(scenario())


def test_an_arena_that_cannot_be_made_fails_the_start(tmp_path: Path) -> None:
    class NoArena(FakeArena):
        def make(self, inputs: object, outputs: object) -> FakeArena:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, "no memory for the arena")

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN), arena=NoArena(), instances=2) as watched:
            with pytest.raises(ServeError, match="no memory for the arena"):
                await watched.group.start()
            assert watched.group.pids == [0, 0]

    run(scenario())


def test_no_memory_for_the_arena_fails_the_start(tmp_path: Path) -> None:
    class NoArena(FakeArena):
        def make(self, inputs: object, outputs: object) -> FakeArena:
            raise OSError(28, "No space left on device")

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN), arena=NoArena()) as watched:
            with pytest.raises(ServeError, match="no shared memory for its batches: No space left") as caught:
                await watched.group.start()
            assert caught.value.kind is Kind.RESOURCE_EXHAUSTED

    run(scenario())


def test_a_restart_that_cannot_attach_is_tried_again(tmp_path: Path) -> None:
    class Flaky(FakeArena):
        calls = 0

        def fds_for_worker(self, worker: int) -> tuple[dict[str, object], list[int]]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("not now")
            return super().fds_for_worker(worker)

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN), arena=Flaky()) as watched:
            await watched.group.start()
            os.kill(watched.group.pids[0], signal.SIGKILL)
            await watched.until(lambda: len(watched.waits) == 1)
            watched.retry()
            await watched.until(lambda: len(watched.waits) == 2)
            assert watched.group.trouble == "RuntimeError: not now"
            watched.retry()
            await watched.until(lambda: watched.group.alive == 1)

    run(scenario())


def test_a_worker_killed_after_it_loaded_fails_the_start(tmp_path: Path) -> None:
    class Murderous(FakeArena):
        def fds_for_worker(self, worker: int) -> tuple[dict[str, object], list[int]]:
            os.kill(watched.group.pids[0], signal.SIGKILL)
            return super().fds_for_worker(worker)

    watched: Watched

    async def scenario() -> None:
        nonlocal watched
        async with Watched(write_model(tmp_path, PLAIN), arena=Murderous()) as watched:
            with pytest.raises(ServeError, match="worker 0 died while it was warming up: killed by SIGKILL"):
                await watched.group.start()

    run(scenario())


DEADLY = {
    "segfault": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    "os._exit": ("import os; os._exit(3)", "exit code 3"),
    "raise": ("raise SystemExit(5)", "killed: the model called exit(5)"),
}


@pytest.mark.parametrize("case", DEADLY)
def test_a_death_while_running_is_reported_and_healed(tmp_path: Path, case: str) -> None:
    code, words = DEADLY[case]
    source = f"""
        class Model:
            def __init__(self, config): pass
            def run(self, inputs): {code}
    """

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source), instances=2) as watched:
            await watched.group.start()
            watched.arena.ring(1)
            await watched.until(lambda: bool(watched.waits))
            assert watched.events == [("death", 1)]
            assert watched.group.alive == 1
            assert watched.group.trouble == f"worker 1 died: {words}"
            watched.retry()
            await watched.until(lambda: watched.events[-1] == ("alive", 1))
            assert (watched.group.alive, watched.group.restarts, watched.group.trouble) == (2, 1, "")

    run(scenario())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_kill_storm_ends_with_every_worker_back(tmp_path: Path, loop: str) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN), instances=2) as watched:
            await watched.group.start()
            for round_ in range(3):
                for pid in watched.group.pids:
                    os.kill(pid, signal.SIGKILL)
                await watched.until(lambda n=round_: len(watched.waits) == 2 * n + 2)
                assert watched.group.alive == 0
                watched.retry()
                watched.retry()
                await watched.until(lambda: watched.group.alive == 2)
                assert await watched.arena.ask(0) == "{'y': [[1.0, 1.0]]}"
            assert watched.events.count(("death", 0)) == watched.events.count(("alive", 0)) == 3

    run(scenario(), loop)


def test_the_watchdog_ends_a_hung_run(tmp_path: Path) -> None:
    source = """
        import threading
        class Model:
            def __init__(self, config): pass
            def run(self, inputs): threading.Event().wait()
    """

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source)) as watched:
            await watched.group.start()
            watched.arena.ring(0)
            watched.group.kill(0, "a batch ran longer than run_timeout_ms")
            await watched.until(lambda: bool(watched.waits))
            assert watched.group.trouble == "worker 0 died: killed: a batch ran longer than run_timeout_ms"

    run(scenario())


def test_a_worker_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    source = """
        import threading
        class Model:
            def __init__(self, config): pass
            def run(self, inputs): ...
            def close(self): threading.Event().wait()
    """

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source)) as watched:
            await watched.group.start()
            await watched.group.stop(0.2)
            assert watched.group.pids == [0]

    run(scenario())


def test_a_stopped_process_is_ended_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN)) as watched:
            await watched.group.start()
            proc.stop(watched.group.pids[0])
            await watched.group.stop(0.1)

    run(scenario())


def test_stop_during_start(tmp_path: Path) -> None:
    model = write_model(tmp_path, "import threading; threading.Event().wait()")

    async def scenario() -> None:
        async with Watched(model, instances=2) as watched:
            starting = asyncio.ensure_future(watched.group.start())
            await asyncio.sleep(0)
            await asyncio.gather(watched.group.stop(1), watched.group.stop(1))
            with pytest.raises(ServeError, match="unloaded while it was loading"):
                await starting

    run(scenario())


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path, "import threading; threading.Event().wait()")

    async def scenario() -> None:
        async with Watched(model, instances=2) as watched:
            starting = asyncio.ensure_future(watched.group.start())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert watched.group.pids == [0, 0]

    run(scenario())


def test_stop_during_a_back_off_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN)) as watched:
            await watched.group.start()
            os.kill(watched.group.pids[0], signal.SIGKILL)
            await watched.until(lambda: bool(watched.waits))
            await watched.group.stop(1)
            assert watched.events == [("death", 0)]

    run(scenario())


def test_stop_in_the_very_turn_of_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Watched(write_model(tmp_path, PLAIN)) as watched:
            await watched.group.start()
            alive = asyncio.Event()
            watched.group._on_alive = lambda worker: alive.set()
            os.kill(watched.group.pids[0], signal.SIGKILL)
            watched.retry()
            await alive.wait()
            await asyncio.wait_for(watched.group.stop(5), 60)

    run(scenario())


@pytest.mark.lingers  # the loop ends with the group's tasks on it: that is the case tried here
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_group_can_be_abandoned_after_its_loop(tmp_path: Path, loop: str) -> None:
    left: list[Watched] = []

    async def scenario() -> None:
        left.append(Watched(write_model(tmp_path, PLAIN), instances=2))
        await left[0].group.start()

    run(scenario(), loop)
    (watched,) = left
    assert watched.group.alive == 2
    pids = watched.group.pids
    watched.group.abandon()
    watched.group.abandon()
    watched.arena.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert (watched.group.alive, watched.group.pids, watched.events) == (0, [0, 0], [])


def test_restarts_back_off_and_forgive(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    model = write_model(tmp_path, f"import os\nassert not os.path.exists({str(flag)!r}), 'still broken'\n")
    with (model / "model.py").open("a") as file:
        file.write("class Model:\n    def __init__(self, config): pass\n    def run(self, inputs): ...\n")

    async def scenario() -> None:
        async with Watched(model, restart_backoff_s=0.2, restart_backoff_max_s=1) as watched:
            await watched.group.start()
            flag.touch()
            os.kill(watched.group.pids[0], signal.SIGKILL)
            for tries in (1, 2, 3):
                await watched.until(lambda n=tries: len(watched.waits) == n)
                watched.retry()
            await watched.until(lambda: len(watched.waits) == 4)
            assert watched.group.trouble == "AssertionError: still broken"
            assert watched.waits == [0.2, 0.2, 0.4, 0.8], "one death, and starts that failed"
            flag.unlink()
            watched.retry()
            await watched.until(lambda: watched.group.alive == 1)
            watched.now += 61
            os.kill(watched.group.pids[0], signal.SIGKILL)
            await watched.until(lambda: len(watched.waits) == 5)
            assert watched.waits[-1] == 0.2

    run(scenario())


def test_back_off_is_capped() -> None:
    backoff = Backoff()
    assert [backoff.after_failure() for _ in range(12)][-2:] == [30.0, 30.0]
    backoff.after_death(1)
    assert backoff.after_failure() == 0.1, "it was ready in between"
    assert backoff.after_death(60) == 0.1


def test_starts_that_were_killed_are_not_the_models_fault() -> None:
    backoff = Backoff()
    waits = [backoff.after_kill() for _ in range(20)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert waits[4:] == [1.0] * 16
    assert backoff.after_failure() == 0.1


@pytest.mark.logs_errors
def test_a_worker_that_is_killed_while_it_loads_is_started_again_as_one_that_died(tmp_path: Path) -> None:
    source = PLAIN.replace(
        "def __init__(self, config): pass",
        "def __init__(self, config):\n"
        "        import os, signal\n"
        f"        if os.path.exists({str(tmp_path / 'kill')!r}): os.kill(os.getpid(), signal.SIGKILL)",
    )

    async def scenario() -> None:
        async with Watched(write_model(tmp_path, source)) as watched:
            await watched.group.start()
            (tmp_path / "kill").touch()
            os.kill(watched.group.pids[0], signal.SIGKILL)
            for number in range(1, 8):
                await watched.until(lambda n=number: len(watched.waits) == n)
                watched.retry()
            await watched.until(lambda: len(watched.waits) == 8)
            assert watched.waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
            (tmp_path / "kill").unlink()
            watched.retry()
            await watched.until(lambda: watched.group.alive == 1)

    run(scenario())


def test_deaths_at_work_cost_no_more_than_a_second() -> None:
    """The eighth cost 13 s: the wait for starts that fail was the wait for every death."""
    backoff = Backoff()
    waits = [backoff.after_death(1) for _ in range(20)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert waits[4:] == [1.0] * 16
