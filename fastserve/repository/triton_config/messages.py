"""Triton's ModelConfig message: struct, schema of its text form, and JSON form (triton_v2 spec 2, 7).

The build writes the structs of all messages from model_config.proto, in the order Triton prints their fields
(spec 17). `config.text_proto` reads a config.pbtxt by the schema; enums come as their names, maps as dicts,
an unset message as None. Refused values are in `validation`, the meaning of the fields in `reading`.

JSON is read as protobuf reads it: names in snake_case or camelCase, 64-bit numbers also as text, enums by
name or number, null for not given. It is written as Triton writes it: snake_case, every scalar, no text
numbers.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from fastserve.codec.json_text import Bounds, DocumentFault, FreeJSON
from fastserve.errors import ConfigError
from fastserve.settings.fields import cut_key, fault_text, hint
from fastserve.settings.text_proto import TextField, as_single

try:
    from fastserve.protos.model_config import *  # noqa: F403
    from fastserve.protos.model_config import Message, ModelConfig
except ModuleNotFoundError:
    raise ImportError("fastserve is not built: run `python setup.py protos` in its checkout") from None


class TritonConfig(ModelConfig, frozen=True):
    """ModelConfig of model_config.proto: everything config.pbtxt may say."""

    @property
    def ensemble(self) -> bool:
        """True when steps of other models answer, and no worker runs."""
        return self.platform == "ensemble" or self.ensemble_scheduling is not None

    @property
    def decoupled(self) -> bool:
        """True when a request may have any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled


def text_schema(message: type[Message]) -> dict[str, TextField]:
    """Return the schema `parse_text` reads this message by."""
    hints = get_type_hints(message, include_extras=True)
    chosen = {name: choice for choice, names in message.CHOICES.items() for name in names}
    return {
        field.encode_name: _text_field(hints[field.name], chosen.get(field.encode_name, ""))
        for field in msgspec.structs.fields(message)
    }


def _text_field(hint: Any, oneof: str) -> TextField:
    base, arms = get_origin(hint), get_args(hint)
    if base in (Union, types.UnionType):
        return _text_field(next(arm for arm in arms if arm is not type(None)), oneof)
    if base is list:
        item = _text_field(arms[0], "")
        return TextField(item.kind, repeated=True, fields=item.fields, names=item.names, words=item.words)
    if base is dict:
        pair = {"key": _text_field(arms[0], ""), "value": _text_field(arms[1], "")}
        return TextField("message", entries=True, fields=pair)
    if base is Literal:
        return TextField("enum", names={name: n for n, name in enumerate(arms)}, oneof=oneof, words=True)
    if base is Annotated:
        return TextField(hint.__metadata__[0].extra["proto"], oneof=oneof)
    return TextField("message", fields=text_schema(hint), oneof=oneof)


@cache
def config_schema() -> dict[str, TextField]:
    """Return the schema of a whole config.pbtxt, made when the first is read."""
    return text_schema(TritonConfig)


CONFIG: FreeJSON[Any] = FreeJSON(Any, Bounds(values=65536, numbers=65536, object_keys=16384))

_WHOLE = re.compile(r"-?[0-9]{1,20}")

_SINGLES = ("fp32_false_true", "minimum_slot_utilization")  # the fields that are float and not double

_WORD_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain_from_json(text: str, origin: str) -> dict[str, Any]:
    """Parse JSON into the plain values that `settings.convert` takes. Raises ConfigError."""
    try:
        document = CONFIG.read(text)
    except DocumentFault as fault:
        raise ConfigError(f"{origin}: not JSON: {fault.message[:200]}") from None
    return _message(document, config_schema(), origin)


def _message(value: Any, schema: Mapping[str, TextField], origin: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(fault_text(origin, value, "a mapping of fields " + ", ".join(schema)))
    found: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for key, item in value.items():
        name = key if key in schema else _snake(key)
        if name not in schema:
            raise ConfigError(f"{origin}: unknown field {cut_key(key)!r}{hint(key, schema)}")
        if name in found:
            raise ConfigError(f"{origin}: {name} is given more than once")
        if item is None:
            continue
        field = schema[name]
        if field.oneof and chosen.setdefault(field.oneof, name) != name:
            raise ConfigError(f"{origin}: {name} and {chosen[field.oneof]} exclude each other")
        found[name] = _field(item, field, f"{origin}: {name}" if ": " not in origin else f"{origin}.{name}")
    return found


def _field(value: Any, field: TextField, place: str) -> Any:
    if field.entries:
        if not isinstance(value, Mapping):
            raise ConfigError(fault_text(place, value, "a mapping"))
        inner = field.fields["value"]
        return {
            _scalar(key, field.fields["key"]): _one(item, inner, f"{place}.{key}")
            for key, item in value.items()
        }
    if not field.repeated:
        return _one(value, field, place)
    if not isinstance(value, list):
        raise ConfigError(fault_text(place, value, "a list"))
    return [_one(item, field, f"{place}[{index}]") for index, item in enumerate(value)]


def _one(value: Any, field: TextField, place: str) -> Any:
    return _message(value, field.fields, place) if field.kind == "message" else _scalar(value, field)


def _scalar(value: Any, field: TextField) -> Any:
    """Normalise a scalar of another spelling; what fits nothing is left for `convert` to refuse."""
    if field.kind == "enum":
        named = [name for name, number in field.names.items() if number == value]
        return named[0] if named and not isinstance(value, bool) else value
    if field.kind in ("int32", "uint32", "int64", "uint64"):
        if isinstance(value, str) and _WHOLE.fullmatch(value):
            return int(value)
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if field.kind in ("float", "double") and isinstance(value, str):
        return _WORD_FLOATS.get(value, value)
    return as_single(value) if field.kind == "float" and isinstance(value, float) else value


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda match: "_" + match.group().lower(), name)


def to_json(config: TritonConfig) -> dict[str, Any]:
    """Return every scalar of every message given, as JSON-ready plain values."""
    shown: dict[str, Any] = _shown(msgspec.to_builtins(config, str_keys=True))
    return shown


def _shown(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _shown(item, key) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_shown(item, name) for item in value]
    return _shown_float(value, single=name in _SINGLES) if isinstance(value, float) else value


def _shown_float(value: float, *, single: bool) -> float | int:
    """Return whole numbers without a point; a float32 by its shortest digits, not by those of its double."""
    if not math.isfinite(value):
        return value
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    short = (float(f"{value:.{digits}g}") for digits in (6, 7, 8) if single)
    return next((number for number in short if as_single(number) == value), value)
