"""Structured answers as requests ask for them: OpenAI's and vLLM's keys, and TGI's `grammar`.

    response_format     {"type": "json_schema", "json_schema": {"name": "x", "schema": {...}}}      OpenAI
                        {"type": "json_object"}, with llama.cpp's `schema` too
                        {"type": "json" | "json_schema" | "regex", "value": ...}                    TGI
    guided_json, guided_regex, guided_choice, guided_grammar                                        vLLM
    structured_outputs  {"json" | "regex" | "choice" | "grammar": ..., "json_object": true}         vLLM
    grammar             {"type": "json" | "json_schema" | "regex", "value": ...}                    TGI

All of them give one `Grammar`. Whether it can be used is for the model's worker to say, which compiles it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from fastserve.codec.generation import Grammar, GrammarKind
from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.text_common.endpoint_parts import BOUNDS, InvalidBody, check, read_typed

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
Value = Raw | UnsetType
NonEmpty = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[NonEmpty], Meta(min_length=1, max_length=4096)]
NamedGrammar = tuple[str, Grammar]
"""The place of a grammar in the body, and the grammar."""


class NamedSchema(msgspec.Struct):
    """A schema with a name. `name`, `description` and `strict` change nothing: an answer always belongs to
    its schema."""

    schema: Value = UNSET


class ResponseFormat(msgspec.Struct):
    """The form of an answer; TGI's `grammar` has `type` and `value` of these."""

    type: str
    json_schema: NamedSchema | None = None
    schema: Value = UNSET
    value: Value = UNSET


class StructuredOutputs(msgspec.Struct, rename={"json_schema": "json"}):
    """vLLM's key. Its settings of white space and of backends are ignored."""

    json_schema: Value = UNSET
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None


class GrammarFields(msgspec.Struct, kw_only=True):
    """Keys of OpenAI's and vLLM's bodies."""

    response_format: ResponseFormat | None = None
    guided_json: Value = UNSET
    guided_regex: NonEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmpty | None = None
    structured_outputs: StructuredOutputs | None = None


_FORMAT: FreeJSON[ResponseFormat] = FreeJSON(ResponseFormat, BOUNDS)
_NAMED: FreeJSON[NamedSchema] = FreeJSON(NamedSchema, BOUNDS)
_TEXT: FreeJSON[str] = FreeJSON(str, BOUNDS)


def read_grammar(body: GrammarFields) -> Grammar | None:
    """Return the grammar that the answer is to belong to; None for any text. Raises InvalidBody."""
    given = body.structured_outputs or StructuredOutputs()
    found = [
        *_read_format(body.response_format, "response_format"),
        *_read_schema(body.guided_json, "guided_json"),
        *_read_text("regex", body.guided_regex, "guided_regex"),
        *_read_choices(body.guided_choice, "guided_choice"),
        *_read_text("grammar", body.guided_grammar, "guided_grammar"),
        *_read_schema(given.json_schema, "structured_outputs.json"),
        *_read_text("regex", given.regex, "structured_outputs.regex"),
        *_read_choices(given.choice, "structured_outputs.choice"),
        *_read_text("grammar", given.grammar, "structured_outputs.grammar"),
        *([("structured_outputs.json_object", ANY_OBJECT)] if given.json_object else []),
    ]
    if len(found) > 1:
        check(False, found[1][0], f"cannot be combined with `{found[0][0]}`")
    return found[0][1] if found else None


def read_tgi_grammar(raw: Value) -> Grammar | None:
    """Return TGI's `grammar`; None for any text. Raises InvalidBody."""
    if isinstance(raw, UnsetType) or is_absent(raw):
        return None
    try:
        given = read_typed(_FORMAT, bytes(raw))
    except InvalidBody:
        raise InvalidBody("`grammar` must be an object with `type` and `value`", "grammar") from None
    known = given.type in ("json", "json_schema", "regex")
    check(known, "grammar.type", "must be json, json_schema or regex")
    return _read_format(given, "grammar")[0][1]


def is_absent(raw: Value) -> bool:
    """Return whether a key is absent or null."""
    return isinstance(raw, UnsetType) or bytes(raw).strip() == b"null"


def _read_format(given: ResponseFormat | None, place: str) -> list[NamedGrammar]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return _read_schema(given.schema, f"{place}.schema") or [(place, ANY_OBJECT)]
    if given.type == "json_schema" and given.json_schema is not None:
        return _read_wanted(given.json_schema.schema, f"{place}.json_schema.schema")
    if given.type == "json_schema" and not is_absent(given.value):
        named = read_typed(_NAMED, _object_text(given.value, f"{place}.value").encode())
        return _read_wanted(named.schema, f"{place}.value.schema")
    if given.type == "json":
        return _read_wanted(given.value, f"{place}.value")
    if given.type == "regex":
        return [(place, Grammar("regex", _read_regex(given.value, f"{place}.value")))]
    check(given.type != "json_schema", f"{place}.json_schema", "is required")
    check(False, f"{place}.type", f"'{given.type:.64}' is not supported")
    return []


def _read_wanted(raw: Value, place: str) -> list[NamedGrammar]:
    check(not is_absent(raw), place, "is required")
    return _read_schema(raw, place)


def _read_schema(raw: Value, place: str) -> list[NamedGrammar]:
    if is_absent(raw):
        return []
    return [(place, Grammar("json_schema", _object_text(raw, place)))]


def _object_text(raw: Value, place: str) -> str:
    """Return the text of an object, or of the object that a string has as JSON. Raises InvalidBody."""
    text = "" if isinstance(raw, UnsetType) else bytes(raw).decode().strip()
    if text.startswith('"'):
        text = read_typed(_TEXT, text.encode()).strip()
    check(text.startswith("{"), place, "must be an object, a JSON schema")
    return text


def _read_text(kind: GrammarKind, text: str | None, place: str) -> list[NamedGrammar]:
    return [] if text is None else [(place, Grammar(kind, text))]


def _read_choices(choices: list[str] | None, place: str) -> list[NamedGrammar]:
    if choices is None:
        return []
    return [(place, Grammar("choice", msgspec.json.encode(choices).decode()))]


def _read_regex(raw: Value, place: str) -> str:
    text = "" if isinstance(raw, UnsetType) else bytes(raw).decode().strip()
    check(text.startswith('"') and text != '""', place, "must be a regular expression, a string")
    return read_typed(_TEXT, text.encode())
