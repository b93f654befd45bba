"""Operations of an app for /openapi.json: POST of each path, with the types of its function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fastserve.backends.script.json_schema import ANY_MEDIA, JSON_MEDIA, PREFIX
from fastserve.serving.api_operations import (
    EVENTS_TYPE,
    MOST_TENSORS,
    ApiOperation,
    ModelFacts,
    Schema,
    array_schema,
    component_name,
    count_values,
    example_array,
    example_value,
    fits_example,
    json_content,
    object_schema,
    types_of,
    value_schema,
)

TAG = "Models"
ARRAYS, STREAM = "script", "script_stream"
KINDS = (ARRAYS, "script_json", STREAM)
LINES_TYPE = "application/jsonl"
Paths = Mapping[int, str]


def paths_of(versions: Paths, name: str) -> Iterator[tuple[str, str]]:
    """Yield each path of a model with its NAME, or NAME/VERSION where not all versions have the path."""
    for number, path in versions.items():
        shared = all(other == path for other in versions.values())
        yield path, name if shared else f"{name}/{number}"


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations of a script's model; none for any other."""
    config = facts.version.config
    if config.backend not in KINDS:
        return
    script = config.parameters.get("script", {})
    numbered = {int(number): path for number, path in script.get("paths", {}).items()}
    for path, found in dict(paths_of(numbered, facts.name)).items():
        number = int(found.rpartition("/")[2]) if "/" in found else facts.version.number
        if config.backend == ARRAYS:
            yield _describe_arrays(facts, path, found)
        else:
            yield _describe_json(facts, path, found, number)


def _describe_json(facts: ModelFacts, path: str, found: str, number: int) -> ApiOperation:
    """Return the operation of a function of JSON."""
    types = types_of(facts.version, number)
    schemas = types.get("schemas", {})
    names = {name: component_name(found, name) for name in schemas}
    body = _refer(types.get("body", {}), names)
    media = types.get("media", ANY_MEDIA)
    answer = json_content(_refer(types.get("answer", {}), names), kind=media)
    if media == ANY_MEDIA:
        answer = {**json_content({}), ANY_MEDIA: {}}
    if facts.version.config.backend == STREAM:
        text = {"schema": {"type": "string"}}
        answer = {LINES_TYPE: text, EVENTS_TYPE: {}, JSON_MEDIA: {}, ANY_MEDIA: {}}
    return ApiOperation(
        "POST",
        path,
        TAG,
        f"Call {found}",
        body=json_content(body, types.get("example", msgspec.UNSET)),
        answer=answer,
        components={names[name]: _refer(schema, names) for name, schema in schemas.items()},
    )


def _refer(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema that refers to components of the document."""
    if isinstance(schema, Mapping):
        found = {key: _refer(value, names) for key, value in schema.items()}
        name = str(found.get("$ref", "")).removeprefix(PREFIX)
        if name in names:
            found["$ref"] = f"#/components/schemas/{names[name]}"
        return found
    return [_refer(one, names) for one in schema] if isinstance(schema, list) else schema


def _describe_arrays(facts: ModelFacts, path: str, found: str) -> ApiOperation:
    """Return the operation of a function of arrays: rows, or one row."""
    version = facts.version
    inputs = dict(list(version.inputs.items())[:MOST_TENSORS])
    one = {name: array_schema(value_schema(spec.dtype), spec.shape) for name, spec in inputs.items()}
    many = {name: {"type": "array", "minItems": 1, "items": schema} for name, schema in one.items()}
    names = list(inputs)
    body: Schema = {"anyOf": [object_schema(one, names), object_schema(many, names)]}
    example: Any = types_of(version, int(found.rpartition("/")[2]) if "/" in found else None).get("example")
    if example is None and fits_example(count_values(spec.shape) for spec in version.inputs.values()):
        example = {
            name: example_array(example_value(spec.dtype), spec.shape)
            for name, spec in version.inputs.items()
        }
    return ApiOperation(
        "POST",
        path,
        TAG,
        f"Call {found}",
        body=json_content(body, msgspec.UNSET if example is None else example),
        answer=json_content({}),
        description="Each input is one row, or a list of rows.",
    )
