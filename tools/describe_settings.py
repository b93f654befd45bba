"""Writes the tables of docs/configuration.md from the fields of Settings and NativeConfig.

tools/describe_settings.py            writes the tables
tools/describe_settings.py --check    exit code 1 when the page shows something else than the fields
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from fastserve.config import Field, ModelEntry, Settings, list_fields
from fastserve.repository.model_config import NativeConfig, SignatureConfig, TensorConfig, WarmupSample

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
TABLES: dict[str, type[msgspec.Struct]] = {
    "settings": Settings,
    "models": ModelEntry,
    "model": NativeConfig,
    "tensor": TensorConfig,
    "signature": SignatureConfig,
    "warmup": WarmupSample,
}


def table(kind: type[msgspec.Struct]) -> str:
    rows = ["| field | default | allowed | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{field.path}` | {default_text(field)} | {cell(field.allowed)} | {cell(field.help)} |"
        for field in list_fields(kind)
    ]
    return "\n".join(rows) + "\n"


def default_text(field: Field) -> str:
    if field.default is msgspec.NODEFAULT:
        return "required"
    return f"`{cell(json.dumps(plain(field.default)))}`"


def plain(value: Any) -> Any:
    """As it would be written in YAML: a listener without dialects is just its address."""
    value = msgspec.to_builtins(value)
    if isinstance(value, (list, tuple)):
        return [item["address"] if isinstance(item, dict) and "address" in item else item for item in value]
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return value


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def page_with_tables(text: str) -> str:
    for name, kind in TABLES.items():
        place = re.compile(rf"<!-- fields: {name} -->\n(.*?)<!-- end -->", re.DOTALL)
        written = f"<!-- fields: {name} -->\n{table(kind)}<!-- end -->"
        text, found = place.subn(lambda _, written=written: written, text)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has no place for {name}")
    return text


def main() -> int:
    text = PAGE.read_text()
    wanted = page_with_tables(text)
    if sys.argv[1:] == ["--check"]:
        return 0 if text == wanted else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
