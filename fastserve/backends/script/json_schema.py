"""Types of a script's functions: arrays in annotations, and all types as JSON Schema for /openapi.json.

    describe_types(reader, dict, None)
    {"body": {"type": "object", ...}, "answer": {...}, "media": "application/json", "example": {...}}

Types that have no schema, such as those of libraries, may be anything. Schemas that refer to others do so by
PREFIX and a name; those are in `schemas`.

`Array["float32", 4]`, the type of arrays in annotations, is four numbers a row. It needs no numpy.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fastserve.tensor import DTYPES

if TYPE_CHECKING:
    from fastserve.backends.script.json_body import BodyReader


_ALIASES = {"float": "float32", "double": "float64", "int": "int64", "str": "bytes", "bool_": "bool"}
_ANY = (None, -1)


class _ArrayKind(type):
    """Arrays of the right element type are instances."""

    dtype: str

    def __instancecheck__(cls, value: Any) -> bool:
        found = getattr(getattr(value, "dtype", None), "name", None)
        return bool(found) and found == {"bytes": "object"}.get(cls.dtype, cls.dtype)


class Array(metaclass=_ArrayKind):
    """An array of a fixed element type and a shape without the axis of rows.

        Array["float32"]              one number a row
        Array["float32", 4]           four
        Array["uint8", 224, 224, 3]   an image
        Array["int64", -1]            any length
        Array["float32", ...]         any shape

    Strings are `Array["str"]`: functions see object arrays of bytes.
    """

    dtype: ClassVar[str] = ""
    shape: ClassVar[tuple[int, ...] | None] = None

    def __class_getitem__(cls, given: Any) -> type[Array]:
        items = given if isinstance(given, tuple) else (given,)
        dtype, axes = _dtype_name(items[0]), items[1:]
        if axes == (Ellipsis,):
            shape = None
        elif all(axis in _ANY or (type(axis) is int and axis >= 0) for axis in axes):
            shape = tuple(-1 if axis is None else axis for axis in axes)
        else:
            raise TypeError(f"Array: the shape {axes!r} must be lengths, -1 for any, or ... for any shape")
        shown = ", ".join([repr(dtype), *(["..."] if shape is None else map(str, shape))])
        made: Any = _ArrayKind(f"Array[{shown}]", (Array,), {"dtype": dtype, "shape": shape})
        found: type[Array] = made
        return found

    def __init__(self) -> None:
        raise TypeError("Array is a type for annotations; functions get and return numpy arrays")


def is_array(annotation: Any) -> bool:
    """Return whether an annotation is Array with an element type."""
    return isinstance(annotation, type) and issubclass(annotation, Array) and bool(annotation.dtype)


def tensor_of(annotation: type[Array]) -> dict[str, Any]:
    """Return the tensor of model.yaml that an annotation stands for."""
    shape = None if annotation.shape is None else list(annotation.shape)
    return {"dtype": annotation.dtype, "shape": shape}


def _dtype_name(given: Any) -> str:
    """Return our name of an element type, which may be a text, a type of Python's or one of numpy's."""
    name = given if isinstance(given, str) else getattr(given, "__name__", None) or str(given)
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise TypeError(f"Array: the element type {given!r} is not one of {', '.join(DTYPES)}, str")
    return name


PREFIX = "#/$defs/"
MOST_DEPTH = 8
ANY_MEDIA, JSON_MEDIA, RAW_MEDIA = "*/*", "application/json", "application/octet-stream"
_EMPTY = inspect.Signature.empty
_PIXEL = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde\x00\x00\x00"
    b"\x0cIDATx\x9cc```\x00\x00\x00\x04\x00\x01\xf6\x178U\x00\x00\x00\x00IEND\xaeB`\x82"
)
Schemas = dict[str, Any]


def describe_types(reader: BodyReader, returned: Any, example: Any) -> dict[str, Any]:
    """Return schemas of the bodies that a reader reads and of what is returned, and a body that fits.
    `returned` is None where the answer comes in parts. Raises TypeError for an example that is no JSON."""
    schemas: Schemas = {}
    body = _schema(reader.kind, schemas)
    found: dict[str, Any] = {"body": body, "media": _media(returned)}
    if found["media"] == JSON_MEDIA and returned is not None:
        found["answer"] = _schema(returned, schemas)
    try:
        found["example"] = msgspec.to_builtins(example_of(body, schemas) if example is None else example)
    except TypeError as fault:
        raise TypeError(f"example: {fault}") from None
    if schemas:
        found["schemas"] = schemas
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def _media(returned: Any) -> str:
    """Return the media type of an answer; the stream's own for None."""
    if returned is bytes:
        return RAW_MEDIA
    unknown = returned is _EMPTY or returned is Any or getattr(returned, "__name__", "") == "Response"
    return ANY_MEDIA if unknown else JSON_MEDIA


