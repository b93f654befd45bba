"""What is served right now: the one place that dialects and the engine ask for a version.

Lookups are a dict access or two, since every request makes one. Changes come only from the
repository (or from whoever mirrors it into another process), through `move` and `put`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastserve.errors import ServeError
from fastserve.repository.version import TRANSITIONS, Model, Version, VersionState

log = logging.getLogger(__name__)


class Catalog:
    """Models by name. `on_change` callbacks get the version that moved, after the move."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.on_change: list[Callable[[Version], None]] = []

    def available(self, name: str, number: int | None = None) -> Version | None:
        """The available version of that number, or the highest one for None."""
        model = self.models.get(name)
        if model is None:
            return None
        if number is None:
            return model.latest
        version = model.versions.get(number)
        return version if version is not None and version.state is VersionState.AVAILABLE else None

    def labelled(self, name: str, label: str) -> Version | None:
        """The available version a label points at."""
        model = self.models.get(name)
        number = None if model is None else model.labels.get(label)
        return None if number is None else self.available(name, number)

    def model(self, name: str) -> Model:
        """The model of that name, added when it is new."""
        if name not in self.models:
            self.models[name] = Model(name)
        return self.models[name]

    def put(self, version: Version) -> Version | None:
        """List a version under its number; returns the one it displaces (unload that one afterwards)."""
        model = self.model(version.model)
        displaced = model.versions.get(version.number)
        model.versions[version.number] = version
        self._changed(version)
        return displaced

    def move(self, version: Version, to: VersionState, error: ServeError | None = None) -> None:
        """One step of a version's life. Raises ValueError when the table does not have it."""
        if to not in TRANSITIONS[version.state]:
            raise ValueError(f"{version!r} cannot become {to.name}")
        version.state = to
        version.error = error
        if to is VersionState.END:
            version.view = version.text_model = None
        self._changed(version)

    def _changed(self, version: Version) -> None:
        model = self.models.get(version.model)
        if model is not None:
            found = model.available()
            model.latest = found[-1] if found else None
        for callback in list(self.on_change):
            _tell(callback, version)


def _tell(callback: Callable[[Version], None], version: Version) -> None:
    try:
        callback(version)
    except Exception:  # a listener's fault must not stop a load half way
        log.exception("a callback failed on a change of %r", version)
