"""ModelConfig as JSON: what the load call may bring, and what the config call shows (triton_v2 spec 2, 7).

Read as protobuf reads JSON: names in snake_case or camelCase, 64-bit numbers also as text, enums by
name or number, null for not given. Written as Triton writes it: snake_case, every scalar, no text numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from fastserve.config.fields import fault_text, hint
from fastserve.config.text_proto import TextField, as_single
from fastserve.errors import ConfigError
from fastserve.repository.triton_schema import TritonConfig
from fastserve.repository.triton_text import config_schema

_WHOLE = re.compile(r"-?[0-9]{1,20}")
_SINGLES = ("fp32_false_true", "minimum_slot_utilization")  # the fields that are float and not double
_WORD_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain_from_json(text: str, origin: str) -> dict[str, Any]:
    """The plain values `config.convert` takes. Raises ConfigError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{origin}: not JSON: {str(fault)[:200]}") from None
    return _message(document, config_schema(), origin)


def _message(value: Any, schema: Mapping[str, TextField], origin: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(fault_text(origin, value, "a mapping of fields " + ", ".join(schema)))
    found: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for key, item in value.items():
        name = key if key in schema else _snake(key)
        if name not in schema:
            raise ConfigError(f"{origin}: unknown field {key!r}{hint(key, schema)}")
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
    """Other spellings of a scalar as the plain one; what fits nothing is left for `convert` to refuse."""
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
    """Every scalar of every message given, as JSON-ready plain values."""
    shown: dict[str, Any] = _shown(msgspec.to_builtins(config, str_keys=True))
    return shown


def _shown(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _shown(item, key) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_shown(item, name) for item in value]
    return _shown_float(value, single=name in _SINGLES) if isinstance(value, float) else value


def _shown_float(value: float, *, single: bool) -> float | int:
    """Whole numbers without a point; a float32 by its shortest digits, not by those of its double."""
    if not math.isfinite(value):
        return value
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    short = (float(f"{value:.{digits}g}") for digits in (6, 7, 8) if single)
    return next((number for number in short if as_single(number) == value), value)
