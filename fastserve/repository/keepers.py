"""Who is told when a version ends: what holds on to a version's memory, to be quick the next time."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version, VersionState


class KeepsVersions(Protocol):
    """What holds on to memory of a version."""

    def forget(self, version: Version) -> None:
        """The version has ended."""


class Keepers:
    """Those of one dialect, each for as long as it lives."""

    def __init__(self, catalog: Catalog) -> None:
        self._keepers: WeakSet[KeepsVersions] = WeakSet()
        catalog.on_change.append(self._version_changed)

    def add(self, keeper: KeepsVersions) -> None:
        """Tell it when a version ends."""
        self._keepers.add(keeper)

    def _version_changed(self, version: Version) -> None:
        if version.state is VersionState.END:
            for keeper in list(self._keepers):
                keeper.forget(version)
