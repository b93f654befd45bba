"""ModelConfig as its APIs show it, byte for byte as recorded: V2's JSON and message, and V1's message.

.venv/bin/python -m tests.repository.triton_config.test_json_form > tests/vectors/triton_config_forms.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from fastserve.protos import load
from fastserve.repository.triton_config.messages import TritonConfig, config_schema, to_json
from fastserve.settings import convert
from fastserve.settings.text_proto import TextField

RECORDED = Path(__file__).parents[2] / "vectors" / "triton_config_forms.jsonl"
SCALARS: dict[str, Any] = {"string": "x", "bool": True, "float": 0.5, "double": 0.25}


def every_field(schema: Mapping[str, TextField], choice: int) -> dict[str, Any]:
    """Plain values of a message with every field set; of a oneof the member of that number."""
    chosen = {}
    for oneof in {field.oneof for field in schema.values()} - {""}:
        members = sorted(name for name, field in schema.items() if field.oneof == oneof)
        chosen[oneof] = members[choice % len(members)]
    return {
        name: value_of(field, choice)
        for name, field in schema.items()
        if not field.oneof or chosen[field.oneof] == name
    }


def value_of(field: TextField, choice: int) -> Any:
    if field.entries:
        key = 7 if field.fields["key"].kind == "uint64" else "k"
        return {key: value_of(field.fields["value"], choice)}
    one: Any = SCALARS.get(field.kind, 3 + choice)
    if field.kind == "message":
        one = every_field(field.fields, choice)
    elif field.kind == "enum":
        one = list(field.names)[choice % len(field.names)]
    return [one, one] if field.repeated else one


def show(choice: int) -> dict[str, str]:
    config = convert(every_field(config_schema(), choice), TritonConfig, "m")
    shown = to_json(config)
    messages = {
        name: ParseDict(shown, load(name).ModelConfig(), ignore_unknown_fields=True)
        for name in ("kserve_v2", "triton_v1")
    }
    written = {name: one.SerializeToString(deterministic=True).hex() for name, one in messages.items()}
    return {"json": json.dumps(shown), **written}


CHOICES = range(4)


@pytest.mark.parametrize("choice", CHOICES)
def test_config_is_shown_as_recorded(choice: int) -> None:
    lines = RECORDED.read_text().splitlines()
    assert show(choice) == json.loads(lines[choice])


if __name__ == "__main__":
    for number in CHOICES:
        print(json.dumps(show(number)))
