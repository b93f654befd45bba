"""The dialect `textgen`: the routes of all text generation APIs. Each API defines its own in `PATHS`.

POST /generate belongs to two of them: to vLLM's where the body has `prompt`, to TGI's where it has `inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.mindie import generation, management
from fastserve.dialects.openai import completions, embeddings, models
from fastserve.dialects.openai.errors import answer_no_such_url, error_body
from fastserve.dialects.openai.vllm import make_vllm
from fastserve.dialects.text_common import mindie
from fastserve.dialects.text_common.endpoints import (
    BOUNDS,
    BodyUse,
    InvalidBody,
    RouteTable,
    TargetParts,
    TextRoute,
    TextService,
    read_offloaded,
    read_typed,
    size_fault,
    with_size_check,
)
from fastserve.dialects.text_common.operations import describe_text
from fastserve.dialects.tgi import endpoints
from fastserve.dialects.tgi.endpoints import TgiGenerate, refuse
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route, Yields
from fastserve.serving.dialect import Dialect, DialectSpec, HttpRoute, ServingContext
from fastserve.settings import Settings, TextgenOptions

NEITHER = "the body has neither `prompt` (vLLM) nor `inputs` (TGI)"


class GenerateKeys(msgspec.Struct):
    """The keys that tell a vLLM body of POST /generate from a TGI body."""

    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_which: FreeJSON[GenerateKeys] = FreeJSON(GenerateKeys, BOUNDS)


def generate_either(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of POST /generate: vLLM's or TGI's, by the keys of the body."""
    vllm, tgi = make_vllm(service), TgiGenerate(service, streams=False)

    async def find(call: Call) -> None:
        try:
            which = await read_offloaded(service, call, read_typed, _which, call.body)
        except ServeError:
            await tgi(call)  # which finds the words
            return
        if which.prompt is not msgspec.UNSET:
            await vllm(call)
        elif which.inputs is not msgspec.UNSET:
            await tgi(call)
        else:
            service.traffic.refused("", Kind.INVALID_ARGUMENT.name)
            call.reply(422, error_body(InvalidBody(NEITHER), flat=False))

    return find


PATHS: tuple[TextRoute, ...] = (
    *generation.PATHS,
    *completions.PATHS,
    *embeddings.PATHS,
    *models.PATHS,
    *endpoints.PATHS,
    *management.PATHS,
    TextRoute(
        HttpRoute("generate", "/generate", {"POST": Scope.INFER}), generate_either, refuse, room=BodyUse.TEXT
    ),
)
TABLE = RouteTable(PATHS)


class Textgen(Dialect):
    """The text dialect of one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        self._service = TextService(context, options)
        self._shows_metrics = context.settings.allow_metrics

    def route(self, method: str, target: str) -> Route | None:
        """Return the route of a target; None when no text API has it with this method. Paths under /v1/ that
        only OpenAI's API could have are answered with its 404, where no other dialect has them: a dialect
        with a catch-all would take them for malformed requests of its own."""
        found = TABLE.find(method, target)
        if found is None:
            asked = target.partition("?")[0]
            is_openais = asked.startswith("/v1/") and not f"{asked}/".startswith("/v1/models/")
            if method == "OPTIONS" or not is_openais:
                return None
            return Route(answer_no_such_url, Scope.METADATA, Yields.FIRST, resources=NOTHING)
        path, named = found
        scope, gives_way = path.row.scopes[method], path.gives_way
        if scope is Scope.METRICS:
            if not self._shows_metrics:
                return None
            gives_way = gives_way if self._service.options.metrics == "server" else Yields.NEVER
        endpoint, room, resources = path.make(self._service, named), path.room, path.row.resources
        if room is None:
            return Route(endpoint, scope, gives_way, resources)
        endpoint = with_size_check(self._service, path, room, endpoint)
        return Route(endpoint, scope, gives_way, resources, partial(self._body_fault, room))

    def _body_fault(self, room: BodyUse, size: int) -> ServeError | None:
        """Return the refusal of a body of `size` bytes. None while models load: they define how long a
        prompt may be."""
        return size_fault(self._service, room, size) if self._service.readiness.ready else None

    def hear(self, word: str) -> bool:
        """Stop the request of an id, for another front process."""
        return self._service.running.stop(word)

    def refuse(self, call: Call, fault: ServeError) -> None:
        found = TABLE.find(call.method, call.target)
        say_no = mindie.refuse if found is None else found[0].refuse
        say_no(self._service, call, fault)


def exposes(settings: Settings) -> Sequence[str]:
    return ("stop the server",) if settings.textgen.stop_service else ()


SPEC = DialectSpec(
    name="textgen",
    options=TextgenOptions,
    section="textgen",
    build=Textgen,
    routes=tuple(path.row for path in PATHS),
    exposes=exposes,
    describe_server=describe_text,
)
