"""Operations of the REST API for /openapi.json: status, metadata, predict, classify and regress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from fastserve.repository.signature import DEFAULT_SIGNATURE, Signature
from fastserve.serving.operations import (
    MANY_TENSORS,
    MOST_TENSORS,
    ApiOperation,
    ModelFacts,
    Schema,
    array_schema,
    count_values,
    example_array,
    example_text,
    example_value,
    fits_example,
    json_content,
    object_schema,
    value_schema,
)
from fastserve.tensor import TensorSpec

TAG = "TensorFlow Serving"
ROWS = "`instances` has a row of each; `inputs` has a whole tensor of each."
_BASE64 = object_schema({"b64": {"type": "string"}}, ["b64"])
_STATUS = object_schema({"model_version_status": {"type": "array", "items": {"type": "object"}}})
_METADATA = object_schema({"model_spec": {"type": "object"}, "metadata": {"type": "object"}})
_ANSWER = {"anyOf": [object_schema({}, ["predictions"]), object_schema({}, ["outputs"])]}
_RESULTS = object_schema({"results": {"type": "array"}}, ["results"])


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations of a model."""
    path = f"/v1/models/{facts.quoted}"
    yield ApiOperation("GET", path, TAG, f"Status of {facts.name}", answer=json_content(_STATUS))
    yield ApiOperation(
        "GET", f"{path}/metadata", TAG, f"Signatures of {facts.name}", answer=json_content(_METADATA)
    )
    by_method: dict[str, dict[str, Signature]] = {}
    for name, signature in sorted(
        facts.version.signatures.items(), key=lambda item: item[0] != DEFAULT_SIGNATURE
    ):
        if signature.inputs:
            by_method.setdefault(signature.method, {})[name] = signature
    for method, signatures in by_method.items():
        body, answer = (
            (_predict_body(facts, signatures), _ANSWER)
            if method == "predict"
            else (_examples_body(facts, signatures), _RESULTS)
        )
        yield ApiOperation(
            "POST",
            f"{path}:{method}",
            TAG,
            f"{method.title()} by {facts.name}",
            body=body,
            answer=json_content(answer),
            description=ROWS if method == "predict" else "",
        )


def _predict_body(facts: ModelFacts, signatures: Mapping[str, Signature]) -> dict[str, Any]:
    """Return the content of a predict request; its tensors are those of the first signature."""
    name, signature = next(iter(signatures.items()))
    batching = facts.version.batching
    described = dict(list(signature.inputs.items())[:MOST_TENSORS])
    rows = {alias: _tensor_schema(spec, spec.shape) for alias, spec in described.items()}
    if len(signature.inputs) == 1:
        (row,) = rows.values()
        row = {"anyOf": [row, object_schema(rows, list(rows))]}
    else:
        row = object_schema(rows, [] if facts.version.config.options.optional_inputs else list(rows))
    columns = {alias: _tensor_schema(spec, _full(spec.shape, batching)) for alias, spec in described.items()}
    schema = {
        "type": "object",
        "properties": {
            "signature_name": {"type": "string", "enum": list(signatures)},
            "instances": {"type": "array", "minItems": 1, "items": row},
            "inputs": object_schema(columns) if 1 < len(columns) <= MANY_TENSORS else {},
        },
        "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    }
    example: dict[str, Any] = {} if name == DEFAULT_SIGNATURE else {"signature_name": name}
    sizes = (count_values(spec.shape) for spec in signature.inputs.values())
    if facts.text is not None or not fits_example(sizes):  # a text model's strings are JSON, and more
        return json_content(schema)
    values = {alias: _example(facts, spec, spec.shape) for alias, spec in signature.inputs.items()}
    if not batching:
        return json_content(schema, {**example, "inputs": values})
    instance = next(iter(values.values())) if len(signature.inputs) == 1 else values
    return json_content(schema, {**example, "instances": [instance]})


def _examples_body(facts: ModelFacts, signatures: Mapping[str, Signature]) -> dict[str, Any]:
    """Return the content of a classify or regress request: examples of features."""
    name, signature = next(iter(signatures.items()))
    features = {feature: signature.inputs[alias] for feature, alias in signature.features.items()}
    properties = {feature: _feature_schema(spec) for feature, spec in features.items()}
    item = object_schema(dict(list(properties.items())[:MOST_TENSORS]))
    schema = object_schema(
        {
            "signature_name": {"type": "string", "enum": list(signatures)},
            "examples": {"type": "array", "minItems": 1, "items": item},
        },
        ["examples"],
    )
    if not fits_example(count_values(spec.shape) for spec in features.values()):
        return json_content(schema)
    example = {
        feature: [example_value(spec.dtype, example_text(facts.version))] * count_values(spec.shape)
        for feature, spec in features.items()
    }
    named = {} if name == DEFAULT_SIGNATURE else {"signature_name": name}
    return json_content(schema, {**named, "examples": [example]})


def _feature_schema(spec: TensorSpec) -> Schema:
    """Return the schema of a feature: a value, or a flat list of them."""
    value = _value_schema(spec)
    return {"anyOf": [value, {"type": "array", "items": value}]}


def _tensor_schema(spec: TensorSpec, shape: tuple[int, ...] | None) -> Schema:
    return array_schema(_value_schema(spec), shape)


def _value_schema(spec: TensorSpec) -> Schema:
    value = value_schema(spec.dtype)
    return {"anyOf": [value, _BASE64]} if spec.dtype.name == "bytes" else value


def _full(shape: tuple[int, ...] | None, batching: bool) -> tuple[int, ...] | None:
    """Return a whole tensor's shape."""
    return shape if shape is None else tuple(chain((-1,) if batching else (), shape))


def _example(facts: ModelFacts, spec: TensorSpec, shape: tuple[int, ...] | None) -> Any:
    return example_array(example_value(spec.dtype, example_text(facts.version)), shape)
