"""Lazy imports of libraries that take seconds to import and that few tests use."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Late:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks everything there is whether it is a test
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
