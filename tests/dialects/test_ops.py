"""The ops dialect: probes tell the truth with their reason, scrapes share a rendering."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fastserve.dialects.admin.probes import Ops
from fastserve.metrics import Heartbeat, ModelReadiness, Readiness, ServerState
from fastserve.serving.dialect import NoOptions, ServingContext
from tests.metrics.series import NamedRegistry


@dataclass
class SpokenCall:
    """The part of net.Call that an endpoint needs."""

    status: int = 0
    body: bytes = b""
    content_type: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def reply(self, status, body=b"", content_type=b"application/json", headers=(), close=False) -> None:  # type: ignore[no-untyped-def]
        assert self.status == 0, "replied twice"
        self.status, self.body, self.content_type, self.headers = status, body, content_type, dict(headers)


@pytest.fixture
def registry() -> Iterator[NamedRegistry]:
    found = NamedRegistry()
    yield found
    found.close()


def make_ops(readiness: Readiness, heartbeat: Heartbeat, registry: NamedRegistry) -> Ops:
    engine: Any = None  # of no interest here
    context = ServingContext(engine=engine, registry=registry, readiness=readiness, heartbeat=heartbeat)
    return Ops(context, NoOptions())


@pytest.fixture
def ops(registry: NamedRegistry) -> Ops:
    return make_ops(Readiness(), Heartbeat(), registry)


async def ask_in_loop(ops: Ops, target: str, method: str = "GET") -> SpokenCall:
    call = SpokenCall()
    route = ops.route(method, target)
    assert route is not None
    waits = route.endpoint(call)  # type: ignore[arg-type]
    if inspect.isawaitable(waits):
        await waits
    return call


def ask(ops: Ops, target: str, method: str = "GET") -> SpokenCall:
    return asyncio.run(ask_in_loop(ops, target, method))


def test_a_server_nobody_declared_ready_is_not(ops: Ops) -> None:
    call = ask(ops, "/healthz/ready")
    assert call.status == 503
    assert json.loads(call.body) == {"ready": False, "reason": "starting", "models": {}, "state": "starting"}
    assert call.headers[b"Cache-Control"] == b"no-store"


def test_ready_follows_the_servers_word_at_once(registry: NamedRegistry) -> None:
    readiness = Readiness()
    ops = make_ops(readiness, Heartbeat(), registry)
    readiness.ready, readiness.reason = True, ""
    readiness.models["digits"] = ModelReadiness(True, "", 2, 2)
    call = ask(ops, "/healthz/ready")
    assert call.status == 200
    assert call.content_type == b"application/json"
    assert json.loads(call.body)["models"]["digits"]["workers_alive"] == 2
    readiness.ready, readiness.reason = False, "draining"
    assert json.loads(ask(ops, "/healthz/ready").body)["reason"] == "draining"


def test_started_from_the_end_of_the_start_on(registry: NamedRegistry) -> None:
    readiness = Readiness()
    ops = make_ops(readiness, Heartbeat(), registry)
    call = ask(ops, "/healthz/startup")
    assert (call.status, json.loads(call.body)) == (503, {"started": False, "state": "starting"})
    for state in (ServerState.SERVING, ServerState.STOPPING):
        readiness.state = state
        call = ask(ops, "/healthz/startup")
        assert (call.status, json.loads(call.body)) == (200, {"started": True, "state": state.value})


def test_live_until_the_heart_stops(registry: NamedRegistry) -> None:
    heart = Heartbeat(stale_after_s=5.0)
    ops = make_ops(Readiness(), heart, registry)
    assert ask(ops, "/healthz/live").status == 200
    heart.beat()
    assert json.loads(ask(ops, "/healthz/live").body) == {"live": True}
    heart.beat_ns -= 7_000_000_000
    call = ask(ops, "/healthz/live")
    assert call.status == 503
    assert "7.0 s" in json.loads(call.body)["reason"]


def test_metrics_are_prometheus_text(ops: Ops, registry: NamedRegistry) -> None:
    registry.counter("c_total", "Help.").add(3)
    call = ask(ops, "/metrics?ignored=1")
    assert call.status == 200
    assert call.content_type == b"text/plain; version=0.0.4; charset=utf-8"
    assert b"\nc_total 3.0\n" in call.body


@pytest.mark.parametrize("target", ["/healthz/live", "/healthz/ready", "/healthz/startup", "/metrics"])
def test_head_answers_as_get(ops: Ops, target: str) -> None:
    assert ask(ops, target, "HEAD").status == ask(ops, target, "GET").status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(ops: Ops, method: str) -> None:
    call = ask(ops, "/metrics", method)
    assert call.status == 405
    assert call.headers[b"Allow"] == b"GET, HEAD"


@pytest.mark.parametrize(
    "target", ["/", "/healthz", "/healthz/live/", "/Metrics", "//metrics", "/v1/models/x", "*", ""]
)
def test_other_targets_are_somebody_elses(ops: Ops, target: str) -> None:
    assert ops.route("GET", target) is None


def test_overlapping_scrapes_share_one_rendering_that_survives_a_hangup(
    ops: Ops, registry: NamedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderings = []
    go = threading.Event()

    def expose() -> bytes:
        renderings.append(1)
        go.wait(60)
        return b"x 1\n"

    monkeypatch.setattr(registry, "expose", expose)

    async def main() -> list[SpokenCall]:
        leaving = asyncio.create_task(ask_in_loop(ops, "/metrics"))
        staying = [asyncio.create_task(ask_in_loop(ops, "/metrics")) for _ in range(5)]
        await asyncio.sleep(0)
        leaving.cancel()
        go.set()
        return await asyncio.gather(*staying)

    assert {call.body for call in asyncio.run(main())} == {b"x 1\n"}
    assert len(renderings) == 1
