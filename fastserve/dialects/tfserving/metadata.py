"""Model status and signature metadata (spec 3.6), as protobuf prints JSON.

A metadata body is joined from two printed messages, so its layout is neither the one of `json.dumps` nor
the one of a single message; `signature_def` is nested twice. Both are part of the wire format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from fastserve.codec.json_text import to_bytes
from fastserve.dialects.tfserving.errors import TF_NAME
from fastserve.dialects.tfserving.routes import Target
from fastserve.errors import Kind, ServeError
from fastserve.protos.text import quote
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import Signature
from fastserve.repository.version import Version, VersionState
from fastserve.serving.model_control import DORMANT, waits_for_demand
from fastserve.tensor import TensorSpec

Shape = tuple[int, ...] | None


def find_versions(catalog: Catalog, target: Target) -> list[Version]:
    """The versions a status call asks about. A label is ignored, as the original does. Raises ServeError."""
    model = catalog.models.get(target.name)
    if model is None or not model.versions:
        catalog.explain_absence(target.name)
        raise ServeError(Kind.NOT_FOUND, f"Could not find any versions of model {target.name}")
    if target.version is None:
        return list(model.versions.values())
    if target.version not in model.versions:
        catalog.explain_absence(target.name)
        raise ServeError(Kind.NOT_FOUND, f"Could not find version {target.version} of model {target.name}")
    return [model.versions[target.version]]


def write_status(versions: Iterable[Version], card: Mapping[str, object] | None = None) -> bytes:
    """The whole body of a status reply. `card`: what other APIs that have this path want to read besides."""
    return print_json({**status_of(versions), **(card or {})})


def status_of(versions: Iterable[Version]) -> dict[str, object]:
    """A GetModelStatusResponse: every version ever seen, highest first."""
    rows = sorted(versions, key=lambda version: version.number, reverse=True)
    return {"model_version_status": [_version_status(version) for version in rows]}


def _version_status(version: Version) -> dict[str, object]:
    error = version.error
    dormant = waits_for_demand(version)
    return {
        "version": str(version.number),
        "state": VersionState.AVAILABLE.name if dormant else version.state.name,
        "status": {
            "error_code": error.kind.name if error else "OK",
            "error_message": error.message if error else DORMANT if dormant else "",
        },
    }


def write_metadata(version: Version) -> bytes:
    """The whole body of a metadata reply."""
    signatures = version.signatures.items()
    defs = {name: signature_def(each, batching=version.batching) for name, each in signatures}
    return join_metadata(version.model, version.number, defs)


def join_metadata(model: str, number: int, signature_defs: Mapping[str, object]) -> bytes:
    """The body from the printed parts. `signature_defs`: name -> what `signature_def` returns."""
    spec = print_json({"name": model, "signature_name": "", "version": str(number)})
    described = print_json({"signature_def": dict(signature_defs)})
    return b'{\n"model_spec":' + spec + b',\n"metadata": {"signature_def": ' + described + b"}\n}\n"


def signature_def(signature: Signature, *, batching: bool) -> dict[str, object]:
    """One signature as a SignatureDef message."""
    sides = {
        side: {alias: tensor_info(*info) for alias, info in _infos(specs, names, batching).items()}
        for side, specs, names in _sides(signature)
    }
    return {**sides, "method_name": f"tensorflow/serving/{signature.method}", "defaults": {}}


def tensor_info(name: str, dtype: str, shape: Shape) -> dict[str, object]:
    """One tensor as a TensorInfo message; a shape of None is an unknown rank."""
    dims = [{"size": str(size), "name": ""} for size in shape or ()]
    return {
        "dtype": dtype,
        "tensor_shape": {"dim": dims, "unknown_rank": shape is None},
        "name": name,
    }


def signature_text(signature: Signature, *, batching: bool) -> str:
    """A SignatureDef in protobuf's text form, as two error texts of 3.5 end with it."""
    lines = []
    for side, specs, names in _sides(signature):
        for alias, (name, dtype, shape) in _infos(specs, names, batching).items():
            dims = "".join(f" dim {{ size: {size} }}" for size in shape or ())
            info = f"name: {quote(name)} dtype: {dtype} tensor_shape {{{dims} }}"
            lines.append(f"{side} {{ key: {quote(alias)} value {{ {info} }} }}")
    lines.append(f'method_name: "tensorflow/serving/{signature.method}"')
    return "\n".join(lines) + "\n"


def _sides(signature: Signature) -> Sequence[tuple[str, Mapping[str, TensorSpec], Mapping[str, str]]]:
    return (
        ("inputs", signature.inputs, signature.input_names),
        ("outputs", signature.outputs, signature.output_names),
    )


def _infos(
    specs: Mapping[str, TensorSpec], names: Mapping[str, str], batching: bool
) -> dict[str, tuple[str, str, Shape]]:
    """Name, type and shape of each tensor; shapes get their batch axis back as -1."""
    return {
        alias: (
            f"{names[alias]}:0",
            TF_NAME[spec.dtype.code],
            spec.shape if spec.shape is None or not batching else (-1, *spec.shape),
        )
        for alias, spec in specs.items()
    }


def print_json(message: Mapping[str, object]) -> bytes:
    """`message` laid out as protobuf's JSON printer does: one space of indent, a newline at the end."""
    text = json.dumps(message, indent=1, ensure_ascii=False)
    # The printer keeps its output safe inside HTML; these two occur inside strings only.
    text = text.replace("<", "\\u003c").replace(">", "\\u003e")
    return to_bytes(text) + b"\n"
