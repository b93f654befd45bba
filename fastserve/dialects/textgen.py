"""The dialect `textgen`: the routes of all text generation APIs. Each API defines its own in `PATHS`.

POST /generate and /tokenize belong to two of them: to vLLM's where the body has `prompt` (or `messages` to
tokenize), to TGI's where it has `inputs`.

The first half of this file describes operations of each API for /openapi.json. Bodies name the keys that
clients use most; each API takes more. Where an API does not name its model, it is described where the server
has one that writes, or a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.mindie import generation, management
from fastserve.dialects.openai import anthropic, completions, embeddings, models, responses, scoring, vllm
from fastserve.dialects.openai.errors import answer_no_such_url, error_body
from fastserve.dialects.text_common import mindie
from fastserve.dialects.text_common.endpoint_parts import (
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
from fastserve.dialects.tgi import endpoints
from fastserve.dialects.tgi.endpoints import TgiGenerate, refuse
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route, Yields
from fastserve.serving.api_operations import (
    EVENTS_TYPE,
    JSON_TYPE,
    ApiOperation,
    ModelFacts,
    Schema,
    json_content,
    object_schema,
)
from fastserve.serving.dialect import Dialect, DialectSpec, HttpRoute, ServingContext
from fastserve.settings import Settings, TextgenOptions

OPENAI, ANTHROPIC, VLLM, TGI, MINDIE = "OpenAI", "Anthropic", "vLLM", "Text Generation Inference", "MindIE"
NEW_TOKENS = 8
PROMPT = "Once"
CHAT_FILE = "chat_template.jinja"
_PROMPT: Schema = {"type": "string", "minLength": 1}
_NEW: Schema = {"type": "integer", "minimum": 1, "maximum": 64}
_SAMPLING: dict[str, Schema] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_STREAMED = {JSON_TYPE: {"schema": {"type": "object"}}, EVENTS_TYPE: {}}
_ANY_JSON = json_content({})
_LIST = object_schema({"object": {"const": "list"}, "data": {"type": "array"}}, ["data"])


def describe_text(settings: Settings, models: Sequence[ModelFacts]) -> Iterator[ApiOperation]:
    """Yield the operations of the text APIs."""
    writers = [facts.name for facts in models if facts.text is not None and facts.text.writes]
    embedders = [facts.name for facts in models if facts.text is not None and facts.text.embeds]
    pairs = [facts.name for facts in models if scoring.find_pairs(facts.version) is not None]
    classes = [facts.name for facts in models if scoring.find_classes(facts.version) is not None]
    yield from _describe_scoring(pairs, classes)
    if not writers and not embedders:
        return
    yield ApiOperation("GET", "/v1/models", OPENAI, "List the text models", answer=json_content(_LIST))
    if writers:
        chatty = [facts.name for facts in models if facts.name in writers and may_chat(facts)]
        adapters = [name for facts in models if facts.text is not None for name in facts.text.adapters]
        named = list(dict.fromkeys([*writers, *adapters]))
        yield from _describe_openai(named, chatty)
        yield from _describe_newer(named, chatty)
    if embedders:
        yield _describe_embeddings(embedders)
    default = settings.textgen.default_model
    if len(writers) == 1 or default in writers:
        yield from _describe_tgi()
        yield from _describe_mindie()


def may_chat(facts: ModelFacts) -> bool:
    """Return whether the folder of a model surely has a chat template."""
    return (facts.version.folder / CHAT_FILE).exists()


def _describe_openai(writers: Sequence[str], chatty: Sequence[str]) -> Iterator[ApiOperation]:
    more = {"max_tokens": _NEW, **_SAMPLING, "stream": {"type": "boolean"}}
    schema = object_schema({"model": {"enum": list(writers)}, "prompt": _PROMPT, **more}, ["model", "prompt"])
    example: dict[str, Any] = {"model": writers[0], "prompt": PROMPT, "max_tokens": NEW_TOKENS}
    yield ApiOperation(
        "POST",
        "/v1/completions",
        OPENAI,
        "Complete a text",
        body=json_content(schema, example),
        answer=_STREAMED,
    )
    message = object_schema(
        {"role": {"enum": ["system", "user", "assistant"]}, "content": _PROMPT}, ["role", "content"]
    )
    messages = {"type": "array", "minItems": 1, "items": message}
    schema = object_schema(
        {"model": {"enum": list(writers)}, "messages": messages, **more}, ["model", "messages"]
    )
    body = json_content(schema)
    if chatty:
        said = [{"role": "user", "content": PROMPT}]
        body = json_content(schema, {"model": chatty[0], "messages": said, "max_tokens": NEW_TOKENS})
    yield ApiOperation(
        "POST", "/v1/chat/completions", OPENAI, "Answer in a conversation", body=body, answer=_STREAMED
    )


def _describe_newer(writers: Sequence[str], chatty: Sequence[str]) -> Iterator[ApiOperation]:
    """Yield the operations of a chat in other forms."""
    message = object_schema({"role": {"const": "user"}, "content": _PROMPT}, ["role", "content"])
    said = [{"role": "user", "content": PROMPT}]
    forms: list[tuple[str, str, dict[str, Schema], dict[str, Any]]] = [
        (
            "/v1/messages",
            ANTHROPIC,
            {"messages": {"type": "array", "minItems": 1, "items": message}, "max_tokens": _NEW},
            {"messages": said, "max_tokens": NEW_TOKENS},
        ),
        (
            "/v1/responses",
            OPENAI,
            {"input": _PROMPT, "max_output_tokens": _NEW},
            {"input": PROMPT, "max_output_tokens": NEW_TOKENS},
        ),
    ]
    for path, api, keys, example in forms:
        schema = object_schema({"model": {"enum": list(writers)}, **keys}, ["model", *keys])
        given = ({"model": chatty[0], **example},) if chatty else ()
        body = json_content(schema, *given)
        yield ApiOperation("POST", path, api, "Answer in a conversation", body=body, answer=_STREAMED)


def _describe_scoring(pairs: Sequence[str], classes: Sequence[str]) -> Iterator[ApiOperation]:
    texts = {"type": "array", "minItems": 1, "maxItems": 64, "items": _PROMPT}
    answer = json_content(object_schema({"results": {"type": "array"}}, ["results"]))
    if pairs:
        schema = object_schema(
            {"model": {"enum": list(pairs)}, "query": _PROMPT, "documents": texts},
            ["model", "query", "documents"],
        )
        body = json_content(schema, {"model": pairs[0], "query": PROMPT, "documents": [PROMPT, "Twice"]})
        yield ApiOperation(
            "POST", "/v1/rerank", VLLM, "Order texts by their scores with a query", body=body, answer=answer
        )
        schema = object_schema(
            {"model": {"enum": list(pairs)}, "text_1": _PROMPT, "text_2": texts},
            ["model", "text_1", "text_2"],
        )
        body = json_content(schema, {"model": pairs[0], "text_1": PROMPT, "text_2": [PROMPT, "Twice"]})
        yield ApiOperation(
            "POST", "/v1/score", VLLM, "Score pairs of texts", body=body, answer=json_content(_LIST)
        )
    if classes:
        schema = object_schema({"model": {"enum": list(classes)}, "input": texts}, ["model", "input"])
        body = json_content(schema, {"model": classes[0], "input": [PROMPT]})
        yield ApiOperation(
            "POST", "/v1/classify", VLLM, "Classify texts", body=body, answer=json_content(_LIST)
        )


def _describe_embeddings(embedders: Sequence[str]) -> ApiOperation:
    schema = object_schema({"model": {"enum": list(embedders)}, "input": _PROMPT}, ["model", "input"])
    return ApiOperation(
        "POST",
        "/v1/embeddings",
        OPENAI,
        "Return the vector of a text",
        body=json_content(schema, {"model": embedders[0], "input": PROMPT}),
        answer=json_content(_LIST),
    )


def _inputs_body(parameters: dict[str, Schema], **more: Schema) -> dict[str, Any]:
    """Return the content of a body of TGI's form."""
    schema = object_schema({"inputs": _PROMPT, "parameters": object_schema(parameters), **more}, ["inputs"])
    return json_content(schema, {"inputs": PROMPT, "parameters": {"max_new_tokens": NEW_TOKENS}})


