"""Operations: what a dialect says of its routes, from which /openapi.json is made.

    def describe_model(facts):                                   of each model; DialectSpec.describe_model
        yield ApiOperation("POST", f"/echo/{facts.name}", "Echo", "Echo a value", body=json_content({}, 1))

The document has an operation where the router of a listener gives its path to the dialect that describes it;
scope and resources are those of that route. Schemas are JSON Schema's of 2020-12, as OpenAPI 3.1 has them.
Examples are requests that the model answers with 200, as far as its tensors say what it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from fastserve.codec.generation import Info
from fastserve.repository.version import Version
from fastserve.serving.model_view import ModelView
from fastserve.tensor import DType

Schema = dict[str, Any]
JSON_TYPE, EVENTS_TYPE, TEXT_TYPE = "application/json", "text/event-stream", "text/plain"
MOST_TENSORS = 128
"""Tensors of a model that are described by name."""
MANY_TENSORS = 16
"""Of a model with more, one form of a request is described, and not all."""
MOST_VALUES = 4096
"""Numbers of an example, all its tensors together."""
_BITS = re.compile(r"(u?)int([0-9]+)")
_COMPONENT = re.compile(r"[^A-Za-z0-9._-]")


class ModelFacts(NamedTuple):
    """A model as dialects describe it: its newest version; `text` of a text engine."""

    view: ModelView
    text: Info | None = None

    @property
    def version(self) -> Version:
        return self.view.version

    @property
    def name(self) -> str:
        return self.view.model

    @property
    def quoted(self) -> str:
        """Its name in a path."""
        return quote(self.name, safe="")


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One method of one path. `body` and `answer` are OpenAPI's maps by media type (`json_content`)."""

    method: str
    path: str
    tag: str
    summary: str
    body: Mapping[str, Any] | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    parameters: Sequence[Mapping[str, Any]] = ()
    statuses: Mapping[str, str] = field(default_factory=dict)
    """Further statuses, beside 200 and those of errors."""
    error_type: str = JSON_TYPE
    """The media type of its errors; "" where they have no body."""
    components: Mapping[str, Schema] = field(default_factory=dict)
    """Schemas that its own refer to, by their names in the document."""

    def document(self, name: str) -> dict[str, Any]:
        """Return it as OpenAPI's Operation Object."""
        errors: dict[str, Any] = {"content": {self.error_type: {"schema": {}}}} if self.error_type else {}
        found: dict[str, Any] = {"operationId": name, "tags": [self.tag], "summary": self.summary}
        if self.description:
            found["description"] = self.description
        if self.parameters:
            found["parameters"] = list(self.parameters)
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": self.body}
        found["responses"] = {
            "200": {"description": "The answer.", **({"content": self.answer} if self.answer else {})},
            **{status: {"description": text} for status, text in self.statuses.items()},
            "4XX": {"description": "The request is refused; the body says why.", **errors},
            "5XX": {"description": "The model failed, or the server is too busy.", **errors},
        }
        return found


def nothing_of_server(settings: object, models: Sequence[ModelFacts]) -> Iterator[ApiOperation]:
    """Describe no operation of the server's."""
    yield from ()


def nothing_of_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Describe no operation of a model's."""
    yield from ()


def json_content(schema: Schema, example: Any = msgspec.UNSET, kind: str = JSON_TYPE) -> dict[str, Any]:
    """Return OpenAPI's content of a body of JSON."""
    media: dict[str, Any] = {"schema": schema}
    if example is not msgspec.UNSET:
        media["example"] = example
    return {kind: media}


def object_schema(properties: Mapping[str, Any], required: Sequence[str] = (), **more: Any) -> Schema:
    """Return the schema of an object with these members, and any others."""
    found: Schema = {"type": "object", "properties": dict(properties), **more}
    if required:
        found["required"] = list(required)
    return found


def value_schema(dtype: DType) -> Schema:
    """Return the schema of one element."""
    if dtype.name == "bool":
        return {"type": "boolean"}
    if dtype.name == "bytes":
        return {"type": "string"}
    bits = _BITS.fullmatch(dtype.name)
    if bits is None:
        return {"type": "number"}
    size = int(bits[2])
    low, high = (0, 2**size - 1) if bits[1] else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
    return {"type": "integer", "minimum": low, "maximum": high}


def array_schema(items: Schema, dims: Sequence[int] | None) -> Schema:
    """Return the schema of nested lists of these lengths, -1 for any; of any nesting for None."""
    if dims is None:
        return {}
    for size in reversed(dims):
        sizes = {} if size < 0 else {"minItems": size, "maxItems": size}
        items = {"type": "array", "items": items, **sizes}
    return items


def count_values(dims: Sequence[int] | None) -> int:
    """Return how many values an example of these axes has."""
    return prod(1 if size < 0 else size for size in dims or ())


def fits_example(sizes: Iterator[int]) -> bool:
    """Return whether tensors of so many values are small enough for an example."""
    left = MOST_VALUES
    for number, size in enumerate(sizes, 1):
        left -= size
        if left < 0 or number > MOST_TENSORS:
            return False
    return True


def example_value(dtype: DType, text: str = "text") -> Any:
    """Return a value that is good for an element."""
    if dtype.name == "bytes":
        return text
    if dtype.name == "bool":
        return False
    return 1 if _BITS.fullmatch(dtype.name) else 0.5


def example_array(value: Any, dims: Sequence[int] | None) -> Any:
    """Return nested lists of one value, of these lengths; one item where any length will do."""
    for size in reversed(dims or ()):
        value = [value] * (1 if size < 0 else size)
    return value


def example_text(version: Version) -> str:
    """Return a good value of a string: of a function of JSON its body, of any other model a word."""
    types = types_of(version)
    return msgspec.json.encode(types["example"]).decode() if "body" in types else "text"


def types_of(version: Version, number: int | None = None) -> dict[str, Any]:
    """Return what a script's function says of its bodies: `body`, `answer`, `example`, `schemas`, ..., where
    it is one."""
    script = version.config.parameters.get("script")
    types = script.get("types") if isinstance(script, Mapping) else None
    found = types.get(str(number or version.number)) if isinstance(types, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def component_name(*parts: str) -> str:
    """Return a name that OpenAPI allows for a component."""
    return _COMPONENT.sub("_", ".".join(parts))
