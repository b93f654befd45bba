"""Protobuf's own text format as the oracle of config.text_proto: the same schema as a real message class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message

from fastserve.settings.text_proto import TextField

Proto = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": Proto.TYPE_STRING,
    "bool": Proto.TYPE_BOOL,
    "float": Proto.TYPE_FLOAT,
    "double": Proto.TYPE_DOUBLE,
    "int32": Proto.TYPE_INT32,
    "uint32": Proto.TYPE_UINT32,
    "int64": Proto.TYPE_INT64,
    "uint64": Proto.TYPE_UINT64,
    "enum": Proto.TYPE_ENUM,
    "message": Proto.TYPE_MESSAGE,
}


def message_class(schema: Mapping[str, TextField]) -> type[Message]:
    file = descriptor_pb2.FileDescriptorProto(name="oracle.proto", package="oracle", syntax="proto3")
    _fill(file.message_type.add(name="Root"), ".oracle.Root", schema)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oracle.Root"))


def _fill(message: Any, path: str, schema: Mapping[str, TextField]) -> None:
    choices: list[str] = []
    for number, (name, kind) in enumerate(schema.items(), start=1):
        field = message.field.add(name=name, number=number, type=_TYPES[kind.kind])
        field.label = Proto.LABEL_REPEATED if kind.repeated or kind.entries else Proto.LABEL_OPTIONAL
        if kind.kind == "message":
            inner = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            nested = message.nested_type.add(name=inner)
            nested.options.map_entry = kind.entries
            field.type_name = f"{path}.{inner}"
            _fill(nested, field.type_name, kind.fields)
        if kind.kind == "enum":
            inner = name.capitalize() + "Names"
            values = message.enum_type.add(name=inner)
            for word, value in kind.names.items():
                values.value.add(name=word, number=value)
            field.type_name = f"{path}.{inner}"
        if kind.oneof:
            if kind.oneof not in choices:
                choices.append(kind.oneof)
                message.oneof_decl.add(name=kind.oneof)
            field.oneof_index = choices.index(kind.oneof)


def parse(text: str, cls: type[Message]) -> dict[str, Any]:
    """Raises text_format.ParseError."""
    return plain(text_format.Parse(text, cls()))


def plain(message: Message) -> dict[str, Any]:
    """Only what is set, as parse_text gives it; zeros of proto3 count as not set."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.message_type is not None:
            many = field.is_repeated
            found[field.name] = [plain(v) for v in value] if many else plain(value)
        else:
            found[field.name] = list(value) if field.is_repeated else value
    return found
