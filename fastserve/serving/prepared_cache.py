"""Prepared requests by the bytes they are known by: matched, learned, bounded, dropped with their version.

For requests whose bytes but for the data are the same each time: the head of a message, a header. (JSON texts
with numbers in between are matched by `_ext.infer_frame`.)
"""

from __future__ import annotations

from typing import Generic, TypeVar

from fastserve.repository.keepers import Keepers
from fastserve.repository.version import Version
from fastserve.serving.fast_path import FastPath
from fastserve.serving.prepared import PreparedRequest
from fastserve.serving.remembered import Remembered

Prepared = TypeVar("Prepared", bound=PreparedRequest)


class PreparedCache(Generic[Prepared]):
    """At most `most` of them."""

    __slots__ = ("__weakref__", "_known", "find")

    def __init__(self, keepers: Keepers, most: int) -> None:
        self._known: Remembered[bytes, tuple[FastPath, Prepared]] = Remembered(most)
        self.find = self._known.get
        keepers.add(self)

    def learn(self, key: bytes, path: FastPath, prepared: Prepared) -> None:
        """Remember what requests of this key are."""
        self._known[key] = path, prepared

    def drop(self, key: bytes) -> None:
        """Requests of this key mean something else now."""
        self._known.pop(key, None)

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        for key in [key for key, (path, _) in self._known.items() if path.version is version]:
            del self._known[key]
