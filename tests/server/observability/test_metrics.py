"""The page /metrics after some traffic: every stage of a request, and where it was turned away."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request

import pytest

from fastserve.server.front import FrontGauges
from tests.running import Running, until
from tests.server.rig import run, serving, write_model


def value(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels."""
    wanted = [f'{key}="{text}"' for key, text in labels.items()]
    lines = [line for line in page.splitlines() if re.match(rf"{name}(\{{| )", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(w in line for w in wanted))


def test_every_stage_of_a_request_is_counted(tmp_path):
    write_model(tmp_path)

    async def main():
        async with serving(tmp_path) as served:
            for number in (1.0, 2.0, 3.0):
                assert (await served.ask(number))[0] == 200
            assert (await served.ask(1.0, model="nobody"))[0] == 404
            client = await served.client()
            status, page = await client.get("/metrics")
            assert status == 200
            return page.decode()

    pages: list[str] = []

    async def keep():
        pages.append(await main())

    run(keep())
    page = pages[0]
    who = {"model": "twice", "version": "1"}
    for stage in ("request", "decode", "queue", "compute", "encode"):
        assert value(page, f"fastserve_{stage}_duration_seconds_count", **who) == 3, stage
    assert value(page, "fastserve_requests_total", status="OK", **who) == 3
    assert value(page, "fastserve_requests_total", status="NOT_FOUND", model="") == 1
    assert value(page, "fastserve_rows_total", **who) == 3
    assert value(page, "fastserve_workers_alive", **who) == 1
    assert value(page, "fastserve_model_loads_total", result="ok", **who) == 1
    assert value(page, "fastserve_ready") == 1


def test_refusals_are_counted_by_the_kind_of_listener(tmp_path):
    write_model(tmp_path)

    def shown(listener: str, cause: str) -> float:
        page = urllib.request.urlopen(f"http://{served.http}/metrics", timeout=60).read().decode()
        return value(page, "fastserve_wire_rejects_total", listener=listener, cause=cause)

    with Running(tmp_path, tmp_path / "log") as served:
        for place in (served.http, served.grpc):
            host, _, port = place.rpartition(":")
            with socket.create_connection((host, int(port)), 60) as link:
                link.sendall(b"neither of both\r\n\r\n, and long enough to be seen")
                assert link.recv(65536)
        until(lambda: shown("http", "framing") == 1, "HTTP's is counted")
        until(lambda: shown("grpc", "http2_protocol_error") == 1, "gRPC's is counted")


@pytest.mark.logs_errors
def test_a_beat_that_fails_is_not_the_last(tmp_path, monkeypatch):
    write_model(tmp_path)
    failed = []

    def fail(gauges, hosted):
        failed.append(1)
        raise OSError("once")

    async def work():
        async with serving(tmp_path) as served:
            monkeypatch.setattr(FrontGauges, "show_queues", fail)
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            await served.until(lambda: len(failed) >= 2)

    run(work())
