"""TGI's paths (spec 7), and the two that it shares: POST /generate is vLLM's where the body has `prompt`
(spec 3), GET / belongs to whoever else has a page there.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import msgspec

from fastserve.dialects.textgen.openai_errors import error_body
from fastserve.dialects.textgen.paths import Named, Path
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.tgi_calls import Generate, refuse
from fastserve.dialects.textgen.tgi_read import read_tokenize
from fastserve.dialects.textgen.tgi_write import error_body as tgi_error
from fastserve.dialects.textgen.tgi_write import error_status
from fastserve.dialects.textgen.typed import Misread, read_typed
from fastserve.dialects.textgen.vllm_calls import make_vllm
from fastserve.errors import Kind, ServeError
from fastserve.serving.dialect import HttpRoute
from fastserve.wire.call import Call, Endpoint
from fastserve.wire.scope import Scope

INFER = {"POST": Scope.INFER}
PROBE = dict.fromkeys(("GET", "HEAD"), Scope.HEALTH)
NEITHER = "the body has neither `prompt` (vLLM) nor `inputs` (TGI)"


class Which(msgspec.Struct):
    """Whose a body is."""

    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_read_which = msgspec.json.Decoder(Which)


def generate_either(service: Service, named: Named) -> Endpoint:
    """POST /generate."""
    vllm, tgi = make_vllm(service), Generate(service, streams=False)

    def find(call: Call) -> Coroutine[Any, Any, None] | None:
        try:
            which = read_typed(_read_which, call.body)
        except Misread:
            return tgi(call)  # which finds the words
        if which.prompt is not msgspec.UNSET:
            return vllm(call)
        if which.inputs is not msgspec.UNSET:
            return tgi(call)
        service.traffic.refused("", Kind.INVALID_ARGUMENT.name)
        call.reply(422, error_body(Misread(NEITHER), flat=False))
        return None

    return find


def generate_stream(service: Service, named: Named) -> Endpoint:
    """POST /generate_stream."""
    return Generate(service, streams=True)


def generate_root(service: Service, named: Named) -> Endpoint:
    """POST /: whether it streams, the body says; an answer that does not is in a list."""
    return Generate(service, streams=None, alone=False)


def tokenize(service: Service, named: Named) -> Endpoint:
    """POST /tokenize: where each token of a text stands."""

    async def answer(call: Call) -> None:
        name = ""
        try:
            body = await service.apart(len(call.body), read_tokenize, call.body)
            model = service.texts.find("")
            name = model.name
            pieces = await model.pieces(body.inputs, special=body.add_special_tokens is not False)
        except ServeError as fault:
            refuse(service, call, fault, name)
            return
        call.reply(200, msgspec.json.encode([piece._asdict() for piece in pieces]))
        service.count(call, model)

    return answer


def ping(service: Service, named: Named) -> Endpoint:
    """GET /ping and /: 200 and nothing, or why it is not healthy."""
    fault = ServeError(Kind.UNAVAILABLE, "unhealthy")

    def answer(call: Call) -> None:
        if service.readiness.ready:
            call.reply(200, b"", b"")
        elif service.options.tgi_flavor == "tgi":
            call.reply(503, b'{"error":"unhealthy","error_type":"healthcheck"}')
        else:
            call.reply(error_status(fault, "mindie"), tgi_error(fault, "mindie"))

    return answer


PATHS = (
    Path(HttpRoute("generate", "/generate", INFER), generate_either, refuse),
    Path(HttpRoute("generate_stream", "/generate_stream", INFER), generate_stream, refuse),
    Path(HttpRoute("generate_root", "/", INFER), generate_root, refuse),
    Path(HttpRoute("tokenize", "/tokenize", INFER), tokenize, refuse),
    Path(HttpRoute("ping", "/ping", PROBE), ping, refuse),
    Path(HttpRoute("root", "/", PROBE), ping, refuse, gives_way=True),
)
