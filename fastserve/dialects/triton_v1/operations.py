"""Operations of the V1 HTTP API for /openapi.json: status, and inference with raw tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fastserve.serving.model_view import TensorView
from fastserve.serving.operations import MOST_TENSORS, TEXT_TYPE, ApiOperation, ModelFacts, count_values

TAG = "V1 (TensorRT Inference Server)"
RAW = "application/octet-stream"
REQUEST = "NV-InferRequest"
MOST_RAW_BYTES = 4096
ABOUT = (
    f"The header {REQUEST} says what is asked, as text of protobuf; the body has the inputs' values one "
    "behind the other, little-endian. The answer begins with the outputs' values, and its header "
    "NV-InferResponse describes them."
)
_TEXT = {"schema": {"type": "string"}}


def describe_server(settings: object, models: Sequence[ModelFacts]) -> Iterator[ApiOperation]:
    """Yield the operations that are of no model."""
    yield ApiOperation(
        "GET", "/api/status", TAG, "Describe the server", answer={TEXT_TYPE: _TEXT}, error_type=""
    )
    for word in ("live", "ready"):
        summary = f"Tell whether the server is {word}"
        yield ApiOperation("GET", f"/api/health/{word}", TAG, summary, error_type="")


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operations of a model; none where its tensors have no fixed size."""
    yield ApiOperation(
        "GET",
        f"/api/status/{facts.quoted}",
        TAG,
        f"Status of {facts.name}",
        answer={TEXT_TYPE: _TEXT},
        error_type="",
    )
    inputs, outputs = list(facts.view.inputs.values()), list(facts.view.outputs.values())
    if not inputs or not outputs or facts.view.decoupled or len(inputs) + len(outputs) > MOST_TENSORS:
        return
    if not all(_is_fixed(tensor) for tensor in inputs):
        return
    size = sum(count_values(tensor.dims) * tensor.dtype.item_bytes for tensor in inputs)
    media: dict[str, Any] = {"schema": {"type": "string", "contentMediaType": RAW}}
    if size <= MOST_RAW_BYTES:
        media["example"] = "\0" * size  # zeros of any type
    header = _header(facts, inputs, outputs)
    yield ApiOperation(
        "POST",
        f"/api/infer/{facts.quoted}",
        TAG,
        f"Infer by {facts.name}",
        body={RAW: media},
        answer={RAW: {}},
        description=ABOUT,
        parameters=[
            {
                "name": REQUEST,
                "in": "header",
                "required": True,
                "schema": {"type": "string"},
                "example": header,
            }
        ],
        error_type="",
    )


def _is_fixed(tensor: TensorView) -> bool:
    return bool(tensor.dtype.item_bytes and tensor.dims is not None and -1 not in tensor.dims)


def _header(facts: ModelFacts, inputs: Sequence[TensorView], outputs: Sequence[TensorView]) -> str:
    """Return the header of a request of one row."""
    parts = ["batch_size: 1"]
    for tensor in inputs:
        dims = "".join(f" dims: {size}" for size in tensor.dims or ())
        wanted = dims if prod(tensor.dims or ()) else ""
        parts.append(f"input {{ name: {_quoted(tensor.name)}{wanted} }}")
    parts += [f"output {{ name: {_quoted(tensor.name)} }}" for tensor in outputs]
    return " ".join(parts)


def _quoted(name: str) -> str:
    """Return a string of protobuf's text format."""
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in name.encode()
    )
    return f'"{escaped}"'
