"""Which dialects there are, and which of them a listener speaks. Builds none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastserve.config import Listener, Settings
from fastserve.dialects import SPECS
from fastserve.errors import ConfigError
from fastserve.repository.version import Version
from fastserve.request import Recorded
from fastserve.serving.dialect import DialectSpec

Spec = DialectSpec[Any]


def find_specs(settings: Settings) -> tuple[Spec, ...]:
    """Every dialect of this server: the users' own come first. Raises ConfigError."""
    specs = (*(_import_spec(path) for path in settings.dialects), *SPECS)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"dialects: there are two of the name {name!r}")
    for name in settings.dialect_options:
        if not any(spec.name == name and not spec.section for spec in specs):
            known = ", ".join(spec.name for spec in specs if not spec.section)
            raise ConfigError(f"dialect_options: given {name!r}, allowed: {known}")
    for spec in specs:
        spec.read_options(settings)
    return specs


def recorded_reader(settings: Settings) -> Callable[[Version], Iterator[Recorded]]:
    """Reads what a version brings to be run before it is available. Raises ConfigError."""
    specs = find_specs(settings)
    return lambda version: (one for spec in specs for one in spec.recorded(settings, version))


def _import_spec(path: str) -> Spec:
    module, _, name = path.partition(":")
    try:
        spec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as fault:
        raise ConfigError(f"dialects: {path}: {fault}") from None
    if not isinstance(spec, DialectSpec):
        raise ConfigError(f"dialects: {path}: given a {type(spec).__name__}, allowed: a DialectSpec")
    return spec


def choose_http(specs: Sequence[Spec], listener: Listener) -> list[Spec]:
    """What an HTTP listener speaks, in the order in which they are asked. Raises ConfigError."""
    named = choose(specs, listener)
    if len(named) == 1 and named[0].stands_in:
        return named
    return [spec for spec in specs if spec in named or spec.beside_others]


def choose_grpc(specs: Sequence[Spec], listener: Listener) -> list[Spec]:
    """What a gRPC listener speaks. Raises ConfigError."""
    return [spec for spec in choose(specs, listener) if spec.rpcs]


def choose(specs: Sequence[Spec], listener: Listener) -> list[Spec]:
    """The dialects a listener names, or those it speaks unasked. Raises ConfigError."""
    for name in listener.dialects:
        found = next((spec for spec in specs if spec.name == name), None)
        if found is None or (found.never_mixed and len(listener.dialects) > 1):
            mixed = ", ".join(spec.name for spec in specs if not spec.never_mixed)
            alone = " or ".join(spec.name for spec in specs if spec.never_mixed)
            raise ConfigError(
                f"{listener.address}: dialects: given {name!r}, allowed: {mixed}, or {alone} alone"
            )
    return [spec for spec in specs if (spec.name in listener.dialects if listener.dialects else spec.unasked)]
