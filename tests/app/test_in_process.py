"""Models in the server's own process: same answers, a breakpoint that works, and an end in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserve.errors import ServeError
from fastserve.workers import in_process
from tests.app.apps import ColdApp, write_app
from tests.running import until

pytestmark = pytest.mark.waits

APP = """
    import os
    import threading
    import time

    BEGAN_NS = time.monotonic_ns()  # the script is run once by each worker


    @fastserve.model
    def whoami(name: str) -> dict:
        return {"name": name, "pid": os.getpid(), "thread": threading.current_thread().name}


    @fastserve.model(batch=64, max_queue_delay_us=500, instances=2)
    def scale(x: fastserve.Array["float32", 4]) -> fastserve.Array["float32", 4]:
        return x * 3


    @fastserve.model
    def count(to: int):
        for number in range(to):
            yield number


    @fastserve.model(uses=[scale, whoami])
    async def asks(x: list[float]):
        return (await fastserve.remote(scale)(x)).tolist(), await fastserve.remote(whoami)("Bob")


    @fastserve.model(run_timeout_ms=20)
    def waits(s: float):
        threading.Event().wait(s)
        return BEGAN_NS


    @fastserve.model
    def fails(how: str):
        if how == "exit":
            raise SystemExit(3)
        raise ValueError("no")


    @fastserve.model
    def hangs(mark: str):
        open(mark, "w").close()
        threading.Event().wait()
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdApp]:
    folder = tmp_path_factory.mktemp("in_process")
    with ColdApp(write_app(folder, APP), folder / "log", "--in-process", "--drain-s", "0") as server:
        yield server


def test_models_are_threads_of_the_server(app: ColdApp) -> None:
    said = app.ask("/whoami", {"name": "Ann"})
    assert said == {"name": "Ann", "pid": app.pid, "thread": "whoami/1#0"}
    assert app.workers == []


def test_answers_are_those_of_worker_processes(app: ColdApp) -> None:
    assert app.ask("/scale", {"x": [[1, 2, 3, 4], [0, 0, 0, 1]]}) == [[3, 6, 9, 12], [0, 0, 0, 3]]
    assert app.post("/count", {"to": 2})[2] == b"0\n1\n"
    assert app.refusal("/fails", {"how": "value"}) == (500, "ValueError: no")


def test_a_run_has_no_limit(app: ColdApp) -> None:
    first = app.ask("/waits", {"s": 0.2})  # a process is ended within 70 ms
    assert app.ask("/waits", {"s": 0}) == first


def test_models_call_one_another(app: ColdApp) -> None:
    row, said = app.ask("/asks", {"x": [1, 2, 3, 4]})
    assert (row, said["name"], said["pid"]) == ([3, 6, 9, 12], "Bob", app.pid)


def test_a_model_that_exits_ends_its_thread_alone(app: ColdApp) -> None:
    assert app.refusal("/fails", {"how": "exit"})[0] == 503
    assert app.refusal("/fails", {"how": "value"}) == (500, "ValueError: no")  # a thread has come
    assert app.ask("/whoami", {"name": "Ann"})["pid"] == app.pid


def test_a_run_that_hangs_does_not_keep_the_server(tmp_path: Path) -> None:
    options = ("--in-process", "--drain-s", "0", "--load-model", "hangs")
    with ColdApp(write_app(tmp_path, APP), tmp_path / "log", *options) as server:
        mark = tmp_path / "mark"

        def ask() -> None:
            with pytest.raises(OSError):
                server.post("/hangs", {"mark": str(mark)})

        asking = threading.Thread(target=ask)
        asking.start()
        until(mark.exists, "it runs")
    asking.join()
    assert "hangs/1#0, in the server's process, is left to itself" in server.log.read_text()


def test_a_breakpoint_has_the_terminal(tmp_path: Path) -> None:
    text = """
        @fastserve.model
        def greet(name: str):
            breakpoint()
            return f"Hello {name}"

        fastserve.serve(in_process=True, http="127.0.0.1:0", grpc="off", drain_delay_s=0)
        print("after")
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(write_app(tmp_path, text))]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        address = re.findall(r"http://(\S+)", process.stdout.readline().decode())[0]
        assert b"Models run in this process" in process.stdout.readline()
        app = ColdApp(tmp_path, tmp_path)
        app.http = address
        process.stdin.write(b"name = 'Bob'\ncontinue\n")
        process.stdin.flush()
        assert app.ask("/greet", {"name": "Ann"}) == "Hello Bob"
        process.terminate()
        assert process.stdout.read().endswith(b"after\n")
        assert process.wait(60) == 0


def test_one_process_sees_one_choice_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_applied", {})
    monkeypatch.setattr(os, "environ", {"HOME": "/"})
    in_process.apply_environment("a", {"HOME": "/", "CUDA_VISIBLE_DEVICES": "0", "SOME": "1"})
    in_process.apply_environment("b", {"CUDA_VISIBLE_DEVICES": "0", "SOME": "2"})
    assert os.environ == {"HOME": "/", "CUDA_VISIBLE_DEVICES": "0", "SOME": "1"}
    with pytest.raises(ServeError, match="in_process"):
        in_process.apply_environment("c", {"CUDA_VISIBLE_DEVICES": "1"})
