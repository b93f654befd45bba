"""Classify and regress bodies -> examples, and examples as tf.Example bytes (spec 3.4, 4.1).

An example is a mapping of feature name to feature; a feature is a flat list of one kind. What a
model makes of them is `features`.

    {"examples": [{"x": 1.0}]}  ->  ExampleList("", [{"x": Feature("float", [1.0])}], None)
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fastserve._ext.json_value import Members
from fastserve.codec.client_text import to_bytes, to_text
from fastserve.codec.packing import pack_values
from fastserve.codec.proto_fields import write_field, write_varint
from fastserve.dialects.tfserving.document import (
    decode_base64_object,
    format_error,
    is_base64_object,
    kind_word,
    read_document,
    read_signature_name,
)
from fastserve.errors import invalid
from fastserve.tensor import DTYPES

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value

FeatureKind = Literal["", "int64", "float", "bytes"]
_KIND_OF: dict[type, FeatureKind] = {int: "int64", bool: "int64", float: "float", bytes: "bytes"}
INT64_MAX = 2**63 - 1
MOST_REPEATED = 1 << 22
"""Values that a body is made into by repetition: what it says once, for every example."""
REPEATED_BYTES = 16
"""Bytes that count as one of them."""


def check_repeated(count: int, what: str) -> None:
    """Raises ServeError where a small body would become too much."""
    if count > MOST_REPEATED:
        raise invalid(f"The {what}, repeated for every example, are over the limit of {MOST_REPEATED}")


@dataclass(slots=True)
class Feature:
    """One feature: `kind` is "" while it has no element. Floats are already rounded to float32."""

    kind: FeatureKind = ""
    values: list[int] | list[float] | list[bytes] = field(default_factory=list)


Example = dict[str, Feature]


@dataclass(slots=True)
class ExampleList:
    """What a classify or regress body asks for. `context` is None when the body has none."""

    signature_name: str
    examples: list[Example]
    context: Example | None

    def merged(self) -> list[Example]:
        """Every example on top of the context; an example's own feature wins. Raises ServeError."""
        context = self.context
        check_repeated(len(context or ()) * len(self.examples), "features of the context")
        return [{**context, **example} for example in self.examples] if context else self.examples

    def serialized(self) -> list[bytes]:
        """Every example as the bytes of a tf.Example, the context's own bytes in front. Raises ServeError."""
        head = serialize_example(self.context) if self.context is not None else b""
        check_repeated(len(head) * len(self.examples) // REPEATED_BYTES, "bytes of the context")
        return [head + serialize_example(example) for example in self.examples]


def read_examples(body: bytes | bytearray) -> ExampleList:
    """A classify or regress body. Raises ServeError with the original's text."""
    document = read_document(body)
    name = read_signature_name(document)
    context = _read_example(document.get(b"context")) if b"context" in document else None
    if b"examples" not in document:
        # The original says "classify" for both verbs.
        raise format_error(document, "When method is classify, key 'examples' is expected and was not found")
    given = document.get(b"examples")
    if not isinstance(given, list):
        raise format_error(document, "Expecting 'examples' value to be an list/array")
    if not given:
        raise format_error(document, "'examples' value is an empty array")
    return ExampleList(name, [_read_example(value) for value in given], context)


def _read_example(value: Value) -> Example:
    if not isinstance(value, Members):
        raise invalid(f"Example must be JSON object but got JSON {kind_word(value)}")
    example = {}
    for key, given in value:
        name = to_text(key)
        example[name] = _read_feature(name, given)
    return example


def _read_feature(name: str, given: Value) -> Feature:
    values: list[Any] = given if isinstance(given, list) else [given]
    if set(map(type, values)) == {float}:
        return Feature("float", array("f", values).tolist())  # beyond the range of float32: infinite
    kind: FeatureKind = ""
    read: list[Any] = []
    for value in values:
        kind = _kind_of(name, value, kind)
        if isinstance(value, Members):
            read.append(decode_base64_object(value))
        else:
            read.append(int(value) if isinstance(value, bool) else value)
    return Feature(kind, read)


def _kind_of(name: str, value: Value, expected: FeatureKind) -> FeatureKind:
    kind = _KIND_OF.get(type(value)) or ("bytes" if is_base64_object(value) else "")
    if not kind:
        raise invalid(f"Feature: {name} has element with unexpected JSON type: {kind_word(value)}")
    if isinstance(value, int) and value > INT64_MAX:
        raise invalid(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
    if expected and kind != expected:
        raise invalid(f"Unexpected element type in feature: {name} expecting type: {expected}")
    return kind


# tf.Example on the wire: Example{1: Features{1: map<string, Feature>}}; Feature is one of the lists,
# each with its values in field 1. Only length-delimited fields and varints occur.
_LIST_FIELD = {"bytes": 1, "float": 2, "int64": 3}


def serialize_example(example: Mapping[str, Feature]) -> bytes:
    """An example as tf.Example bytes, features in the order given."""
    entries = (
        write_field(1, to_bytes(name)) + write_field(2, _serialize_feature(feature))
        for name, feature in example.items()
    )
    return write_field(1, b"".join(write_field(1, entry) for entry in entries))


def _serialize_feature(feature: Feature) -> bytes:
    if not feature.kind:
        return b""
    values: Sequence[Any] = feature.values
    if feature.kind == "float":
        data = write_field(1, pack_values(values, DTYPES["float32"]))
    elif feature.kind == "int64":
        data = write_field(1, b"".join(map(write_varint, values)))
    else:
        data = b"".join(write_field(1, value) for value in values)
    return write_field(_LIST_FIELD[feature.kind], data)
