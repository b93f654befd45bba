"""Writes the messages of model_config.proto as msgspec structs: `fastserve/protos/model_config.py`.

The build calls `write` after the descriptor sets are there. Names are the proto's, those of nested messages
joined (`ModelSequenceBatching.State` -> ModelSequenceBatchingState); fields stand in the order of the file.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

FILE = "kserve_v2/model_config.proto"
# Type of the descriptor -> the alias, Python's type, what a value is bounded by, the default.
SCALARS = {
    FieldDescriptorProto.TYPE_BOOL: ("Bool", "bool", "", "False"),
    FieldDescriptorProto.TYPE_STRING: ("Text", "str", "", '""'),
    FieldDescriptorProto.TYPE_INT32: ("Int32", "int", "ge=-(2**31), le=2**31 - 1, ", "0"),
    FieldDescriptorProto.TYPE_UINT32: ("UInt32", "int", "ge=0, le=2**32 - 1, ", "0"),
    FieldDescriptorProto.TYPE_INT64: ("Int64", "int", "", "0"),
    FieldDescriptorProto.TYPE_UINT64: ("UInt64", "int", "ge=0, ", "0"),
    FieldDescriptorProto.TYPE_FLOAT: ("Float", "float", "", "0.0"),
    FieldDescriptorProto.TYPE_DOUBLE: ("Double", "float", "", "0.0"),
}
HEAD = '''"""The messages of model_config.proto as structs. tools/write_triton_structs.py writes this file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message: fields by their proto names. CHOICES: oneof -> the fields that exclude each other."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}

'''


def write(descriptor_set: Path, target: Path) -> None:
    """Write the structs of the descriptor set's model_config.proto to `target`."""
    files = FileDescriptorSet.FromString(descriptor_set.read_bytes()).file
    target.write_text("\n".join(_lines(next(file for file in files if file.name == FILE))) + "\n")


def _lines(file: FileDescriptorProto) -> Iterator[str]:
    yield HEAD
    for kind, (alias, python, bounds, _) in SCALARS.items():
        proto = FieldDescriptorProto.Type.Name(kind).removeprefix("TYPE_").lower()
        yield f'{alias} = Annotated[{python}, Meta({bounds}extra={{"proto": "{proto}"}})]'
    first_values: dict[str, str] = {}
    for enum in file.enum_type:
        yield from _enum(enum, f".{file.package}", first_values)
    for message in file.message_type:
        yield from _message(message, f".{file.package}", first_values)


def _enum(enum: EnumDescriptorProto, scope: str, first_values: dict[str, str]) -> Iterator[str]:
    """A literal of the names, whose places are their numbers."""
    names = [value.name for value in enum.value]
    assert [value.number for value in enum.value] == list(range(len(names))), enum.name
    first_values[f"{scope}.{enum.name}"] = names[0]
    yield f"{_python_name(f'{scope}.{enum.name}')} = Literal[{', '.join(map(repr, names))}]"


def _message(message: DescriptorProto, scope: str, first_values: dict[str, str]) -> Iterator[str]:
    here = f"{scope}.{message.name}"
    for enum in message.enum_type:
        yield from _enum(enum, here, first_values)
    entries = {f"{here}.{one.name}": one for one in message.nested_type if one.options.map_entry}
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from _message(nested, here, first_values)
    yield f"\n\nclass {_python_name(here)}(Message, frozen=True):"
    yield f'    """{here.split(".", 2)[2]}."""\n'
    choices = {
        oneof.name: tuple(f.name for f in message.field if f.HasField("oneof_index") and f.oneof_index == at)
        for at, oneof in enumerate(message.oneof_decl)
    }
    if choices:
        yield f"    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {choices}"
    for field in message.field:
        hint, default = _typed(field, entries, first_values)
        if keyword.iskeyword(field.name):
            yield f'    is_{field.name}: {hint} = msgspec.field(name="{field.name}", default={default})'
        else:
            yield f"    {field.name}: {hint} = {default}"
    yield ""


def _typed(
    field: FieldDescriptorProto, entries: dict[str, DescriptorProto], first_values: dict[str, str]
) -> tuple[str, str]:
    """A field's type and default."""
    hint, default = _bare(field, first_values)
    if field.type_name in entries:
        key, value = (_bare(one, first_values)[0] for one in entries[field.type_name].field)
        return f"dict[{key}, {value}]", "{}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list[{hint}]", "[]"
    if field.type == FieldDescriptorProto.TYPE_MESSAGE or field.HasField("oneof_index"):
        return f"{hint} | None", "None"
    return hint, default


def _bare(field: FieldDescriptorProto, first_values: dict[str, str]) -> tuple[str, str]:
    if field.type in SCALARS:
        alias, _, _, default = SCALARS[field.type]
        return alias, default
    return _python_name(field.type_name), repr(first_values.get(field.type_name))


def _python_name(full: str) -> str:
    """`.inference.ModelInput.Format` -> ModelInputFormat"""
    return "".join(full.split(".")[2:])
