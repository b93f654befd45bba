"""Model callbacks: what model code may ask of the server from inside its worker (other models, metrics).

The worker sets its control channel here before the model is imported, and decides how a call travels.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from fastserve.errors import Kind, ServeError

ALONE = "only a model behind a server can ask something of it"


class CallbackChannel(Protocol):
    """The worker's control channel, as model callbacks use it."""

    def ask(self, callback: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a callback and return the server's reply: `kind` and `message` where it refused."""

    def tell(self, callback: Mapping[str, Any]) -> None:
        """Send a callback that has no reply."""


class process:
    """Holds the control channel of this process."""

    channel: CallbackChannel | None = None


class _ThreadChannel(threading.local):
    """Holds the control channel of a worker that is a thread of a shared process."""

    channel: CallbackChannel | None = None


thread = _ThreadChannel()


def channel_of_thread() -> CallbackChannel | None:
    """Return the channel of the worker that this thread serves; None where there is no server."""
    return thread.channel or process.channel


def call(do: str, **fields: Any) -> Mapping[str, Any]:
    """Send a callback and return the reply. Raises ServeError with the server's text."""
    channel = channel_of_thread()
    if channel is None:
        raise ServeError(Kind.UNAVAILABLE, ALONE)
    reply = channel.ask({"do": do, **fields})
    if "message" in reply:
        raise ServeError(Kind(reply["kind"]), reply["message"])
    return reply


def notify(do: str, **fields: Any) -> None:
    """Send a callback that has no reply; nothing happens where there is no server."""
    channel = channel_of_thread()
    if channel is not None:
        channel.tell({"do": do, **fields})
