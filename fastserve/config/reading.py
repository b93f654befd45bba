"""Settings from one YAML file, overridden field by field by command line flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastserve.config.fields import convert, fault_text, hint, list_fields
from fastserve.config.settings import Settings
from fastserve.errors import ConfigError

PLAIN = "tcp://"  # before an address that speaks no TLS though tls.cert is set
LISTENER_FIELDS = ("listen", "http", "grpc")


def load_settings(file: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Settings of `file` with `overrides` on top: dotted path -> value, as `Field.path` names it.

    Values of overrides may be text, as flags are; a list is then split at commas.
    Raises ConfigError naming field, value and what is allowed.
    """
    from fastserve.config.yaml_text import read_yaml  # workers, which have settings too, start 25 ms sooner

    origin = file.name if file else "settings"
    tree = read_yaml(file, origin) if file else {}
    _open_listeners(tree, origin)
    settings = convert(tree, Settings, origin)
    if not overrides:
        return settings
    known = {field.path: field for field in list_fields(Settings)}
    for path, value in overrides.items():
        if path not in known:
            raise ConfigError(f"flags: {path}: unknown field{hint(path, sorted(known))}")
        is_list = isinstance(known[path].default, tuple) and path not in LISTENER_FIELDS
        _put(tree, path, value.split(",") if is_list and isinstance(value, str) else value)
    _open_listeners(tree, "flags")
    return convert(tree, Settings, "flags", lax=True)


def parse_listener(text: str) -> dict[str, Any]:
    """`[tcp://]HOST:PORT[=dialect,...]` as the fields of a Listener; the struct checks the address."""
    address, _, dialects = text.partition("=")
    address = address.strip()
    return {
        "address": address.removeprefix(PLAIN),
        "dialects": [d for d in map(str.strip, dialects.split(",")) if d],
        "tls": not address.startswith(PLAIN),
    }


def _open_listeners(tree: dict[str, Any], origin: str) -> None:
    for name in LISTENER_FIELDS:
        given = tree.get(name)
        if given is None and name not in tree:
            continue
        items = [given] if isinstance(given, str) else given
        if not isinstance(items, (list, tuple)):
            wanted = "a list of HOST:PORT[=dialect,...], or off"
            raise ConfigError(f"{origin}: {fault_text(name, given, wanted)}")
        tree[name] = [parse_listener(i) if isinstance(i, str) else i for i in items if i != "off"]
    if tree.get("listen"):  # in place of the two ports that are there when nothing is said
        tree.setdefault("http", [])
        tree.setdefault("grpc", [])


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = list(value) if isinstance(value, tuple) else value
