"""MindIE's management endpoints (spec 4): probes, states, the end of the service, refusals by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any
from urllib.parse import parse_qs

import msgspec

from fastserve.codec.text import Sampling
from fastserve.dialects.text_common.mindie import envelope, refuse
from fastserve.dialects.text_common.mindie_metrics import MindieMetric, write_page, write_vector
from fastserve.dialects.text_common.routes import TargetParts, TextRoute
from fastserve.dialects.text_common.service import TextService
from fastserve.errors import Kind, ServeError, worker_lost
from fastserve.metrics import CONTENT_TYPE
from fastserve.net.access_control import Resource, Resources, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import TextAsk

MOST_TIMED_S = 600
TEXT = b"text/plain; charset=utf-8"
PD = "disaggregated prefill and decode"
LORA = "LoRA adapters"
ENGINES = "the commands of an engine's own server"


def show_ready(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of readiness probes: a status alone."""

    def show(call: Call) -> None:
        call.reply(200 if service.readiness.ready else 503, b"", b"")

    return show


def show_live(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of liveness probes: a status alone."""

    def show(call: Call) -> None:
        call.reply(200, b"", b"")

    return show


def show_model_ready(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of a model's readiness: a status alone."""

    def show(call: Call) -> None:
        try:
            version = service.texts.find(named.model).version
            if version.down:
                raise worker_lost(version.down)
        except ServeError as fault:
            refuse(service, call, fault, named.model)
        else:
            call.reply(200, b"", b"")

    return show


def check_timed(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint that checks that every model writes a token within so many seconds."""
    limit_s = MOST_TIMED_S if named.number is None else named.number

    async def check(call: Call) -> None:
        if not 1 <= limit_s <= MOST_TIMED_S:
            call.reply(404, envelope(404, f"health/timed-N: N is 1 to {MOST_TIMED_S}."), close=True)
            return
        try:
            for name in service.texts.names():
                await _say_one(service, name, call.received_ns + limit_s * 1_000_000_000)
        except ServeError as fault:
            call.reply(500, envelope(500, fault.message), close=True)
        else:
            call.reply(200, b'{"status":"healthy"}')

    return check


async def _say_one(service: TextService, name: str, deadline_ns: int) -> None:
    """Raises ServeError."""
    model = service.texts.find(name)
    prompt: str | list[int] = [0] if model.info.tokenizer else "a"
    ask = TextAsk(prompt=prompt, sampling=Sampling(max_new_tokens=1), priority=1, deadline_ns=deadline_ns)
    if not model.info.writes:
        async with await model.embedding([ask]) as embedding:
            await embedding.run()
        return
    stream = await model.start(ask)
    left_s = max(0.0, (deadline_ns - monotonic_ns()) / 1e9)
    timer = asyncio.get_running_loop().call_later(left_s, stream.cancel)
    try:
        async with stream:
            ending = await stream.rest()
    finally:
        timer.cancel()
    if ending.fault is not None:
        raise ServeError(
            Kind.DEADLINE_EXCEEDED, f"model '{name}' has not said a token: {ending.fault.message}"
        )


def show_metrics(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of the metrics as Prometheus text."""

    async def show(call: Call) -> None:
        call.reply(200, await _read(service, write_page), CONTENT_TYPE)

    return show


def show_vector(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of the metrics as JSON."""

    async def show(call: Call) -> None:
        call.reply(200, await _read(service, write_vector))

    return show


async def _read(service: TextService, write: Callable[[dict[str, list[MindieMetric]]], bytes]) -> bytes:
    models = service.texts.names()
    work = asyncio.get_running_loop().run_in_executor
    return await work(None, lambda: write(service.figures.read(models)))


def show_status(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of the service's status: slots and running requests."""

    def show(call: Call) -> None:
        names = service.texts.names()
        running = {name: service.figures.running(name) for name in names}
        slots = {name: service.texts.find(name).info.slots for name in names}
        ready = service.readiness.ready
        told: dict[str, Any] = {
            "service": {
                "roleName": "",
                "isHealthy": ready,
                "currentRole": "Standard",
                "roleStatus": "RoleReady",
            },
            "resource": {
                "availSlotsNum": sum(max(0, slots[name] - running[name]) for name in names),
                "totalSlotsNum": sum(slots.values()),
                "runningRequestNum": sum(running.values()),
            },
            "linkStatus": {"peers": []},
        }
        call.reply(200 if ready else 503, msgspec.json.encode(told))

    return show


def stop_service(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint that stops the server, where that is allowed: running requests are finished, or
    cut off with mode=Force."""
    modes = parse_qs(named.target.partition("?")[2]).get("mode", [""])

    async def stop(call: Call) -> None:
        if not service.options.stop_service:
            text = "stopService is off on this server (textgen.stop_service)."
            call.reply(403, envelope(403, text), close=True)
            return
        try:
            await service.context.stop(modes[0].lower() == "force")
        except ServeError as fault:
            call.reply(500, envelope(500, fault.message), close=True)
        else:
            call.reply(200, b"", TEXT, close=True)

    return stop


def refusing(what: str) -> Callable[[TextService, TargetParts], Endpoint]:
    """Return the endpoint of a feature that this server does not have."""

    def make(service: TextService, named: TargetParts) -> Endpoint:
        def say_no(call: Call) -> None:
            path = named.target.partition("?")[0]
            fault = ServeError(Kind.UNIMPLEMENTED, f"{path} is not served: {what} are none of this server's.")
            refuse(service, call, fault)

        return say_no

    return make


_PROBE = dict.fromkeys(("GET", "HEAD"), Scope.HEALTH)
_INFER = {"GET": Scope.INFER}
_NOTHING = {"POST": Scope.METADATA}  # refused in any case
_TIMED = (Resource.HEALTH, Resource.INFERENCE)
_STATUS = (Resource.HEALTH, Resource.STATISTICS)
_REPOSITORY = (Resource.MODEL_REPOSITORY,)  # its end takes all models away


def _path(
    name: str,
    path: str,
    scopes: dict[str, Scope],
    make: Callable[[TextService, TargetParts], Endpoint],
    *,
    yields: Yields = Yields.NEVER,
    resources: Resources | None = None,
) -> TextRoute:
    return TextRoute(HttpRoute(name, path, scopes, resources), make, refuse, yields)


PATHS = (
    _path("health", "/health", _PROBE, show_ready, yields=Yields.FIRST),
    _path("timed", "/health/timed", _INFER, check_timed, resources=_TIMED),
    _path("timed", "/health/timed-N", _INFER, check_timed, resources=_TIMED),
    _path("live", "/v2/health/live", _PROBE, show_live, yields=Yields.FIRST),
    # MindIE Motor's Coordinator answers probes by these (spec 5).
    _path("startup", "/v1/startup", _PROBE, show_ready, yields=Yields.FIRST),
    _path("live", "/v1/health", _PROBE, show_live, yields=Yields.FIRST),
    _path("ready", "/v1/readiness", _PROBE, show_ready, yields=Yields.FIRST),
    _path("ready", "/v2/health/ready", _PROBE, show_ready, yields=Yields.FIRST),
    _path("model_ready", "/v2/models/MODEL/ready", _PROBE, show_model_ready, yields=Yields.FIRST),
    _path("status", "/v1/status", {"GET": Scope.METADATA}, show_status, resources=_STATUS),
    _path("status", "/v2/status", {"GET": Scope.METADATA}, show_status, resources=_STATUS),
    _path("metrics", "/metrics", {"GET": Scope.METRICS}, show_metrics, yields=Yields.FIRST),
    _path("metrics", "/metrics-json", {"GET": Scope.METRICS}, show_vector),
    _path("stop_service", "/stopService", {"GET": Scope.ADMIN}, stop_service, resources=_REPOSITORY),
    _path("role", "/v1/role/ROLE", _NOTHING, refusing(PD)),
    _path("role", "/v2/role/ROLE", _NOTHING, refusing(PD)),
    _path("dresult", "/dresult", {"GET": Scope.METADATA}, refusing(PD)),
    _path("lora", "/v1/load_lora_adapter", _NOTHING, refusing(LORA)),
    _path("lora", "/v1/unload_lora_adapter", _NOTHING, refusing(LORA)),
    _path("engine", "/v1/engine-server/running-status", {"GET": Scope.METADATA}, refusing(ENGINES)),
    _path("engine", "/v1/engine-server/fault-handling-command", _NOTHING, refusing(ENGINES)),
)
