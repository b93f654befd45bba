"""JSON of free bodies: to the parameters of a function and from what it returns.

    reader = BodyReader(signature)          of (name: str, times: int = 1)
    reader.read(b'{"name": "Ann"}')         ((), {"name": "Ann", "times": 1})
    write_json({"hello": 1})                b'{"hello":1}'

Types are msgspec's: Python's own, dataclasses, TypedDict, NamedTuple, enums, Literal, msgspec.Struct. Those
of pydantic, numpy and PIL are recognised by their members: nothing of them is imported here. A function's
one parameter takes the whole body where it has no type, is positional-only, or is a type with fields;
otherwise the body is an object with a member for each parameter.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from fastserve.backends.script.json_schema import is_array
from fastserve.backends.script.multipart import MEDIA_TYPE, File, media_type_of, read_parts
from fastserve.errors import ServeError, invalid

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_EMPTY = inspect.Parameter.empty
_UNTYPED = (_EMPTY, Any, object, dict, list, Mapping)
_TEXT_MAX = 2000
TEXTS = ("application/json", "application/x-www-form-urlencoded", "text/plain", "text/json")
"""Media types of bodies that are read as JSON; the second is what curl says of any body."""


class BodyReader:
    """Reads bodies as the arguments of one function. Raises TypeError for a signature that JSON cannot
    fill."""

    def __init__(self, signature: inspect.Signature, owner: str) -> None:
        parameters = list(signature.parameters.values())
        for one in parameters:
            if one.kind is one.VAR_POSITIONAL:
                raise TypeError(f"{owner}: *{one.name} cannot be filled from JSON; name its parameters")
        self._rest = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
        self._positional = [one.name for one in named if one.kind is one.POSITIONAL_ONLY]
        self.whole = len(named) == 1 and not self._rest and _takes_whole(named[0])
        self._names = [one.name for one in named]
        self._kinds = _fields_of(named[0].annotation) if self.whole else {o.name: o.annotation for o in named}
        needed = [one for one in named if one.default is _EMPTY] or named[:1]
        alone = len(needed) == 1 and not self.whole and _is_binary(needed[0].annotation)
        self._file = needed[0].name if alone else ""  # which may be the whole body
        try:
            self.kind: Any = None
            if self.whole:
                self._default = named[0].default
                self._whole_kind = self.kind = named[0].annotation
                self._decoder: msgspec.json.Decoder[Any] = _decoder(named[0].annotation)
            else:
                fields = [_field(one) for one in named]
                struct = msgspec.defstruct("body", fields, kw_only=True, forbid_unknown_fields=not self._rest)
                self._struct = self.kind = struct
                self._decoder = _decoder(dict[str, Any] if self._rest else struct)
        except TypeError as fault:
            raise TypeError(f"{owner}: {fault}") from None

    @property
    def names(self) -> list[str]:
        """Names of the members of a body, in the order of the parameters; its one parameter where it is
        whole."""
        return self._names

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the body of a call with these arguments, as values. Raises TypeError for arguments that the
        function does not take."""
        given = {**dict(zip(self._names, positional, strict=False)), **named}
        unknown = [name for name in given if name not in self._names and not self._rest]
        if unknown or len(positional) > len(self._names):
            raise TypeError(f"the model takes {', '.join(self._names)}")
        return next(iter(given.values()), {}) if self.whole else given

    def read(self, body: bytes | memoryview, content_type: str = "") -> Arguments:
        """Return positional and named arguments. Raises ServeError INVALID_ARGUMENT naming the member."""
        media_type = media_type_of(content_type)
        if media_type == MEDIA_TYPE:
            return self._read_form(read_parts(body, content_type))
        if media_type and self._file and media_type not in TEXTS and not media_type.endswith("+json"):
            return self._read_form({self._file: [File(bytes(body), "", content_type)]})
        if self.whole:
            return self._read_whole(body)
        try:
            found = self._decoder.decode(body if len(body) else b"{}")
            more = {}
            if self._rest:
                more = {name: value for name, value in found.items() if name not in self._names}
                own = {name: value for name, value in found.items() if name in self._names}
                found = msgspec.convert(own, self._struct, dec_hook=_decode)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise _refusal(fault) from None
        values = msgspec.structs.asdict(found)
        positional = tuple(values.pop(name) for name in self._positional)
        return positional, {**values, **more}

    def _read_form(self, parts: Mapping[str, Sequence[File]]) -> Arguments:
        """Return the arguments that the parts of a form are."""
        given: dict[str, Any] = {}
        for name, several in parts.items():
            kind = self._kinds.get(name, Any)
            values = [_value_of(name, one, kind) for one in several]
            if len(values) > 1 and not _is_list(kind) and kind is not Any:
                raise invalid(f"{name}: given {len(values)} times, allowed: once")
            given[name] = values if _is_list(kind) or len(values) > 1 else values[0]
        try:
            if self.whole:
                kind = Any if self._whole_kind in _UNTYPED else self._whole_kind
                return (msgspec.convert(given, kind, strict=False, dec_hook=_decode),), {}
            more = {n: given.pop(n) for n in [*given] if n not in self._names} if self._rest else {}
            found = msgspec.convert(given, self._struct, strict=False, dec_hook=_decode)
        except (msgspec.ValidationError, RecursionError) as fault:
            raise _refusal(fault) from None
        bound = msgspec.structs.asdict(found)
        positional = tuple(bound.pop(name) for name in self._positional)
        return positional, {**bound, **more}

    def _read_whole(self, body: bytes | memoryview) -> Arguments:
        if not len(body) and self._default is not _EMPTY:
            return (self._default,), {}
        try:
            value = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise _refusal(fault) from None
        return (value,), {}


