"""POST /v1/tokenizer: a text's tokens, counted and shown (spec 3)."""

from __future__ import annotations

from typing import Any

import msgspec

from fastserve.dialects.textgen.bodies import read_body
from fastserve.dialects.textgen.errors import refuse
from fastserve.dialects.textgen.inputs import check_length, refuse_prompt
from fastserve.dialects.textgen.parameters import take
from fastserve.dialects.textgen.paths import Named, Path
from fastserve.dialects.textgen.service import Service
from fastserve.errors import ServeError, invalid
from fastserve.serving.dialect import HttpRoute
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope


def tokenize(service: Service, named: Named) -> Endpoint:
    """The endpoint. `do_decode`: false leaves the tokens' texts out."""

    async def run(call: Call) -> None:
        name = ""
        try:
            body = await read_body(service, call)
            model = service.texts.find("")
            name = model.name
            text, shown = _read(body, service.options.input_chars)
            pieces = await model.pieces(text)
        except ServeError as fault:
            refuse_prompt(service, call, fault, name)
        else:
            tokens = [piece.text for piece in pieces] if shown else []
            call.reply(200, msgspec.json.encode({"token_number": len(pieces), "tokens": tokens}))
            service.count(call, model)

    return run


def _read(body: Any, most: int) -> tuple[str, bool]:
    body = body if isinstance(body, dict) else {}
    if "inputs" not in body:
        raise invalid("Not found inputs.")
    text = body["inputs"]
    if not isinstance(text, str):
        raise invalid("Inputs must not be null" if text is None else "inputs must be string type.")
    check_length(text, most)
    shown = take(body, "do_decode", "boolean")
    return text, shown is not False


PATHS = (Path(HttpRoute("tokenizer", "/v1/tokenizer", {"POST": Scope.INFER}), tokenize, refuse),)
