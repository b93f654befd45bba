"""The schema by which config.text_proto reads a config.pbtxt, made from the structs of `triton_schema`.

The same schema guides `triton_json`. Enums come as their names, maps as dicts.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from fastserve.config.text_proto import TextField
from fastserve.repository.triton_schema import Message, TritonConfig


def text_schema(message: type[Message]) -> dict[str, TextField]:
    """The schema `parse_text` reads this message by. Enums become their names."""
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
    """That of a whole config.pbtxt. A server without one is not kept waiting for it."""
    return text_schema(TritonConfig)
