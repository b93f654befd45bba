"""An owner that is killed takes every process of its server with it, whatever they are in the middle of, and
another server can have the port and every connection to it."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastserve.workers.process import ENTRY
from tests import proc
from tests.running import Running, until
from tests.server.rig import write_model

SOON_S = 30.0  # they take some milliseconds
STUCK = """
import ctypes, pathlib, signal, threading

class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=threading.Event().wait).start()  # an interpreter would wait for it

    def run(self, inputs):
        if inputs["x"].any():
            (self.folder / "stuck").touch()
            ctypes.PyDLL(None).sleep(60)  # and the GIL is held
        return {"y": inputs["x"]}
"""
STUCK_LOADING = "import pathlib, time\npathlib.Path(__file__).with_name('loading').touch()\ntime.sleep(60)\n"


def all_end(handles: list[int]) -> None:
    left, end = set(handles), time.monotonic() + SOON_S
    while left:
        assert time.monotonic() < end, f"{len(left)} of {len(handles)} processes stay"
        left -= set(select.select(list(left), [], [], 0.1)[0])
    for handle in handles:
        os.close(handle)


def use_grpc(place: str) -> None:
    """From so many connections that every front gets some."""
    for number in range(24):
        options = [("grpc.use_local_subchannel_pool", 1), ("fastserve.test", number)]
        with grpc.insecure_channel(place, options=options) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)


def predict(place: str, model: str, row: float) -> bytes:
    """On a connection of its own."""
    link = http.client.HTTPConnection(place, timeout=60)
    link.request("POST", f"/v1/models/{model}:predict", json.dumps({"instances": [[row, row]]}))
    with link.getresponse() as reply:
        return reply.read()


def predict_in_vain(place: str) -> None:
    with pytest.raises(OSError):
        predict(place, "stuck", 1.0)


def test_fronts_and_workers_end_with_a_killed_owner_and_leave_its_ports(tmp_path):
    write_model(tmp_path, instances=2)
    (write_model(tmp_path, "stuck") / "1" / "model.py").write_text(STUCK)
    fronts = ("--frontends", "3")
    with Running(tmp_path, tmp_path / "log", *fronts) as first:
        use_grpc(first.grpc)
        hung = threading.Thread(target=predict_in_vain, args=(first.http,))
        hung.start()
        until((tmp_path / "stuck").exists, "the model is stuck")
        children = first.workers
        assert len(children) == 2 + 2 + 1
        handles = [os.pidfd_open(pid) for pid in children]
        proc.stop(children[-1])  # one that cannot hear anything
        first.kill()
        all_end(handles)
        hung.join(SOON_S)
        assert not hung.is_alive()
    places = {"http": first.http, "grpc": first.grpc}
    with Running(tmp_path, tmp_path / "log2", *fronts, **places) as second:
        assert (second.http, second.grpc) == (first.http, first.grpc)
        use_grpc(second.grpc)
        for _ in range(24):
            assert json.loads(predict(second.http, "twice", 2.0)) == {"predictions": [[4.0, 4.0]]}


def test_a_worker_whose_owner_is_killed_while_it_loads(tmp_path):
    (write_model(tmp_path) / "1" / "model.py").write_text(STUCK_LOADING)
    command = [sys.executable, "-m", "fastserve.cli", "serve", str(tmp_path), "--http", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--grpc", "off"], stderr=subprocess.DEVNULL) as owner:
        until((tmp_path / "twice" / "1" / "loading").exists, "the model loads", limit_s=30)
        handles = [os.pidfd_open(pid) for pid in proc.children_of(owner.pid)]
        assert len(handles) == 1
        owner.kill()
        all_end(handles)


@pytest.mark.parametrize("module", ["fastserve.workers.main", "fastserve.server.front_process"])
def test_a_child_that_is_born_after_its_owner_died_does_nothing(module):
    """The kernel's signal came before it was asked for: only the control line can tell, and what the owner
    has still said there is not acted on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.send(b'{"op": "no such thing"}')
        ours.close()
        command = [*ENTRY[:-1], module, str(theirs.fileno())]
        child = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, timeout=120, check=False
        )
        assert (child.returncode, child.stderr) == (0, b"")
        assert theirs.recv(100) == b'{"op": "no such thing"}'
