"""The catalog of versions: the one place where dialects and the engine look a version up.

A lookup is a dict access or two, since every request makes one. Changes come only from the repository (or
from the replica of it in another process), through `move` and `put`. A PartialCatalog has the models of a
whole one whose names fit, for clients who may use no others; a TrafficCatalog has the models of another one
for requests whose versions were drawn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from typing import Protocol
from weakref import WeakSet

from fastserve.errors import Kind, Reason, ServeError, server_starting
from fastserve.repository.version import TRANSITIONS, Model, Version, VersionState, sort_arms
from fastserve.util.model_demand import DRAW, refuse_or_demand
from fastserve.util.rate_limited_log import run_all


class Catalog:
    """Models by name. `on_change` callbacks get the version whose state changed, after the change."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.on_change: list[Callable[[Version], None]] = []
        self.on_blame: list[Callable[[Model], None]] = []
        """Told of a model whose folder or config is at fault, or is so no more."""
        self.on_rules: list[Callable[[], None]] = []
        """Called when rules of models, their labels or their versions may have changed."""
        self.on_renewed: list[Callable[[Version], None]] = []
        """Get an available version whose scheduler is another one now."""
        self._starting: dict[str, bool] = {}
        self.parts: WeakSet[PartialCatalog] = WeakSet()

    @property
    def starting(self) -> Mapping[str, bool]:
        """Models that the start of the server has not loaded yet -> whether they may generate text."""
        return self._starting

    def begin_start(self, name: str, *, may_write: bool) -> None:
        """List a model that the start of the server will load."""
        self._starting[name] = may_write

    def end_start(self, name: str) -> bool:
        """Note that the start has loaded the model, or failed to; return whether it was still to come."""
        return self._starting.pop(name, None) is not None

    def available(self, name: str, number: int | None = None) -> Version | None:
        """Return the available version of that number, or the latest one for None."""
        model = self.models.get(name)
        if model is None:
            return None
        if number is None:
            return model.latest
        version = model.versions.get(number)
        return version if version is not None and version.state is VersionState.AVAILABLE else None

    def ready(self, name: str, number: int | None = None) -> bool:
        """Return whether `available` finds a version that has a worker able to answer, or the version is
        loaded on demand."""
        version = self.available(name, number)
        if version is not None:
            return not version.down
        model = self.models.get(name)
        return model is not None and model.waits_for_demand and (number is None or number in model.versions)

    def explain_absence(self, *names: str) -> None:
        """Raise the ServeError of a model that was looked up in vain, under any of these names, where it is
        not NOT_FOUND: UNAVAILABLE while the server's start has not loaded it, or failed to; or ModelDemand
        for one that is loaded on demand."""
        for name in names:
            if name in self.starting:
                raise server_starting(name)
            model = self.models.get(name)
            if model is not None and model.on_demand and model.latest is None:
                refuse_or_demand(name)

    def allows(self, name: str) -> bool:
        """Return whether the client may use a model of this name, if there is one."""
        return True

    def check_allowed(self, *names: str) -> None:
        """Raise ServeError PERMISSION_DENIED for a model, under any of these names, that the client may not
        use, whether there is one or not."""

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
            for part in self.parts:
                part.list_model(self.models[name])
        return self.models[name]

    def remove(self, name: str) -> None:
        """List a model no more."""
        del self.models[name]
        for part in self.parts:
            part.models.pop(name, None)

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

    def settle_rules(self, model: Model) -> None:
        """Take over the model's rules, labels and available versions."""
        model.latest = model.find_default()
        self.tell_rules()

    def tell_rules(self) -> None:
        """Notify who follows the rules of models."""
        run_all(list(self.on_rules), lambda callback: callback())

    def renew(self, version: Version) -> None:
        """Have what is kept of an available version forgotten: it has another scheduler."""
        parts = [told for part in self.parts for told in part.on_renewed]
        run_all([*self.on_renewed, *parts], lambda callback: callback(version))

    def _changed(self, version: Version) -> None:
        model = self.models.get(version.model)
        if model is not None:
            self.settle_rules(model)
        listeners = [*self.on_change, *(told for part in self.parts for told in part.listeners_of(version))]
        # A listener's fault must not stop a load half way.
        run_all(listeners, lambda callback: callback(version))


OTHER_MODEL = "this API key does not allow this model"


class PartialCatalog(Catalog):
    """The models of a whole catalog whose names fit one of `patterns` (fnmatch). It follows the whole one,
    which holds it weakly, and nothing is ever changed here."""

    def __init__(self, whole: Catalog, patterns: Sequence[str]) -> None:
        super().__init__()
        self.whole, self.patterns = whole, patterns
        self._fits = re.compile("|".join(map(translate, patterns))).match
        for model in whole.models.values():
            self.list_model(model)
        whole.parts.add(self)

    def allows(self, name: str) -> bool:
        return self._fits(name) is not None

    @property
    def starting(self) -> Mapping[str, bool]:
        return {name: may_write for name, may_write in self.whole.starting.items() if self.allows(name)}

    def explain_absence(self, *names: str) -> None:
        self.check_allowed(*names)
        super().explain_absence(*names)

    def check_allowed(self, *names: str) -> None:
        given = [name for name in names if name]
        if given and not any(map(self.allows, given)):
            raise ServeError(Kind.PERMISSION_DENIED, OTHER_MODEL, reason=Reason.API_KEY)

    def list_model(self, model: Model) -> None:
        """List a new model of the whole catalog, if it is in this part."""
        if self.allows(model.name):
            self.models[model.name] = model

    def listeners_of(self, version: Version) -> list[Callable[[Version], None]]:
        """Return who wants to know of a change of this version."""
        return self.on_change if self.allows(version.model) else []


class TrafficCatalog(PartialCatalog):
    """The models of a part of the whole catalog, for requests that were drawn: where they name no version,
    they get the one that was drawn for their model.

    While that one is not available, or has no worker that answers, they get the one of the largest weight
    that is, and the latest one where there is none."""

    def __init__(self, whole: Catalog, patterns: Sequence[str], arms: Mapping[str, str]) -> None:
        """`arms` are keys of `traffic`, by model."""
        super().__init__(whole, patterns)
        self._arms = arms

    def available(self, name: str, number: int | None = None) -> Version | None:
        draw = DRAW.get()
        if draw is not None:
            draw.version = None
        if number is not None or name not in self._arms:
            return super().available(name, number)
        model = self.models.get(name)
        if model is None:
            return None
        version = model.arm(self._arms[name])
        if version is None or version.down:
            others = filter(None, map(model.arm, sort_arms(model.rules.traffic)))
            version = next((other for other in others if not other.down), version or model.latest)
        if draw is not None:
            draw.version = version
        return version


class VersionListener(Protocol):
    """Holds on to memory of versions, and releases it when they end."""

    def forget(self, version: Version) -> None:
        """Release what is kept of this version: it has ended."""


class VersionListeners:
    """The listeners of one dialect, held weakly."""

    def __init__(self, catalog: Catalog) -> None:
        self._listeners: WeakSet[VersionListener] = WeakSet()
        catalog.on_change.append(self._version_changed)
        catalog.on_renewed.append(self._forget)

    def add(self, listener: VersionListener) -> None:
        """Notify the listener when a version ends."""
        self._listeners.add(listener)

    def _version_changed(self, version: Version) -> None:
        if version.state is VersionState.END:
            self._forget(version)

    def _forget(self, version: Version) -> None:
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
