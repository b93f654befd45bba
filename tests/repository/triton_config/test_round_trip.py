"""Text -> struct -> JSON -> struct -> protobuf's own parser: nothing is lost on any way."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from google.protobuf import json_format, text_format
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import ConfigError
from fastserve.protos import load
from fastserve.repository.triton_config.completion import fill_defaults
from fastserve.repository.triton_config.messages import (
    _SINGLES,
    TritonConfig,
    config_schema,
    plain_from_json,
    to_json,
)
from fastserve.repository.triton_config.reading import parse_triton_json, parse_triton_text
from fastserve.settings import convert
from fastserve.settings.text_proto import TextField, parse_text
from tests.effort import examples

ROOT = load("kserve_v2").ModelConfig  # made from the same tables, and apart from these structs
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXT,
    "bool": st.booleans(),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
}


def values(field: TextField) -> st.SearchStrategy[Any]:
    if field.kind == "message":
        return messages(field.fields)
    if field.kind == "enum":
        return st.sampled_from(list(field.names))
    return SCALARS[field.kind]


def fields(field: TextField) -> st.SearchStrategy[Any]:
    if field.entries:
        return st.dictionaries(values(field.fields["key"]), values(field.fields["value"]), max_size=2)
    return st.lists(values(field), max_size=2) if field.repeated else values(field)


@st.composite
def messages(draw: st.DrawFn, schema: Mapping[str, TextField]) -> dict[str, Any]:
    """A few fields of a message, at most one of each oneof."""
    names = draw(st.lists(st.sampled_from(sorted(schema)), max_size=4, unique=True)) if schema else []
    found: dict[str, Any] = {}
    taken: set[str] = set()
    for name in names:
        if schema[name].oneof not in taken:
            found[name] = draw(fields(schema[name]))
            taken |= {schema[name].oneof} - {""}
    return found


@examples(150)
@given(tree=messages(config_schema()))
def test_every_way_leads_to_the_same_config(tree: dict[str, Any]) -> None:
    config = convert(tree, TritonConfig, "m")
    message = json_format.ParseDict(protobuf_floats(to_json(config)), ROOT())
    text = text_format.MessageToString(message)
    assert convert(parse_text(text, config_schema(), "m"), TritonConfig, "m") == config
    shown = json.dumps(protobuf_floats(to_json(config)))
    assert convert(plain_from_json(shown, "m"), TritonConfig, "m") == config
    for names in (False, True):  # camelCase and snake_case, 64-bit numbers as text, as protobuf writes them
        written = json_format.MessageToJson(message, preserving_proto_field_name=names)
        assert convert(plain_from_json(written, "m"), TritonConfig, "m") == config


def protobuf_floats(value: Any) -> Any:
    """Return `value` with infinities as protobuf writes them: JSON has no token for them."""
    if isinstance(value, dict):
        return {key: protobuf_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [protobuf_floats(item) for item in value]
    if isinstance(value, float) and abs(value) == float("inf"):
        return "Infinity" if value > 0 else "-Infinity"
    return value


@examples(100)
@given(tree=messages(config_schema()))
def test_defaults_are_filled_once(tree: dict[str, Any]) -> None:
    config = fill_defaults(convert(tree, TritonConfig, "m"), "m")
    assert fill_defaults(config, "m") == config
    assert (
        convert(plain_from_json(json.dumps(protobuf_floats(to_json(config))), "m"), TritonConfig, "m")
        == config
    )


@examples(200)
@given(text=st.text(st.sampled_from('{}[]:," \n01-.nametypinputdims_backend'), max_size=60))
def test_any_text_is_a_config_or_a_fault(text: str) -> None:
    for parse in (parse_triton_text, parse_triton_json):
        with contextlib.suppress(ConfigError):
            assert parse(text, "m").name == "m"


def every_field(schema: Mapping[str, TextField]) -> Iterator[tuple[str, TextField]]:
    for name, field in schema.items():
        yield name, field
        yield from every_field(field.fields)


def test_numbers_are_shown_short() -> None:
    config = TritonConfig()
    kinds = {name for name, field in every_field(config_schema()) if field.kind == "float"}
    assert kinds == set(_SINGLES)
    direct = {"direct": {"minimum_slot_utilization": struct.unpack("f", struct.pack("f", 0.1))[0]}}
    config = msgspec.structs.replace(
        config, sequence_batching=convert({"sequence_batching": direct}, TritonConfig, "m").sequence_batching
    )
    assert to_json(config)["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.1