def _schema(kind: Any, schemas: Schemas) -> Any:
    """Return the schema of a type; {} where it has none. Those that it refers to are put into `schemas`."""
    if kind in (_EMPTY, Any, object, inspect.Parameter.empty):
        return {}

    def hook(found: Any) -> Any:
        return _schema_of_library(found, schemas)

    try:
        (made,), defined = msgspec.json.schema_components(
            (kind,), schema_hook=hook, ref_template=PREFIX + "{name}"
        )
    except (TypeError, NotImplementedError):
        return {}
    schemas.update(defined)
    return made


def _schema_of_library(kind: Any, schemas: Schemas) -> Any:
    """Return the schema of an Array, an image or a model of pydantic's. Raises NotImplementedError."""
    if is_array(kind):
        return _array(kind)
    make = getattr(kind, "model_json_schema", None)
    if make is not None:
        made = dict(make(ref_template=PREFIX + "{model}"))
        defined = made.pop("$defs", {})
        schemas.update(defined)
        return made
    if getattr(kind, "__module__", "").startswith("PIL."):
        return {
            "type": "string",
            "contentEncoding": "base64",
            "examples": [base64.b64encode(_PIXEL).decode()],
        }
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return {"type": "array"}
    raise NotImplementedError


def _array(kind: Any) -> Any:
    dtype = DTYPES[kind.dtype].name
    names = {"bool": "boolean", "bytes": "string"}
    items: dict[str, Any] = {"type": names.get(dtype, "integer" if "int" in dtype else "number")}
    if kind.shape is None:
        return {"type": "array"}
    for size in reversed(kind.shape):
        items = {
            "type": "array",
            "items": items,
            **({} if size < 0 else {"minItems": size, "maxItems": size}),
        }
    return items


def example_of(schema: Any, schemas: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value that fits a schema, as far as that can be told."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return None
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(PREFIX)
        return example_of(schemas.get(name, {}), schemas, depth + 1)
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        choices = [one for one in schema.get(key, ()) if one.get("type") != "null"]
        if choices:
            return example_of(choices[0], schemas, depth + 1)
    kind = schema.get("type")
    if kind == "object":
        return _example_object(schema, schemas, depth)
    if kind == "array":
        items = schema.get("prefixItems")
        if items:
            return [example_of(one, schemas, depth + 1) for one in items]
        wanted = max(int(schema.get("minItems", 1)), 0)
        return [example_of(schema.get("items", {}), schemas, depth + 1)] * min(wanted, 64)
    return _example_leaf(schema, kind)


def _example_object(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return an object with every member, or one of any name where only their type is known."""
    members = schema.get("properties", {})
    found = {name: example_of(one, schemas, depth + 1) for name, one in members.items()}
    more = schema.get("additionalProperties")
    if not members and isinstance(more, Mapping):
        found["key"] = example_of(more, schemas, depth + 1)
    return found


_FORMATS = {
    "date": "2024-01-31",
    "date-time": "2024-01-31T12:00:00Z",
    "time": "12:00:00",
    "duration": "PT1S",
    "uuid": "7f0c3c5a-5d0e-4c6f-9d3a-0a2f6f3b9c11",
    "decimal": "1.5",
}


def _example_leaf(schema: Mapping[str, Any], kind: Any) -> Any:
    if kind == "string":
        if schema.get("contentEncoding") == "base64":
            return base64.b64encode(b"text").decode()
        text = _FORMATS.get(str(schema.get("format")), "text")
        return text.ljust(int(schema.get("minLength", 0)), "x")[: int(schema.get("maxLength", len(text)))]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        return max(1, low) if schema.get("maximum", 1) >= 1 else schema["maximum"]
    return {"boolean": True, "null": None}.get(str(kind), "text" if kind is None else None)
