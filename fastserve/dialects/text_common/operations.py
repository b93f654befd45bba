"""Operations of the text APIs for /openapi.json: OpenAI's, TGI's and MindIE's.

Bodies name the keys that clients use most; each API takes more. Where an API does not name its model, it is
described where the server has one that writes, or a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastserve.serving.operations import (
    EVENTS_TYPE,
    JSON_TYPE,
    ApiOperation,
    ModelFacts,
    Schema,
    json_content,
    object_schema,
)
from fastserve.settings import Settings

OPENAI, TGI, MINDIE = "OpenAI", "Text Generation Inference", "MindIE"
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
    if not writers and not embedders:
        return
    yield ApiOperation("GET", "/v1/models", OPENAI, "List the text models", answer=json_content(_LIST))
    if writers:
        chatty = [facts.name for facts in models if facts.name in writers and may_chat(facts)]
        yield from _describe_openai(writers, chatty)
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
