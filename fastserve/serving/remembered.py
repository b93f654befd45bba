"""A dict that forgets: what requests of one kind have in common, by what tells that kind."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(dict[Key, Value]):
    """At most `most` entries; then it begins anew. A client that makes up ever new keys only costs itself."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)
