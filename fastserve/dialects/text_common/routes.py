"""Routes of the text APIs: the path, its endpoint, its refusals, and the size of its bodies.

    TextRoute(HttpRoute("infer", "/infer", {"POST": Scope.INFER}), infer, refuse, room=BodyUse.IMAGES)

`make` is called with the service and the parts of the target, once for each target that is requested (the
router caches those that were answered 200).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserve.dialects.text_common.mindie import BodyTooLarge
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute

if TYPE_CHECKING:
    from fastserve.dialects.text_common.service import TextService
    from fastserve.errors import ServeError
    from fastserve.net.request import Call, Endpoint


LEAST_BYTES, SEVERAL_BYTES = 8 << 20, 16 << 20
"""A body may have: one of one prompt, and one of several."""
OTHER_BYTES = 1 << 20
"""Bytes of a body besides its prompts."""
ESCAPED = 6
"""Bytes of a character as JSON may write it."""

# Words in capitals of a path -> what clients may write for them.
_WORDS = {
    "MODEL": r"(?P<model>[\w.\-]+)",
    "-N": r"-(?P<number>[0-9]{1,9})",
    "ROLE": r"(?P<role>\w+)",
    "NAME": r"(?P<name>.+)",
}
Refuse = Callable[["TextService", "Call", "ServeError"], None]


class TargetParts(NamedTuple):
    """The variable parts of a target. `target` is the whole, as sent."""

    target: str
    model: str = ""
    number: int | None = None
    role: str = ""
    name: str = ""
    """A model's, however it is written; not decoded."""


class BodyUse(Enum):
    """The largest content that a route's body may have."""

    TEXT = "one prompt, as text or tokens"
    TEXTS = "several"
    IMAGES = "one prompt with images"
    CHAT = "a conversation with images"


class TextRoute(NamedTuple):
    """One row of an API's table of routes."""

    row: HttpRoute
    make: Callable[[TextService, TargetParts], Endpoint]
    refuse: Refuse
    """Refuses a call that its scope does not allow, in the API's form."""
    gives_way: Yields = Yields.NEVER
    """Whether another dialect of the listener with this path goes first."""
    room: BodyUse | None = None
    """Bounds the route's bodies; None: `limits.body_bytes` alone does."""


class RouteTable:
    """The paths of all APIs by their targets. The first that fits counts."""

    def __init__(self, paths: Iterable[TextRoute]) -> None:
        self._plain: dict[tuple[str, str], TextRoute] = {}
        self._patterns: list[tuple[re.Pattern[str], TextRoute]] = []
        for path in paths:
            pattern = _compile(path.row.path)
            if pattern.groups:
                self._patterns.append((pattern, path))
            else:
                self._plain.update({(verb, path.row.path): path for verb in path.row.scopes})

    def find(self, method: str, target: str) -> tuple[TextRoute, TargetParts] | None:
        """The row, and what the target names; None for none."""
        written = target.partition("?")[0]
        path = self._plain.get((method, written))
        if path is not None:
            return path, TargetParts(target)
        for pattern, path in self._patterns:
            match = pattern.fullmatch(written)
            if match is not None and method in path.row.scopes:
                said = match.groupdict()
                number = int(said["number"]) if "number" in said else None
                return path, TargetParts(
                    target, said.get("model", ""), number, said.get("role", ""), said.get("name", "")
                )
        return None


@lru_cache(maxsize=256)
def _compile(path: str) -> re.Pattern[str]:
    text = re.escape(path).replace(r"\-N", "-N")
    for word, pattern in _WORDS.items():
        text = text.replace(word, pattern)
    return re.compile(text, re.ASCII)


def size_fault(service: TextService, room: BodyUse, size: int) -> BodyTooLarge | None:
    """Hold a body against what its route can use; the fault, None for none."""
    options, texts = service.options, service.texts
    if size <= min(LEAST_BYTES, options.request_mb << 20):
        return None
    least = SEVERAL_BYTES if room in (BodyUse.TEXTS, BodyUse.CHAT) else LEAST_BYTES
    most = max(least, ESCAPED * texts.most_characters) + OTHER_BYTES
    if room in (BodyUse.IMAGES, BodyUse.CHAT) and texts.see:
        most += options.max_images * (options.image_mb << 20) * 4 // 3
    most_mb = min(options.request_mb, -(-most >> 20))
    return BodyTooLarge(most_mb) if size > most_mb << 20 else None


def with_size_check(service: TextService, path: TextRoute, room: BodyUse, endpoint: Endpoint) -> Endpoint:
    """The endpoint, for bodies that came without a Content-Length too."""

    def run(call: Call) -> Coroutine[Any, Any, None] | None:
        fault = size_fault(service, room, len(call.body))
        if fault is None:
            return endpoint(call)
        path.refuse(service, call, fault)
        return None

    return run
