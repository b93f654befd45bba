"""MindIE's management and metadata endpoints (spec 3.1, 4), in one table: probes, states, models and their
limits, metrics, the end of the service, and refusals by name.

Sizes of NPU memory are 0 here. A model's name stands for the path of its weights, which is not shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any
from urllib.parse import parse_qs

import msgspec

from fastserve import __version__
from fastserve.codec.generation import Sampling
from fastserve.dialects.text_common.endpoint_parts import TargetParts, TextRoute, TextService
from fastserve.dialects.text_common.mindie import SERVER, envelope, refuse
from fastserve.dialects.text_common.mindie_metrics import MindieMetric, write_page, write_vector
from fastserve.errors import Kind, ServeError, worker_lost
from fastserve.metrics import CONTENT_TYPE
from fastserve.net.access_control import Resource, Resources, Scope
from fastserve.net.limits import JSON
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields, refuse_plainly
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import Info, TextAsk

MOST_TIMED_S = 600
TEXT = b"text/plain; charset=utf-8"
PIPELINE = "text-generation"
BLOCK = 128
"""cacheBlockSize, which is none of the cache here."""
Shown = tuple[int, dict[str, Any] | None]
"""A status, and the JSON that goes with it; None: a status alone."""
Describe = Callable[[TextService, TargetParts], Shown]
Make = Callable[[TextService, TargetParts], Endpoint]


def show_ready(service: TextService, named: TargetParts) -> Shown:
    return (200 if service.readiness.ready else 503), None


def show_live(service: TextService, named: TargetParts) -> Shown:
    return 200, None


def show_model_ready(service: TextService, named: TargetParts) -> Shown:
    version = service.texts.find(named.model).version
    if version.down:
        raise worker_lost(version.down)
    return 200, None


def first_info(service: TextService) -> tuple[str, Info]:
    """Return the model of calls that name none; zeros where there is none."""
    try:
        model = service.texts.find("")
    except ServeError:
        return "", Info(max_tokens=0, max_prompt_tokens=0, max_new_tokens=0, slots=0)
    return model.name, model.info


def describe_server(service: TextService, named: TargetParts) -> Shown:
    _, info = first_info(service)
    policy = {"prefill_policy_type": 0, "decode_policy_type": 0}
    more = {"max_prefill_batch_size": info.slots, "max_prefill_tokens": info.max_prompt_tokens}
    extensions = {"max_iter_times": info.max_new_tokens, **policy, **more}
    return 200, {"name": SERVER, "version": __version__, "extensions": extensions}


def describe_model(service: TextService, named: TargetParts) -> Shown:
    model = service.texts.find(named.model)
    sides = {
        side: [{"name": name, "shape": [-1], "datatype": "UINT32"}]
        for side, name in (("inputs", "input0"), ("outputs", "output0"))
    }
    return 200, {"name": model.name, "platform": SERVER, **sides}


def describe_config(service: TextService, named: TargetParts) -> Shown:
    model = service.texts.find(named.model)
    return 200, {
        "model_name": model.name,
        "input_datatype": "UINT32",
        "output_datatype": "UINT32",
        "max_seq_len": model.info.max_tokens,
        "npu_mem_size": 0,
        "cpu_mem_size": 0,
        "world_size": 1,
        "model_weight_path": model.name,
        "model_instance_type": "Standard",
    }


def describe_limits(service: TextService, named: TargetParts) -> Shown:
    """/v1/config."""
    name, info = first_info(service)
    return 200, {
        "modelName": name,
        "maxSeqLen": info.max_tokens,
        "npuMemSize": 0,
        "cpuMemSize": 0,
        "worldSize": 1,
        "maxOutputLen": info.max_new_tokens,
        "cacheBlockSize": BLOCK,
    }


def describe_models(service: TextService, named: TargetParts) -> Shown:
    """/info, in the shape of TGI's or MindIE's (`tgi_flavor`)."""
    name, info = first_info(service)
    mindie = {
        "docker_label": None,
        "max_batch_total_tokens": info.kv_tokens or info.slots * info.max_tokens,
        "max_best_of": 1,
        "max_concurrent_requests": info.slots,
        "max_stop_sequences": None,
        "max_waiting_tokens": None,
        "sha": None,
        "validation_workers": None,
        "version": __version__,
        "waiting_served_ratio": None,
        "models": [_describe_one(service, each) for each in service.texts.names()],
        "max_input_length": info.max_prompt_tokens,
    }
    if service.options.tgi_flavor == "mindie":
        return 200, mindie
    return 200, {
        "model_id": name,
        "model_sha": None,
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": PIPELINE,
        "max_concurrent_requests": info.slots,
        "max_best_of": service.options.max_best_of,
        "max_stop_sequences": service.options.max_stops,
        "max_input_tokens": info.max_prompt_tokens,
        "max_total_tokens": info.max_tokens,
        "validation_workers": 1,
        "max_client_batch_size": 1,
        "router": "fastserve",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _describe_one(service: TextService, name: str) -> dict[str, Any]:
    info = service.texts.find(name).info
    return {
        "model_device_type": info.device,
        "model_dtype": info.dtype,
        "model_id": name,
        "model_pipeline_tag": PIPELINE,
        "model_sha": None,
        "max_total_tokens": info.max_tokens,
    }


def count_slots(service: TextService, named: TargetParts) -> Shown:
    model = service.texts.find(named.model)
    info = model.info
    free = max(0, info.slots - service.figures.running(model.name))
    tokens = info.kv_tokens or info.slots * info.max_tokens
    left = max(0, tokens - service.figures.held_tokens(model.name))
    return 200, {"total_slots": info.slots, "free_slots": free, "available_tokens_length": left}


def describe_status(service: TextService, named: TargetParts) -> Shown:
    """Return the slots and running requests of all models."""
    names = service.texts.names()
    running = {name: service.figures.running(name) for name in names}
    slots = {name: service.texts.find(name).info.slots for name in names}
    ready = service.readiness.ready
    return (200 if ready else 503), {
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


def refuse_feature(what: str, service: TextService, named: TargetParts) -> Shown:
    """Raise the error for a feature that this server does not have."""
    path = named.target.partition("?")[0]
    raise ServeError(Kind.UNIMPLEMENTED, f"{path} is not served: {what} are none of this server's.")


def answering(describe: Describe) -> Make:
    """Return the maker of endpoints that reply with what is described."""

    def make(service: TextService, named: TargetParts) -> Endpoint:
        def show(call: Call) -> None:
            try:
                status, told = describe(service, named)
            except ServeError as fault:
                refuse(service, call, fault, named.model)
                return
            if told is None:
                call.reply(status, b"", b"")
            else:
                call.reply(status, msgspec.json.encode(told))

        return show

    return make


def showing(write: Callable[[dict[str, list[MindieMetric]]], bytes], content_type: bytes) -> Make:
    """Return the maker of endpoints that show the metrics as `write` encodes them."""

    def make(service: TextService, named: TargetParts) -> Endpoint:
        async def show(call: Call) -> None:
            models, work = service.texts.names(), asyncio.get_running_loop().run_in_executor
            try:
                rates = await service.figures.rates(models)
            except ServeError as fault:
                refuse_plainly(call, fault)
                return
            page = await work(None, lambda: write(service.figures.read(models, rates)))
            call.reply(200, page, content_type)

        return show

    return make


_PROBE = dict.fromkeys(("GET", "HEAD"), Scope.HEALTH)
_ASK, _POST = {"GET": Scope.METADATA}, {"POST": Scope.METADATA}
_INFER, _METRICS = {"GET": Scope.INFER}, {"GET": Scope.METRICS}
_TIMED = (Resource.HEALTH, Resource.INFERENCE)
_STATUS = (Resource.HEALTH, Resource.STATISTICS)
_CONFIG = (Resource.METADATA, Resource.MODEL_CONFIG)
_REPOSITORY = (Resource.MODEL_REPOSITORY,)  # its end takes all models away
_NO_ROLES = answering(partial(refuse_feature, "disaggregated prefill and decode"))
_NO_LORA = answering(partial(refuse_feature, "LoRA adapters"))
_NO_ENGINES = answering(partial(refuse_feature, "the commands of an engine's own server"))


def _path(
    name: str,
    path: str,
    scopes: dict[str, Scope],
    make: Make,
    yields: Yields = Yields.NEVER,
    resources: Resources | None = None,
) -> TextRoute:
    return TextRoute(HttpRoute(name, path, scopes, resources), make, refuse, yields)


PATHS = (
    _path("server", "/v2", _ASK, answering(describe_server), Yields.FIRST),
    _path("model", "/v2/models/MODEL", _ASK, answering(describe_model), Yields.FIRST),
    _path(
        "config",
        "/v2/models/MODEL/config",
        _ASK,
        answering(describe_config),
        Yields.FIRST,
        (Resource.MODEL_CONFIG,),
    ),
    _path("info", "/info", _ASK, answering(describe_models), resources=_CONFIG),
    _path("limits", "/v1/config", _ASK, answering(describe_limits), resources=_CONFIG),
    _path(
        "slots",
        "/v2/models/MODEL/getSlotCount",
        _ASK,
        answering(count_slots),
        resources=(Resource.STATISTICS,),
    ),
    _path("health", "/health", _PROBE, answering(show_ready), Yields.FIRST),
    _path("timed", "/health/timed", _INFER, check_timed, resources=_TIMED),
    _path("timed", "/health/timed-N", _INFER, check_timed, resources=_TIMED),
    _path("live", "/v2/health/live", _PROBE, answering(show_live), Yields.FIRST),
    # MindIE Motor's Coordinator answers probes by these (spec 5).
    _path("startup", "/v1/startup", _PROBE, answering(show_ready), Yields.FIRST),
    _path("live", "/v1/health", _PROBE, answering(show_live), Yields.FIRST),
    _path("ready", "/v1/readiness", _PROBE, answering(show_ready), Yields.FIRST),
    _path("ready", "/v2/health/ready", _PROBE, answering(show_ready), Yields.FIRST),
    _path("model_ready", "/v2/models/MODEL/ready", _PROBE, answering(show_model_ready), Yields.FIRST),
    _path("status", "/v1/status", _ASK, answering(describe_status), resources=_STATUS),
    _path("status", "/v2/status", _ASK, answering(describe_status), resources=_STATUS),
    _path("metrics", "/metrics", _METRICS, showing(write_page, CONTENT_TYPE), Yields.FIRST),
    _path("metrics", "/metrics-json", _METRICS, showing(write_vector, JSON)),
    _path("stop_service", "/stopService", {"GET": Scope.ADMIN}, stop_service, resources=_REPOSITORY),
    _path("role", "/v1/role/ROLE", _POST, _NO_ROLES),
    _path("role", "/v2/role/ROLE", _POST, _NO_ROLES),
    _path("dresult", "/dresult", _ASK, _NO_ROLES),
    _path("lora", "/v1/load_lora_adapter", _POST, _NO_LORA),
    _path("lora", "/v1/unload_lora_adapter", _POST, _NO_LORA),
    _path("engine", "/v1/engine-server/running-status", _ASK, _NO_ENGINES),
    _path("engine", "/v1/engine-server/fault-handling-command", _POST, _NO_ENGINES),
)