def _takes_whole(parameter: inspect.Parameter) -> bool:
    """Return whether a function's one parameter is the body itself, and not a member of it."""
    kind = parameter.annotation
    if parameter.kind is parameter.POSITIONAL_ONLY or kind in _UNTYPED:
        return True
    origin = get_origin(kind)
    if origin is not None:
        return isinstance(origin, type) and issubclass(origin, Mapping)
    fields = ("__dataclass_fields__", "__struct_fields__", "model_fields", "__required_keys__", "_fields")
    return isinstance(kind, type) and any(hasattr(kind, name) for name in fields)


def _fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a type with fields; nothing for others."""
    try:
        return get_type_hints(kind)
    except (TypeError, NameError):
        return {}


def _kinds_in(kind: Any) -> list[Any]:
    """Return a type, or those it is made of: of X | None, list[X], Annotated[X, ...]."""
    inner = [found for one in get_args(kind) for found in _kinds_in(one)]
    return inner or [kind]


def _is_binary(kind: Any) -> bool:
    """Return whether a form's part is bytes for this type, and not a text."""
    return any(
        one in (bytes, bytearray, File) or str(getattr(one, "__module__", "")).startswith("PIL.")
        for one in _kinds_in(kind)
    )


def _is_list(kind: Any) -> bool:
    return kind is list or get_origin(kind) in (list, tuple, set, Sequence)


def _value_of(name: str, part: File, kind: Any) -> Any:
    """Return what a part of a form is for a type. Raises ServeError naming the part."""
    if _is_binary(kind):
        return part if File in _kinds_in(kind) else part.content
    if kind is Any and part.filename:
        return part
    try:
        if media_type_of(part.media_type) == "application/json":
            return msgspec.json.decode(part.content)
        return part.content.decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise invalid(f"{name}: the part is no text in UTF-8, or not the JSON that it says") from None


def _field(parameter: inspect.Parameter) -> Any:
    kind = Any if parameter.annotation is _EMPTY else parameter.annotation
    if parameter.default is _EMPTY:
        return parameter.name, kind
    default = parameter.default
    return parameter.name, kind, msgspec.field(default_factory=lambda: default)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(Any if kind in _UNTYPED else kind, dec_hook=_decode)


def _refusal(fault: BaseException) -> ServeError:
    if isinstance(fault, RecursionError):
        return invalid("the body is nested too deeply")
    if isinstance(fault, UnicodeDecodeError):
        return invalid(f"the body is not UTF-8, at byte {fault.start}")
    return invalid(f"the body does not fit: {str(fault)[:_TEXT_MAX]}")


def _decode(kind: type, value: Any) -> Any:
    """Make what msgspec has no type for. Raises ValueError, NotImplementedError."""
    if is_array(kind) or (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return _array(kind, value)
    validate: Callable[[Any], Any] | None = getattr(kind, "model_validate", None)
    if validate is not None:
        return _validated(validate, value)
    if kind.__module__.startswith("PIL."):
        from PIL import Image

        data = value if isinstance(value, bytes) else decode_base64(value)
        try:
            return Image.open(io.BytesIO(data))
        except (OSError, SyntaxError, Image.DecompressionBombError) as fault:
            raise ValueError(f"no image that can be read: {type(fault).__name__}") from None
    if kind is File:
        return value if isinstance(value, File) else File(decode_base64(value), "", _type_of_data(value))
    raise NotImplementedError(f"{kind.__name__} cannot be made from JSON")


def _array(kind: Any, value: Any) -> Any:
    import numpy as np

    if not is_array(kind):
        return np.asarray(value)
    array = np.asarray(value, {"bytes": "object"}.get(kind.dtype, kind.dtype))
    wanted = kind.shape
    fits = wanted is None or (
        len(wanted) == array.ndim and all(w in (-1, n) for w, n in zip(wanted, array.shape, strict=True))
    )
    if not fits:
        raise ValueError(f"Expected an array of shape {list(wanted)}, got {list(array.shape)}")
    return array


def _validated(validate: Callable[[Any], Any], value: Any) -> Any:
    """Return a pydantic model. Raises ValueError with its words, less the links."""
    try:
        return validate(value)
    except ValueError as fault:
        errors = getattr(fault, "errors", None)
        if errors is None:
            raise
        said = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in errors()[:10]]
        raise ValueError("; ".join(said)) from None


def _type_of_data(value: Any) -> str:
    """Return the media type of `data:image/png;base64,...`; "" of plain base64."""
    head, comma, _ = str(value)[:256].partition(",")
    return head[5:].removesuffix(";base64") if comma and head.startswith("data:") else ""


def decode_base64(value: Any) -> bytes:
    """Return the bytes of base64 text, also behind `data:...;base64,`. Raises ValueError."""
    if not isinstance(value, str | bytes):
        raise ValueError(f"Expected base64 text, got {type(value).__name__}")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    try:
        return base64.b64decode(text.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("Expected base64 text, got what is none") from None


def write_json(value: Any) -> bytes:
    """Return a value as JSON. Raises TypeError naming a type that has none."""
    return _ENCODER.encode(value)


def _encode(value: Any) -> Any:
    """Return plain values for what msgspec has no form for. Raises TypeError."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "detach"):  # a tensor of torch's
        value = value.detach().cpu()
    if hasattr(value, "tolist"):  # and arrays and numbers of numpy's
        return value.tolist()
    if hasattr(value, "__json__"):
        return value.__json__()
    raise TypeError(f"what was returned holds a {type(value).__name__}, which has no form in JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode)
