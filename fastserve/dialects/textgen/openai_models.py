"""GET /v1/models and /v1/models/NAME (spec 3.1, 8): which models there are to be asked."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from fastserve.dialects.textgen.metadata import SERVER
from fastserve.dialects.textgen.openai_errors import refuse
from fastserve.dialects.textgen.paths import Named, Path
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.typed import Misread
from fastserve.errors import Kind, ServeError
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import TextModel
from fastserve.serving.text.card import model_card
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope

DESCRIBE = dict.fromkeys(("GET", "HEAD"), Scope.METADATA)


def list_models(service: Service, named: Named) -> Endpoint:
    """GET /v1/models."""

    def answer(call: Call) -> None:
        data = [describe(service, service.texts.find(name)) for name in service.texts.names()]
        call.reply(200, msgspec.json.encode({"object": "list", "data": data}))

    return answer


def show_model(service: Service, named: Named) -> Endpoint:
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


def find_model(service: Service, name: str, *, must_be_named: bool = True) -> TextModel:
    """The model that a body names. Raises ServeError."""
    if service.options.any_model:
        return service.texts.find(name if name in service.texts.names() else "")
    if not name and must_be_named:
        raise Misread("`model` is required", "model")
    try:
        return service.texts.find(name)
    except ServeError as fault:
        if not name or fault.kind is not Kind.NOT_FOUND:
            raise
        raise no_model(name) from None


def no_model(name: str) -> ServeError:
    """What is said of a model that is not there."""
    return ServeError(Kind.NOT_FOUND, f"The model '{name}' does not exist.")


def describe(service: Service, model: TextModel, *, alone: bool = False) -> dict[str, Any]:
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
    Path(HttpRoute("models", "/v1/models", DESCRIBE), list_models, refuse),
    Path(HttpRoute("model", "/v1/models/NAME", DESCRIBE), show_model, refuse, gives_way=True),
)
