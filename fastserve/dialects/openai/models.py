"""GET /v1/models and /v1/models/NAME (spec 3.1, 8), and the model that a request names."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from fastserve.dialects.openai.errors import refuse
from fastserve.dialects.text_common.bodies import InvalidBody
from fastserve.dialects.text_common.mindie import SERVER
from fastserve.dialects.text_common.routes import TargetParts, TextRoute
from fastserve.dialects.text_common.service import TextService
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import TextModel
from fastserve.serving.text.models import model_card
from fastserve.settings import TextgenOptions

NO_NAME = {"openai": "`model` is required", "mindie": "Not found model."}
DESCRIBE = dict.fromkeys(("GET", "HEAD"), Scope.METADATA)


def list_models(service: TextService, named: TargetParts) -> Endpoint:
    """GET /v1/models."""

    def answer(call: Call) -> None:
        data = [describe(service, service.texts.find(name)) for name in service.texts.names()]
        call.reply(200, msgspec.json.encode({"object": "list", "data": data}))

    return answer


def show_model(service: TextService, named: TargetParts) -> Endpoint:
    """GET /v1/models/NAME, where no other dialect of the listener has it."""
    name = unquote(named.name)

    def answer(call: Call) -> None:
        try:
            if not name:
                raise no_model(name)
            body = msgspec.json.encode(describe(service, service.texts.find(name), alone=True))
        except ServeError as fault:
            refuse(service, call, no_model(name) if fault.kind is Kind.NOT_FOUND else fault)
        else:
            call.reply(200, body)

    return answer


def find_model(
    service: TextService, name: str, *, must_be_named: bool = True, embeds: bool = False
) -> TextModel:
    """The model that a body names, to write or to make vectors; for a name that no model of any kind has, the
    one there is (any_model). Raises ServeError."""
    options, texts = service.options, service.texts
    if options.any_model:
        return texts.find(
            name if name in texts.names() else options.default_model or texts.only(embeds=embeds)
        )
    if not name and must_be_named:
        raise InvalidBody(NO_NAME[options.openai_flavor], "model")
    try:
        return texts.find(name)
    except ServeError as fault:
        if not name or fault.kind is not Kind.NOT_FOUND:
            raise
    only = "" if texts.knows(name) or not takes_any(options) else texts.only(embeds=embeds)
    if not only:
        raise no_model(name)
    return texts.find(only)


def takes_any(options: TextgenOptions) -> bool:
    """Return whether an unknown name stands for the only model: MindIE checks names."""
    return options.any_model is None and options.openai_flavor == "openai"


def no_model(name: str) -> ServeError:
    """Return the fault of an unknown model."""
    return ServeError(Kind.NOT_FOUND, f"The model '{name}' does not exist.")


def describe(service: TextService, model: TextModel, *, alone: bool = False) -> dict[str, Any]:
    """OpenAI's four keys, and those of vLLM. MindIE has the four where it tells of one model alone, and says
    "null" of a parent there is not."""
    mindie = service.options.openai_flavor == "mindie"
    card = model_card(model.version)
    if mindie:
        card["owned_by"] = SERVER
    if mindie and alone:
        return card
    more = {"root": model.name, "parent": "null" if mindie else None}
    return {**card, **more, "max_model_len": model.info.max_tokens}


PATHS = (
    TextRoute(HttpRoute("models", "/v1/models", DESCRIBE), list_models, refuse),
    TextRoute(HttpRoute("model", "/v1/models/NAME", DESCRIBE), show_model, refuse, Yields.FIRST),
)
