"""What is kept of a version to be quick the next time, and dropped when it ends; a path above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fastserve.engine import cache_stage_of, fast_queue_of
from fastserve.metrics.traffic import Traffic
from fastserve.repository.keepers import Keepers
from fastserve.repository.version import Version
from fastserve.serving.cached_path import CachedPath
from fastserve.serving.fast_path import FastPath, Outcome


class HasVersion(Protocol):
    """A dialect's fast path of one version."""

    version: Version


Path = TypeVar("Path", bound=HasVersion)
Made = TypeVar("Made")


class LastPath(Generic[Path]):
    """One endpoint's. A version without a fast path is remembered too: it is not asked again."""

    __slots__ = ("__weakref__", "_keepers", "_open", "_without", "path")

    def __init__(self, keepers: Keepers, open: Callable[[Version], Path | None]) -> None:
        self._keepers, self._open = keepers, open
        self.path: Path | None = None
        self._without: Version | None = None

    def find(self, version: Version | None) -> Path | None:
        """The path of this version; None when it has none. For callers whom `path` does not suit already."""
        if version is None or version is self._without:
            return None
        if self.path is None or self.path.version is not version:
            self.path = self._open(version)
            self._without = version if self.path is None else None
            self._keepers.add(self)
        return self.path

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        if self.path is not None and self.path.version is version:
            self.path = None
        if self._without is version:
            self._without = None


class Kept(Generic[Made]):
    """What a dialect keeps of each version, made when it is first asked for: a path, a view of its own."""

    __slots__ = ("__weakref__", "_made", "_make")

    def __init__(self, keepers: Keepers, make: Callable[[Version], Made]) -> None:
        self._make = make
        self._made: dict[Version, Made] = {}
        keepers.add(self)

    def of(self, version: Version) -> Made:
        """That of an available version."""
        if version not in self._made:
            self._made[version] = self._make(version)
        return self._made[version]

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        self._made.pop(version, None)


def open_path(version: Version, traffic: Traffic, outcome: Outcome, patience_ns: int = 0) -> FastPath | None:
    """The fast path of a version; None for one that does more with a request than run or keep it."""
    stage = cache_stage_of(version)
    if stage is not None:
        return CachedPath(version, stage, traffic, outcome, patience_ns)
    queue = fast_queue_of(version)
    return None if queue is None else FastPath(version, queue, traffic, outcome, patience_ns)
