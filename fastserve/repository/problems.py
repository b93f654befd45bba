"""What stands in the way of models, in the log: each problem once, when it is new, with its traceback once.

A load is tried again and again, by several workers, for several versions, and the folder is looked at
every few seconds; the log tells what changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fastserve.errors import RemoteTrace, ServeError

log = logging.getLogger(__name__)


def no_version_text(notes: Iterable[str]) -> str:
    """Of a model with a config; `notes` say why its version folders were passed over."""
    told = "".join(f"; {note}" for note in notes) or ": there is no folder with a number for its name, say 1"
    return f"no version that can be loaded{told}"


class Problems:
    """Problems by model; "" is the repository itself."""

    def __init__(self) -> None:
        self._said: dict[str, set[str]] = {}
        self._traced: dict[str, set[str]] = {}  # reasons whose traceback has been logged

    def say(self, name: str, text: str, error: ServeError | None = None) -> None:
        """Log a problem of the model unless it is known; `error` is what it failed of."""
        said = self._said.setdefault(name, set())
        if text in said:
            return
        said.add(text)
        trace = None if error is None else self._trace(name, error)
        log.error("%s: %s", f"model {name}" if name else "repository", text, exc_info=trace)

    def settle(self, name: str, now: Iterable[str]) -> None:
        """These are the model's problems now: log the new ones, forget the ones that are gone."""
        for text in now:
            self.say(name, text)
        left = set(now)
        if not left:
            self.forget(name)
        elif name in self._said:
            self._said[name] &= left

    def forget(self, name: str) -> None:
        """Whatever comes next is new."""
        self._said.pop(name, None)
        self._traced.pop(name, None)

    def _trace(self, name: str, error: ServeError) -> RemoteTrace | None:
        traced = self._traced.setdefault(name, set())
        if not isinstance(error.__cause__, RemoteTrace) or error.message in traced:
            return None
        traced.add(error.message)
        return error.__cause__
