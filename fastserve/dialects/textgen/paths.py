"""A path of one of the APIs: what it is called, what serves it, how it says no.

    PATHS = (Path(HttpRoute("infer", "/infer", {"POST": Scope.INFER}), Infer, refuse),)        infer.py

`make` is called with the service and what the path names, once for each target that is asked (the wire
remembers those that were answered 200). A call's own facts it finds in the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fastserve.serving.dialect import HttpRoute

if TYPE_CHECKING:
    from fastserve.dialects.textgen.service import Service
    from fastserve.errors import ServeError
    from fastserve.wire.call import Call, Endpoint

# Words in capitals of a path -> what clients may write for them.
_WORDS = {
    "MODEL": r"(?P<model>[\w.\-]+)",
    "-N": r"-(?P<number>[0-9]{1,9})",
    "ROLE": r"(?P<role>\w+)",
    "NAME": r"(?P<name>.+)",
}
Refuse = Callable[["Service", "Call", "ServeError"], None]


class Named(NamedTuple):
    """What a target names. `target` is as sent."""

    target: str
    model: str = ""
    number: int | None = None
    role: str = ""
    name: str = ""
    """A model's, however it is written; not decoded."""


class Path(NamedTuple):
    """One row of an API's table."""

    row: HttpRoute
    make: Callable[[Service, Named], Endpoint]
    refuse: Refuse
    """How a call is refused that its scope holds back."""
    gives_way: bool = False
    """To another dialect of the listener that has this path."""


class Table:
    """The paths of all APIs by their targets. The first that fits counts."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._plain: dict[tuple[str, str], Path] = {}
        self._patterns: list[tuple[re.Pattern[str], Path]] = []
        for path in paths:
            pattern = _compile(path.row.path)
            if pattern.groups:
                self._patterns.append((pattern, path))
            else:
                self._plain.update({(verb, path.row.path): path for verb in path.row.scopes})

    def find(self, method: str, target: str) -> tuple[Path, Named] | None:
        """The row, and what the target names; None for none."""
        written = target.partition("?")[0]
        path = self._plain.get((method, written))
        if path is not None:
            return path, Named(target)
        for pattern, path in self._patterns:
            match = pattern.fullmatch(written)
            if match is not None and method in path.row.scopes:
                said = match.groupdict()
                number = int(said["number"]) if "number" in said else None
                return path, Named(
                    target, said.get("model", ""), number, said.get("role", ""), said.get("name", "")
                )
        return None


@lru_cache(maxsize=256)
def _compile(path: str) -> re.Pattern[str]:
    text = re.escape(path).replace(r"\-N", "-N")
    for word, pattern in _WORDS.items():
        text = text.replace(word, pattern)
    return re.compile(text, re.ASCII)
