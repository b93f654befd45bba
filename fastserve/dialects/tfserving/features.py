"""Examples -> a model's input tensors, as TensorFlow's parse_example op does it (spec 3.4, 3.5).

Two ways, chosen by the signature: one string input called `inputs` is fed serialized tf.Example
bytes; otherwise each declared feature fills the input it is mapped to, one row an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fastserve.codec.packing import pack_strings, pack_values
from fastserve.dialects.tfserving.examples import (
    Example,
    ExampleList,
    Feature,
    FeatureKind,
    check_repeated,
)
from fastserve.dialects.tfserving.names import TF_WORD, shape_text
from fastserve.errors import invalid
from fastserve.repository.signature import Signature
from fastserve.tensor import DTYPES, DType, Tensor, TensorSpec

SERIALIZED = "inputs"
_ABSENT = Feature()
_KIND_WORD: dict[FeatureKind, str] = {"int64": "int64", "float": "float", "bytes": "string"}


def takes_serialized(signature: Signature) -> bool:
    """Whether examples are fed as tf.Example bytes: one string input called `inputs`, no other features."""
    spec = signature.inputs.get(SERIALIZED)
    only = len(signature.inputs) == 1 and spec is not None and spec.dtype.name == "bytes"
    return only and set(signature.features) <= {SERIALIZED}


def feed(examples: ExampleList, signature: Signature, *, batching: bool) -> dict[str, Tensor]:
    """Tensors by the model's own input names, first axis the examples. Raises ServeError."""
    names = signature.input_names
    if takes_serialized(signature):
        rows = examples.serialized()
        return {names[SERIALIZED]: Tensor(DTYPES["bytes"], (len(rows),), pack_strings(rows))}
    merged = examples.merged()
    return {
        names[alias]: decode_feature(name, _row_spec(signature.inputs[alias], batching), merged)
        for name, alias in signature.features.items()
    }


def decode_feature(name: str, spec: TensorSpec, examples: Sequence[Example]) -> Tensor:
    """One feature of every example as a tensor of shape (examples, *row shape of `spec`).

    An axis of -1 takes any length and is padded to the longest with zeros or empty strings; every
    other shape must be met exactly, and for an unknown rank the first example sets the length.
    Raises ServeError.
    """
    wanted = _kind_of(spec.dtype)
    shape = (len(examples[0].get(name, _ABSENT).values),) if spec.shape is None else spec.shape
    columns = [_values(name, index, wanted, shape, example) for index, example in enumerate(examples)]
    if -1 in shape:
        shape = _filled_shape(shape, max(len(values) for values in columns))
    check_repeated(prod(shape) * len(columns), f"values of feature {name}")
    filler = b"" if wanted == "bytes" else 0
    size = prod(shape)
    flat = [value for values in columns for value in (*values, *[filler] * (size - len(values)))]
    if spec.dtype.name == "bool":
        flat = [bool(value) for value in flat]
    # Packing cuts integers to the width of the input, as the model's own cast would.
    return Tensor(spec.dtype, (len(examples), *shape), pack_values(flat, spec.dtype))


def _values(
    name: str, index: int, wanted: FeatureKind, shape: tuple[int, ...], example: Example
) -> Sequence[int | float | bytes]:
    feature = example.get(name, _ABSENT)
    if not feature.kind:
        if -1 in shape:
            return ()
        raise invalid(
            f"Name: <unknown>, Feature: {name} (data type: {_KIND_WORD[wanted]}) "
            "is required but could not be found."
        )
    where = f"Name: <unknown>, Key: {name}, Index: {index}.  "
    if feature.kind != wanted:
        raise invalid(
            f"{where}Data types don't match. Data type: {_KIND_WORD[feature.kind]} "
            f"but expected type: {_KIND_WORD[wanted]}"
        )
    if not _fits(len(feature.values), shape):
        raise invalid(
            f"{where}Number of {wanted} values != expected.  "
            f"Values size: {len(feature.values)} but output shape: {shape_text(shape)}"
        )
    return feature.values


def _fits(count: int, shape: tuple[int, ...]) -> bool:
    if -1 not in shape:
        return count == prod(shape)
    unit = prod(size for size in shape if size >= 0)
    return count == 0 if unit == 0 else count % unit == 0


def _filled_shape(shape: tuple[int, ...], longest: int) -> tuple[int, ...]:
    unit = prod(size for size in shape if size >= 0)
    first = shape.index(-1)
    length = longest // unit if unit else 0
    return tuple(
        length if axis == first else max(size, 1 if size < 0 else size) for axis, size in enumerate(shape)
    )


def _kind_of(dtype: DType) -> FeatureKind:
    if dtype.name == "bytes":
        return "bytes"
    if dtype.name in ("float32", "float64"):
        return "float"
    if dtype.name == "bool" or dtype.name.startswith(("int", "uint")):
        return "int64"
    raise invalid(f"Conversion of a feature to type: {TF_WORD[dtype.code]}")


def _row_spec(spec: TensorSpec, batching: bool) -> TensorSpec:
    if batching or not spec.shape:
        return spec
    return TensorSpec(spec.name, spec.dtype, spec.shape[1:])
