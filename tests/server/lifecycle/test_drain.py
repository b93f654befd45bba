"""A server that is told to stop: nothing that was sent to it is lost, whoever sends and however much."""

from __future__ import annotations

import asyncio
import http.client
import signal
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastserve.net.listener import QUIET_S
from tests.running import Running, until
from tests.server.lifecycle.drains import Load
from tests.server.rig import run, write_model

HTTP_CLIENTS, GRPC_CLIENTS = 12, 4


def drain_under_load(folder: Path, fronts: int, *options: str) -> list[str]:
    """One server from start to end, kept busy; it must end by itself. What was sent and not answered."""

    async def work() -> None:
        load = Load(server.http, server.grpc)
        clients = asyncio.ensure_future(load.run(HTTP_CLIENTS, GRPC_CLIENTS))
        while load.answered["http"] < 100 or load.answered["grpc"] < 20:
            assert not load.lost  # who is refused by a broken server would go on for ever
            assert not clients.done()
            await asyncio.sleep(0.01)
        server.signal(signal.SIGTERM)
        await clients
        lost.extend(load.lost)

    lost: list[str] = []
    with Running(folder, folder / "log", "--frontends", str(fronts), *options) as server:
        run(work())
        server.wait(120)
    assert " ERROR " not in server.log.read_text()
    return lost


@pytest.mark.parametrize(("fronts", "times"), [(1, 3), (2, 2)])
def test_nothing_sent_is_lost(tmp_path, fronts, times):
    write_model(tmp_path, max_batch_size=16)
    for _ in range(times):
        assert drain_under_load(tmp_path, fronts) == []


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fronts", [1, 2, 4])
def test_nothing_sent_is_lost_a_hundred_times(tmp_path, fronts):
    write_model(tmp_path, max_batch_size=16)
    for _ in range(100 if fronts == 1 else 20):
        assert drain_under_load(tmp_path, fronts) == []


def status(place: str, target: str) -> int:
    """On a connection of its own."""
    link = http.client.HTTPConnection(place, timeout=60)
    try:
        link.request("GET", target)
        return link.getresponse().status
    finally:
        link.close()


def health(place: str) -> int:
    with grpc.insecure_channel(place, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status


@pytest.mark.parametrize("fronts", [1, 2])
def test_it_is_first_not_ready_and_serves_on(tmp_path, fronts):
    write_model(tmp_path)
    options = ("--frontends", str(fronts), "--drain-delay-s", "60")
    server = Running(tmp_path, tmp_path / "log", *options, ends=130)
    with server:
        assert status(server.http, "/healthz/ready") == 200
        server.signal(signal.SIGTERM)
        every = range(16)  # connections: each front has some of them
        until(lambda: {status(server.http, "/healthz/ready") for _ in every} == {503}, "none is ready")
        for _ in every:
            assert status(server.http, "/v2/health/ready") == 400
            assert health(server.grpc) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert status(server.http, "/healthz/live") == 200
            assert status(server.http, "/v1/models/twice") == 200
        # And the second signal, as the test ends, ends it at once: status 130.


def test_an_idle_connection_is_kept_for_a_moment_and_may_be_used(tmp_path):
    write_model(tmp_path)
    assert any(used_in_time(tmp_path) for _ in range(5))


def used_in_time(folder: Path) -> bool:
    """False where this process was kept from it for longer than the moment."""
    with Running(folder, folder / "log") as server:
        idle, used = (http.client.HTTPConnection(server.http, timeout=60) for _ in range(2))
        for link in (idle, used):
            link.connect()
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        until(lambda: refused(server.http), "nobody listens")
        try:
            used.request("GET", "/healthz/ready")
            reply = used.getresponse()
        except ConnectionError:
            assert time.monotonic() - began > QUIET_S
            return False
        else:
            assert (reply.status, reply.getheader("connection")) == (503, "close")
            assert idle.sock.recv(1) == b""
            return True
        finally:
            for link in (idle, used):
                link.close()
            server.wait(120)


def refused(place: str) -> bool:
    try:
        status(place, "/healthz/live")
    except ConnectionRefusedError:
        return True
    return False
