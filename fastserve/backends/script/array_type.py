"""The type of arrays in annotations: `Array["float32", 4]` is four numbers a row. No numpy at run time."""

from __future__ import annotations

from typing import Any, ClassVar

from fastserve.tensor import DTYPES

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
