"""Backends: what a worker runs. One framework each, imported inside `load()`.

They know arrays and models; not processes, shared memory or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fastserve.backends.base import Backend, read_specs
from fastserve.errors import ConfigError
from fastserve.tensor import TensorSpec

# name in model.yaml -> "module:Class"; imported in the worker only
BACKENDS: dict[str, str] = {
    "onnx": "fastserve.backends.onnx:OnnxBackend",
    "python": "fastserve.backends.python:PythonBackend",
    "triton_python": "fastserve.backends.triton_python:TritonPythonBackend",
}

__all__ = ["BACKENDS", "Backend", "TensorSpec", "create", "read_specs"]


def create(config: Mapping[str, Any], version_dir: Path, instance: int) -> Backend:
    """Makes (and does not load) the backend that `config["backend"]` names.

    A name with a colon, "package.module:Class", is a backend of the user's own: a class called as
    `Class(config, version_dir, instance)`. Raises ConfigError for any other name.
    """
    name = str(config.get("backend", ""))
    place = BACKENDS.get(name, name)
    module, colon, attribute = place.partition(":")
    if not colon:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, or module:Class; not {name!r}")
    backend: Backend = getattr(import_module(module), attribute)(config, version_dir, instance)
    return backend
