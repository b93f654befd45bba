"""MindIE's metadata endpoints (spec 3.1, 4): the server, its models and their limits, by GET.

Sizes of NPU memory are 0 here. A model's name stands for the path of its weights, which is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fastserve import __version__
from fastserve.dialects.text_common.mindie import SERVER, refuse
from fastserve.dialects.text_common.routes import TargetParts, TextRoute
from fastserve.dialects.text_common.service import TextService
from fastserve.errors import ServeError
from fastserve.net.access_control import Resource, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import Info

PIPELINE = "text-generation"
BLOCK = 128
"""cacheBlockSize, which is none of the cache here."""


def first_info(service: TextService) -> tuple[str, Info]:
    """Return the model of calls that name none; zeros where there is none."""
    try:
        model = service.texts.find("")
    except ServeError:
        return "", Info(max_tokens=0, max_prompt_tokens=0, max_new_tokens=0, slots=0)
    return model.name, model.info


def describe_server(service: TextService, named: TargetParts) -> dict[str, Any]:
    _, info = first_info(service)
    policy = {"prefill_policy_type": 0, "decode_policy_type": 0}
    more = {"max_prefill_batch_size": info.slots, "max_prefill_tokens": info.max_prompt_tokens}
    extensions = {"max_iter_times": info.max_new_tokens, **policy, **more}
    return {"name": SERVER, "version": __version__, "extensions": extensions}


def describe_model(service: TextService, named: TargetParts) -> dict[str, Any]:
    """Raises ServeError."""
    model = service.texts.find(named.model)
    sides = {
        side: [{"name": name, "shape": [-1], "datatype": "UINT32"}]
        for side, name in (("inputs", "input0"), ("outputs", "output0"))
    }
    return {"name": model.name, "platform": SERVER, **sides}


def describe_config(service: TextService, named: TargetParts) -> dict[str, Any]:
    """Raises ServeError."""
    model = service.texts.find(named.model)
    return {
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


def describe_limits(service: TextService, named: TargetParts) -> dict[str, Any]:
    """/v1/config."""
    name, info = first_info(service)
    return {
        "modelName": name,
        "maxSeqLen": info.max_tokens,
        "npuMemSize": 0,
        "cpuMemSize": 0,
        "worldSize": 1,
        "maxOutputLen": info.max_new_tokens,
        "cacheBlockSize": BLOCK,
    }


def describe_models(service: TextService, named: TargetParts) -> dict[str, Any]:
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
        return mindie
    return {
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


def count_slots(service: TextService, named: TargetParts) -> dict[str, Any]:
    """Raises ServeError."""
    model = service.texts.find(named.model)
    info = model.info
    free = max(0, info.slots - service.figures.running(model.name))
    tokens = info.kv_tokens or info.slots * info.max_tokens
    left = max(0, tokens - service.figures.held_tokens(model.name))
    return {"total_slots": info.slots, "free_slots": free, "available_tokens_length": left}


def answering(
    describe: Callable[[TextService, TargetParts], dict[str, Any]],
) -> Callable[[TextService, TargetParts], Endpoint]:
    """The endpoint that replies with what is described."""

    def make(service: TextService, named: TargetParts) -> Endpoint:
        def show(call: Call) -> None:
            try:
                found = describe(service, named)
            except ServeError as fault:
                refuse(service, call, fault, named.model)
            else:
                call.reply(200, msgspec.json.encode(found))

        return show

    return make


_ASK = {"GET": Scope.METADATA}
_CONFIG = (Resource.METADATA, Resource.MODEL_CONFIG)
PATHS = (
    TextRoute(HttpRoute("server", "/v2", _ASK), answering(describe_server), refuse, Yields.FIRST),
    TextRoute(
        HttpRoute("model", "/v2/models/MODEL", _ASK),
        answering(describe_model),
        refuse,
        Yields.FIRST,
    ),
    TextRoute(
        HttpRoute("config", "/v2/models/MODEL/config", _ASK, (Resource.MODEL_CONFIG,)),
        answering(describe_config),
        refuse,
        Yields.FIRST,
    ),
    TextRoute(HttpRoute("info", "/info", _ASK, _CONFIG), answering(describe_models), refuse),
    TextRoute(HttpRoute("limits", "/v1/config", _ASK, _CONFIG), answering(describe_limits), refuse),
    TextRoute(
        HttpRoute("slots", "/v2/models/MODEL/getSlotCount", _ASK, (Resource.STATISTICS,)),
        answering(count_slots),
        refuse,
    ),
)
