"""`python -m bench.instructions`: its clients, its order of events, and what it reads of callgrind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import instructions
from bench.instructions import Cost, Http1Connection, Http2Connection, Row, WrongAnswer
from bench.load import servers
from bench.load.servers import Server

ROOT = Path(__file__).resolve().parents[1]
# Two functions, each named once and then by number; `main` calls `work` for 70, which is not its own.
DUMP = """events: Ir
fn=(1) main
10 5
calls=2 20
12 70
+1 3
fn=(2) work
20 60
* 10
fn=(1)
14 2
totals: 80
"""


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with servers.listening_model("tiny", sorted(os.sched_getaffinity(0))) as server:
        servers.wait_ready(server, lambda: servers.healthy(server))
        yield server


@pytest.mark.parametrize(
    "name", ["tiny", "v2-tinybin", "v1-tiny", "grpc-tiny-8", "tfs-grpc-tiny", "h2-streams"]
)
def test_a_connection_asks_again_and_again(tiny: Server, name: str) -> None:
    row = instructions.make_rows()[name]
    before, streams = servers.count_answers(tiny), row.together[1]
    client = (Http2Connection if row.http2 else Http1Connection)(tiny.port, row, streams)
    for _ in range(3):
        client.send()
        while client.more():
            pass
        client.receive()
    client.close()
    answered, failed = servers.count_answers(tiny)
    assert (answered - before[0], failed - before[1]) == (3 * streams, 0)


@pytest.mark.parametrize(
    ("kind", "path"),
    [(Http1Connection, "/v1/models/none:predict"), (Http2Connection, "/v1/models/none:predict"),
     (Http2Connection, "/inference.GRPCInferenceService/ModelInfer")],
)  # fmt: skip
def test_a_wrong_answer_ends_the_run(tiny: Server, kind: type[Http1Connection], path: str) -> None:
    grpc = path.startswith("/inference")
    body = instructions.framed(b"") if grpc else b'{"instances": [1]}'
    client = kind(tiny.port, Row(path, body, "application/grpc" if grpc else "application/json"), 1)
    client.send()
    with pytest.raises(WrongAnswer):
        client.receive()
    client.close()


def test_functions_have_what_they_cost_themselves() -> None:
    assert instructions.read_functions(DUMP) == {"main": 10, "work": 70}


def test_a_line_has_the_ratio_of_new_to_old() -> None:
    costs = [Cost(1000.0, 4.0, {}), Cost(1030.4, 4.25, {})]
    assert instructions.cells_of(("tiny", 32), costs) == [
        "tiny",
        "32",
        "1,000",
        "1,030",
        "1.030",
        "4.0",
        "4.2",
    ]
    assert instructions.cells_of(("tiny", 1), costs[:1]) == ["tiny", "1", "1,000", "4.0"]


def test_functions_that_differ_most_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = Cost(0, 0, {"a": 10, "b": 500, "c": 7}), Cost(0, 0, {"a": 310, "b": 500, "d": 20})
    instructions.print_functions(("tiny", 1), [old, new], 2)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split() for line in lines] == [["10", "310", "+300", "a"], ["0", "20", "+20", "d"]]


def test_a_state_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            instructions.wait_for_state(process.pid, "S")
            process.send_signal(signal.SIGSTOP)
            instructions.wait_for_state(process.pid, "T")
            monkeypatch.setattr(instructions, "LIMIT_S", 0.01)
            with pytest.raises(RuntimeError, match=r"is in states \{'T'\}, not S"):
                instructions.wait_for_state(process.pid, "S")
        finally:
            process.kill()


@pytest.mark.torture
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_a_checkout_costs_what_it_costs() -> None:
    """The same one twice."""
    command = [sys.executable, "-m", "bench.instructions", "--old", sys.executable, "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    ratios = re.findall(r"^\| tiny .*\| (\d\.\d{3}) \|", done.stdout, re.MULTILINE)
    assert len(ratios) == 2, done.stdout + done.stderr
    assert all(0.95 < float(ratio) < 1.05 for ratio in ratios)
