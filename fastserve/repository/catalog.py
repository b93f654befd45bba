"""The catalog of versions: the one place where dialects and the engine look a version up.

A lookup is a dict access or two, since every request makes one. Changes come only from the repository (or
from the replica of it in another process), through `move` and `put`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

from fastserve.errors import ServeError, server_starting
from fastserve.repository.version import TRANSITIONS, Model, Version, VersionState
from fastserve.util.rate_limited_log import run_all


class Catalog:
    """Models by name. `on_change` callbacks get the version whose state changed, after the change."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.on_change: list[Callable[[Version], None]] = []
        self.on_blame: list[Callable[[Model], None]] = []
        """Told of a model whose folder or config is at fault, or is so no more."""
        self.starting: dict[str, bool] = {}
        """Models that the start of the server has not loaded yet -> whether they may generate text."""

    def available(self, name: str, number: int | None = None) -> Version | None:
        """Return the available version of that number, or the highest one for None."""
        model = self.models.get(name)
        if model is None:
            return None
        if number is None:
            return model.latest
        version = model.versions.get(number)
        return version if version is not None and version.state is VersionState.AVAILABLE else None

    def ready(self, name: str, number: int | None = None) -> bool:
        """Return whether `available` finds a version that has a worker able to answer."""
        version = self.available(name, number)
        return version is not None and not version.down

    def check_started(self, name: str) -> None:
        """Raise ServeError UNAVAILABLE while the server's start has not loaded the model, or failed to."""
        if name in self.starting:
            raise server_starting(name)

    def blame(self, model: Model, error: ServeError | None) -> None:
        """Set why the model's folder or config cannot be used; None clears it."""
        told, model.error = model.error, error
        model.failed_at = 0.0 if error is None else model.failed_at or time.time()
        if str(told) != str(error):
            run_all(list(self.on_blame), lambda callback: callback(model))

    def labelled(self, name: str, label: str) -> Version | None:
        """Return the available version a label points at."""
        model = self.models.get(name)
        number = None if model is None else model.labels.get(label)
        return None if number is None else self.available(name, number)

    def model(self, name: str) -> Model:
        """Return the model of that name, added when it is new."""
        if name not in self.models:
            self.models[name] = Model(name)
        return self.models[name]

    def put(self, version: Version) -> Version | None:
        """List a version under its number. Returns the one it displaces: unload that afterwards."""
        model = self.model(version.model)
        displaced = model.versions.get(version.number)
        model.versions[version.number] = version
        self._changed(version)
        return displaced

    def move(self, version: Version, to: VersionState, error: ServeError | None = None) -> None:
        """Move a version to its next state. Raises ValueError for a transition that the table does not
        have."""
        if to not in TRANSITIONS[version.state]:
            raise ValueError(f"{version!r} cannot become {to.name}")
        version.state = to
        version.error = error
        if to is VersionState.END:
            version.end()
        self._changed(version)

    def _changed(self, version: Version) -> None:
        model = self.models.get(version.model)
        if model is not None:
            found = model.available()
            model.latest = found[-1] if found else None
        # A listener's fault must not stop a load half way.
        run_all(list(self.on_change), lambda callback: callback(version))


class VersionListener(Protocol):
    """Holds on to memory of versions, and releases it when they end."""

    def forget(self, version: Version) -> None:
        """Release what is kept of this version: it has ended."""


class VersionListeners:
    """The listeners of one dialect, held weakly."""

    def __init__(self, catalog: Catalog) -> None:
        self._listeners: WeakSet[VersionListener] = WeakSet()
        catalog.on_change.append(self._version_changed)

    def add(self, listener: VersionListener) -> None:
        """Notify the listener when a version ends."""
        self._listeners.add(listener)

    def _version_changed(self, version: Version) -> None:
        if version.state is VersionState.END:
            for listener in list(self._listeners):
                listener.forget(version)


def labels_of(version: Version, output: str, catalog: Catalog) -> Sequence[str]:
    """Return the class names of an output by index, empty for none.

    They are the lines of its label file; an ensemble without one has those of the model that writes the
    output.
    """
    config = version.config
    found = config.output_labels.get(output, config.class_texts)
    if found or config.options.ensemble is None:
        return found
    for step in config.options.ensemble.steps:
        for inner, tensor in step.outputs.items():
            if tensor == output:
                model = catalog.available(step.model, step.version)
                return labels_of(model, inner, catalog) if model is not None else ()
    return ()
