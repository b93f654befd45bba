"""Writes the tables of docs/configuration.md and docs/security.md from the fields of the settings.

tools/describe_settings.py            writes the tables
tools/describe_settings.py --check    exit code 1 when a page shows something else than the fields
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fastserve.repository.model_config import NativeConfig, SignatureConfig, TensorConfig, WarmupSample
from fastserve.settings import ConfigField, ModelEntry, Settings, list_fields
from fastserve.settings.model_options import (
    RayPlacement,
    RemotePlacement,
    RequestLogOptions,
    ShadowOptions,
    StickyOptions,
    TextOptions,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLES: dict[str, type[msgspec.Struct]] = {
    "settings": Settings,
    "models": ModelEntry,
    "model": NativeConfig,
    "tensor": TensorConfig,
    "signature": SignatureConfig,
    "warmup": WarmupSample,
    "text": TextOptions,
    "sticky": StickyOptions,
    "shadow": ShadowOptions,
    "request_log": RequestLogOptions,
    "remote": RemotePlacement,
    "ray": RayPlacement,
}
# docs/security.md: every field of these groups, and these fields beside them.
LIMIT_GROUPS = ("limits.", "grpc_options.")
SERVER_LIMITS = (
    "drain_delay_s",
    "drain_s",
    "parallel_loads",
    "load_retries",
    "response_cache_bytes",
    "memory_budget",
    "load_wait_s",
    "load_waiting",
    "tls.handshake_timeout_s",
    "tls.handshakes",
    "tfserving.rest_timeout_ms",
    "triton.http_max_input_size",
)
MODEL_LIMITS = (
    "max_batch_size",
    "max_queue_rows",
    "max_queue_bytes",
    "instances",
    "run_timeout_ms",
    "load_timeout_s",
    "restart_backoff_max_s",
)


TEXT_LIMITS = (
    "max_sequences",
    "max_waiting",
    "max_tokens",
    "max_prompt_tokens",
    "max_new_tokens",
    "kv_bytes",
    "reader_tokens",
)


def table(fields: Iterable[ConfigField]) -> str:
    rows = ["| field | default | allowed | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{field.path}` | {default_text(field)} | {cell(field.allowed)} | {cell(field.help)} |"
        for field in fields
    ]
    return "\n".join(rows) + "\n"


def limits(kind: type[msgspec.Struct], names: Sequence[str]) -> list[ConfigField]:
    known = list(list_fields(kind))
    missing = set(names) - {field.path for field in known}
    if missing:
        raise SystemExit(f"no such field: {', '.join(sorted(missing))}")
    return [field for field in known if field.path in names or is_limit(field)]


def is_limit(field: ConfigField) -> bool:
    return field.path.startswith(LIMIT_GROUPS) and not isinstance(field.default, bool)


def pages() -> dict[Path, dict[str, str]]:
    """Of each page, the tables it has a place for."""
    return {
        DOCS / "configuration.md": {name: table(list_fields(kind)) for name, kind in TABLES.items()},
        DOCS / "security.md": {
            "server limits": table(limits(Settings, SERVER_LIMITS)),
            "model limits": table(limits(NativeConfig, MODEL_LIMITS)),
            "text limits": table(limits(TextOptions, TEXT_LIMITS)),
        },
    }


def default_text(field: ConfigField) -> str:
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


def page_with_tables(page: Path, tables: dict[str, str]) -> str:
    text = page.read_text()
    for name, rows in tables.items():
        place = re.compile(rf"<!-- fields: {name} -->\n(.*?)<!-- end -->", re.DOTALL)
        written = f"<!-- fields: {name} -->\n{rows}<!-- end -->"
        text, found = place.subn(lambda _, written=written: written, text)
        if found != 1:
            raise SystemExit(f"{page.name} has no place for {name}")
    return text


def main() -> int:
    wanted = {page: page_with_tables(page, tables) for page, tables in pages().items()}
    if sys.argv[1:] == ["--check"]:
        return int(any(page.read_text() != text for page, text in wanted.items()))
    for page, text in wanted.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
