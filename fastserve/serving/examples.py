"""Example requests of a loaded model: small bodies that its server answers, to paste, to send, to document.

    example_request(view)     ExampleRequest("V2", "POST", "/v2/models/scale/infer", {"inputs": [...]})

Every axis of a free size has one element and a request has one row, so that a body stays as small as its
model allows. Numbers are ones, since an index of 0 is often padding; strings are words.
"""

from __future__ import annotations

from math import prod
from typing import Any
from urllib.parse import quote

import msgspec

from fastserve.serving.model_view import ModelView, TensorView
from fastserve.tensor import DType, kserve_name

MOST_ELEMENTS = 4096
"""Elements of an example's inputs; a model that wants more has an example without values."""
NO_JSON = frozenset(("float16", "bfloat16", "INVALID"))
"""Types that JSON bodies of V2 cannot hold."""
PROMPT, MAX_TOKENS = "Once upon a time", 32
ARRAYS, FREE, PARTS = "script", "script_json", "script_stream"
"""Backends of a script's models: arrays, free JSON, and free JSON answered in parts."""


class ExampleRequest(msgspec.Struct, kw_only=True):
    """A request of JSON. `body` is None where the values would be too many, or JSON has no word for them."""

    api: str
    method: str
    path: str
    body: dict[str, Any] | None


def example_request(view: ModelView) -> ExampleRequest:
    """Return a request that shows the model best: text to complete, a script's own path, or tensors of V2."""
    config = view.version.config
    if view.version.text is not None:
        asked = {"model": view.model, "prompt": PROMPT, "max_tokens": MAX_TOKENS}
        return ExampleRequest(api="OpenAI", method="POST", path="/v1/completions", body=asked)
    if config.backend in (ARRAYS, FREE, PARTS):
        paths = config.parameters.get("script", {}).get("paths", {})
        path = paths.get(str(view.version.number), f"/{view.model}")
        arrays = {name: example_value(one) for name, one in view.inputs.items()} if fits(view) else None
        body = arrays if config.backend == ARRAYS else {}
        return ExampleRequest(api="JSON", method="POST", path=quote(path), body=body)
    inputs = [example_input(view, tensor) for name, tensor in view.inputs.items() if name in view.required]
    path = f"/v2/models/{quote(view.model, safe='')}/infer"
    return ExampleRequest(api="V2", method="POST", path=path, body={"inputs": inputs} if fits(view) else None)


def fits(view: ModelView) -> bool:
    """Whether the values of an example are few, and of types that JSON has."""
    wanted = [view.inputs[name] for name in view.required]
    few = sum(prod(example_dims(one)) for one in wanted) <= MOST_ELEMENTS
    return few and not any(one.dtype.name in NO_JSON or kserve_name(one.dtype) in NO_JSON for one in wanted)


def example_dims(tensor: TensorView) -> tuple[int, ...]:
    """Return the axes of one row: 1 where any length may be sent, one axis where any rank may."""
    return (1,) if tensor.dims is None else tuple(1 if size < 0 else size for size in tensor.dims)


def example_input(view: ModelView, tensor: TensorView) -> dict[str, Any]:
    """Return a tensor of a V2 request, of one row where the model batches; its data where it is small."""
    dims = example_dims(tensor)
    shape = [1, *dims] if view.batching else [*dims]
    count = prod(dims)
    data = [example_element(tensor.dtype)] * count if count <= MOST_ELEMENTS else []
    return {"name": tensor.name, "shape": shape, "datatype": kserve_name(tensor.dtype), "data": data}


def example_value(tensor: TensorView) -> Any:
    """Return one row as nested lists."""
    value: Any = example_element(tensor.dtype)
    for size in reversed(example_dims(tensor)):
        value = [value] * size
    return value


def example_element(dtype: DType) -> Any:
    if dtype.name == "bytes":
        return "text"
    if dtype.name == "bool":
        return True
    return 1.0 if dtype.name.startswith(("float", "bfloat")) else 1
