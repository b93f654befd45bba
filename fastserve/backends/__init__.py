"""Backends: what a worker runs. One framework each, imported inside `load()`.

They know arrays and models; not processes, shared memory or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fastserve.backends.base import Backend, read_specs
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError
from fastserve.tensor import TensorSpec

__all__ = ["Backend", "TensorSpec", "create", "read_specs"]


def create(config: Mapping[str, Any], version_dir: Path, instance: int) -> Backend:
    """Make the backend that `config["backend"]` names, without loading it.

    A name with a colon, "package.module:Class", is a backend of the user's own: a class called as
    `Class(config, version_dir, instance)`. Raises ConfigError for any other name, and for a class that does
    not exist.
    """
    entry = find_backend(str(config.get("backend", "")))
    if not entry.entry_point:
        raise ConfigError(f"backend {entry.name} is run by the server itself")
    module, _, attribute = entry.entry_point.partition(":")
    try:
        made = getattr(import_module(module), attribute)
    except AttributeError:
        raise ConfigError(f"backend {entry.entry_point}: module {module} has no {attribute}") from None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ConfigError(f"backend {entry.entry_point}: no module {error.name} can be imported") from None
    backend: Backend = made(config, version_dir, instance)
    return backend
