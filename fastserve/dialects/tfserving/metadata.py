"""Signature metadata (spec 3.6): what a version's signatures take and give, as protobuf prints JSON.

The body is joined from two printed messages, so its layout is neither the one of `json.dumps` nor
the one of a single message; `signature_def` is nested twice. Both are part of the wire format.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastserve.dialects.tfserving.errors import invalid
from fastserve.dialects.tfserving.lookup import find_version
from fastserve.dialects.tfserving.names import TF_NAME
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.status import print_json
from fastserve.repository.catalog import Catalog
from fastserve.repository.signature import Signature
from fastserve.repository.version import Version
from fastserve.tensor import TensorSpec

Shape = tuple[int, ...] | None


def find_described(catalog: Catalog, target: Target) -> Version:
    """The version a metadata call asks about; labels are resolved here. Raises ServeError."""
    if not target.name:
        raise invalid("Missing model name in request.")
    return find_version(catalog, target)


def write_metadata(version: Version) -> bytes:
    """The whole body of a metadata reply."""
    defs = {
        name: signature_def(signature, batching=version.batching)
        for name, signature in version.signatures.items()
    }
    return join_metadata(version.model, version.number, defs)


def join_metadata(model: str, number: int, signature_defs: Mapping[str, object]) -> bytes:
    """The body from the printed parts. `signature_defs`: name -> what `signature_def` returns."""
    spec = print_json({"name": model, "signature_name": "", "version": str(number)})
    described = print_json({"signature_def": dict(signature_defs)})
    return b'{\n"model_spec":' + spec + b',\n"metadata": {"signature_def": ' + described + b"}\n}\n"


def signature_def(signature: Signature, *, batching: bool) -> dict[str, object]:
    """One signature as a SignatureDef message; shapes get their batch axis back as -1."""
    return {
        "inputs": _side(signature.inputs, signature.input_names, batching),
        "outputs": _side(signature.outputs, signature.output_names, batching),
        "method_name": f"tensorflow/serving/{signature.method}",
        "defaults": {},
    }


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
    lines: list[str] = []
    for side, specs, names in (
        ("inputs", signature.inputs, signature.input_names),
        ("outputs", signature.outputs, signature.output_names),
    ):
        for alias, spec in specs.items():
            dims = "".join(f" dim {{ size: {size} }}" for size in _full_shape(spec, batching) or ())
            lines.append(
                f'{side} {{ key: "{alias}" value {{ name: "{names[alias]}:0" '
                f"dtype: {TF_NAME[spec.dtype.code]} tensor_shape {{{dims} }} }} }}"
            )
    lines.append(f'method_name: "tensorflow/serving/{signature.method}"')
    return "\n".join(lines) + "\n"


def _side(specs: Mapping[str, TensorSpec], names: Mapping[str, str], batching: bool) -> dict[str, object]:
    return {
        alias: tensor_info(f"{names[alias]}:0", TF_NAME[spec.dtype.code], _full_shape(spec, batching))
        for alias, spec in specs.items()
    }


def _full_shape(spec: TensorSpec, batching: bool) -> Shape:
    if spec.shape is None or not batching:
        return spec.shape
    return (-1, *spec.shape)