def _describe_tgi() -> Iterator[ApiOperation]:
    positive = {**_SAMPLING, "temperature": {"type": "number", "exclusiveMinimum": 0, "maximum": 2}}
    body = _inputs_body(
        {"max_new_tokens": _NEW, **positive, "details": {"type": "boolean"}}, stream={"type": "boolean"}
    )
    yield ApiOperation("POST", "/generate", TGI, "Write on", body=body, answer={**_ANY_JSON, EVENTS_TYPE: {}})
    yield ApiOperation(
        "POST",
        "/generate_stream",
        TGI,
        "Write on, as events",
        body=body,
        answer={EVENTS_TYPE: {}},
    )
    tokenize = json_content(object_schema({"inputs": _PROMPT}, ["inputs"]), {"inputs": PROMPT})
    answer = json_content({"type": "array"})
    yield ApiOperation("POST", "/tokenize", TGI, "Return the tokens of a text", body=tokenize, answer=answer)
    yield ApiOperation("GET", "/info", TGI, "Describe the text model", answer=_ANY_JSON)


def _describe_mindie() -> Iterator[ApiOperation]:
    body = _inputs_body({"max_new_tokens": _NEW, **_SAMPLING}, stream={"type": "boolean"})
    yield ApiOperation("POST", "/infer", MINDIE, "Write on", body=body, answer={**_ANY_JSON, EVENTS_TYPE: {}})


