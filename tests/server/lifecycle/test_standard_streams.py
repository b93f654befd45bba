"""A server whose standard output and standard error cannot be written: closed, on a full disk, or a pipe that
nobody reads. It serves on, does not turn in circles, and ends with status 0 when it is told to."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time

import pytest

from tests import proc
from tests.running import until
from tests.server.lifecycle.test_opening import BODY, command, free_port
from tests.server.rig import SOURCE, write_model

TALKS = SOURCE.replace('        x = inputs["x"]', '        x = inputs["x"]; print("a line", flush=True)')
SPIN_S, SPENT_S = 0.5, 0.3


def spent_s(pid: int) -> float:
    """Processor time of a process and of those it has started."""
    told = filter(None, (proc.read(one, "stat") for one in (pid, *proc.children_of(pid))))
    fields = [text.rsplit(")", 1)[1].split() for text in told]
    ticks = sum(int(field[11]) + int(field[12]) for field in fields)
    return ticks / os.sysconf("SC_CLK_TCK")


def starts(how: str, words: list[str]) -> subprocess.Popen[bytes]:
    if how == "closed":
        return subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words])
    if how == "full":
        with open("/dev/full", "wb") as full:
            return subprocess.Popen(words, stdout=full, stderr=full)
    reads, writes = os.pipe()
    try:
        return subprocess.Popen(words, stdout=writes, stderr=writes)
    finally:
        os.close(reads)  # before the first line is written
        os.close(writes)


def predicts(port: int) -> bool:
    """Whether a ready server answers, on one connection: before that, its other fronts still start."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request("GET", "/healthz/ready")
        ready = link.getresponse()
        ready.read()
        link.request("POST", "/v1/models/twice:predict", BODY)
        right = b'{\n    "predictions": [[2.0, 4.0]\n    ]\n}'
        return link.getresponse().read() == right and ready.status == 200
    except OSError:
        return False
    finally:
        link.close()


@pytest.mark.parametrize(("how", "fronts"), [("closed", "1"), ("full", "1"), ("broken", "2")])
def test_it_serves_on(tmp_path, how, fronts):
    (write_model(tmp_path) / "1" / "model.py").write_text(TALKS)
    port = free_port()
    options = ("--grpc", "off", "--frontends", fronts, "--log-level", "debug", "--log-access")
    with starts(how, command(tmp_path, port, *options)) as server:
        try:
            every = range(20)  # connections: each front has some of them
            until(
                lambda: all(predicts(port) for _ in every) or server.poll() is not None,
                "every front serves",
            )
            assert all(predicts(port) for _ in every)
            before = spent_s(server.pid)
            time.sleep(SPIN_S)
            assert spent_s(server.pid) - before < SPENT_S
            if how == "closed":
                assert {os.readlink(f"/proc/{server.pid}/fd/{number}") for number in range(3)} == {
                    "/dev/null"
                }
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
