"""What a model may ask of the server itself, from inside its worker: other models, metrics of its own.

The worker puts its line to the server here before the model is imported; how the words travel is its business
(workers/wishes.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from fastserve.errors import Kind, ServeError

ALONE = "only a model behind a server can ask something of it"


class Asks(Protocol):
    """The worker's line."""

    def ask(self, wish: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the server says to it: `kind` and `message` where it refused."""

    def tell(self, wish: Mapping[str, Any]) -> None:
        """The same without an answer."""


class server:
    """Where the worker puts its line."""

    line: Asks | None = None


class _Mine(threading.local):
    """Where a worker that is a thread of a shared process puts it."""

    line: Asks | None = None


mine = _Mine()


def ask(do: str, **fields: Any) -> Mapping[str, Any]:
    """Raises ServeError in the server's words."""
    line = mine.line or server.line
    if line is None:
        raise ServeError(Kind.UNAVAILABLE, ALONE)
    told = line.ask({"do": do, **fields})
    if "message" in told:
        raise ServeError(Kind(told["kind"]), told["message"])
    return told


def tell(do: str, **fields: Any) -> None:
    """Nothing comes back. Without a server it goes nowhere."""
    line = mine.line or server.line
    if line is not None:
        line.tell({"do": do, **fields})