NEITHER = "the body has neither `prompt` (vLLM) nor `inputs` (TGI)"


class SharedKeys(msgspec.Struct):
    """The keys that tell a vLLM body of POST /generate and /tokenize from a TGI body."""

    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_which: FreeJSON[SharedKeys] = FreeJSON(SharedKeys, BOUNDS)


async def read_keys(service: TextService, call: Call) -> SharedKeys | None:
    """Return the keys of a body; None for one that cannot be read, in which TGI's reader finds the fault."""
    try:
        return await read_offloaded(service, call, read_typed, _which, call.body)
    except ServeError:
        return None


def generate_either(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of POST /generate: vLLM's or TGI's, by the keys of the body."""
    vllms, tgi = vllm.make_vllm(service), TgiGenerate(service, streams=False)

    async def find(call: Call) -> None:
        which = await read_keys(service, call)
        if which is None or (which.prompt is msgspec.UNSET and which.inputs is not msgspec.UNSET):
            await tgi(call)
        elif which.prompt is not msgspec.UNSET:
            await vllms(call)
        else:
            service.traffic.refused("", Kind.INVALID_ARGUMENT.name)
            call.reply(422, error_body(InvalidBody(NEITHER), flat=False))

    return find


def tokenize_either(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint of POST /tokenize: vLLM's for a prompt or messages, else TGI's."""
    vllms, tgi = vllm.tokenize(service), endpoints.tokenize(service)

    async def find(call: Call) -> None:
        which = await read_keys(service, call)
        is_vllms = which is not None and (
            which.prompt is not msgspec.UNSET or which.messages is not msgspec.UNSET
        )
        await (vllms if is_vllms else tgi)(call)

    return find


PATHS: tuple[TextRoute, ...] = (
    *generation.PATHS,
    *completions.PATHS,
    *responses.PATHS,
    *anthropic.PATHS,
    *embeddings.PATHS,
    *scoring.PATHS,
    *models.PATHS,
    *endpoints.PATHS,
    *management.PATHS,
    TextRoute(
        HttpRoute("generate", "/generate", {"POST": Scope.INFER}), generate_either, refuse, room=BodyUse.TEXT
    ),
    TextRoute(
        HttpRoute("tokenize", "/tokenize", {"POST": Scope.INFER}), tokenize_either, refuse, room=BodyUse.TEXT
    ),
    *vllm.PATHS,
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
