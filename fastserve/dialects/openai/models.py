"""GET /v1/models and /v1/models/NAME (spec 3.1, 8)."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from fastserve.dialects.openai.errors import refuse
from fastserve.dialects.openai.requests import no_model
from fastserve.dialects.text_common.endpoint_parts import TargetParts, TextRoute, TextService
from fastserve.dialects.text_common.mindie import SERVER
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import TextModel
from fastserve.serving.text.models import model_card

DESCRIBE = dict.fromkeys(("GET", "HEAD"), Scope.METADATA)


def list_models(service: TextService, named: TargetParts) -> Endpoint:
    """GET /v1/models."""

    def answer(call: Call) -> None:
        texts = service.texts
        models = [texts.find(name) for name in texts.names()]
        models += [model.adapted(name) for model in models for name in texts.adapters(model)]
        data = [describe(service, model) for model in models]
        call.reply(200, msgspec.json.encode({"object": "list", "data": data}))

    return answer


def show_model(service: TextService, named: TargetParts) -> Endpoint:
    """GET /v1/models/NAME, where no other dialect of the listener has it."""
    name = unquote(named.name)

    def answer(call: Call) -> None:
        try:
            if not name:
                raise no_model(name)
            body = msgspec.json.encode(describe(service, service.texts.find_adapted(name), alone=True))
        except ServeError as fault:
            refuse(service, call, no_model(name) if fault.kind is Kind.NOT_FOUND else fault)
        else:
            call.reply(200, body)

    return answer


def describe(service: TextService, model: TextModel, *, alone: bool = False) -> dict[str, Any]:
    """OpenAI's four keys, and those of vLLM: the parent of an adapter is its model. MindIE has the four where
    it tells of one model alone, and says "null" of a parent there is not."""
    mindie = service.options.openai_flavor == "mindie"
    card = {**model_card(model.version), "id": model.shown_name}
    if mindie:
        card["owned_by"] = SERVER
    if mindie and alone:
        return card
    parent = model.name if model.adapter else "null" if mindie else None
    more = {"root": model.name, "parent": parent}
    return {**card, **more, "max_model_len": model.info.max_tokens}


PATHS = (
    TextRoute(HttpRoute("models", "/v1/models", DESCRIBE), list_models, refuse),
    TextRoute(HttpRoute("model", "/v1/models/NAME", DESCRIBE), show_model, refuse, Yields.FIRST),
)
