"""Models that are made of other models: which, and in what order they can be loaded.

An ensemble can be loaded once the models of its steps are available, and is withdrawn when one goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.layout import ModelFolder
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import Version


def needs(config: ModelConfig | None) -> dict[str, set[int | None]]:
    """Models an ensemble's steps name -> versions they ask for, None for the latest; empty for others."""
    found: dict[str, set[int | None]] = {}
    ensemble = config.options.ensemble if config is not None else None
    for step in ensemble.steps if ensemble is not None else ():
        found.setdefault(step.model, set()).add(step.version)
    return found


def with_steps(names: Iterable[str], folders: Mapping[str, ModelFolder]) -> set[str]:
    """These models, and of the ensembles among them the models of their steps that there are."""
    found, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            config = folders[name].config if name in folders else None
            left += [step for step in needs(config) if step in folders]
    return found


def in_waves(folders: Iterable[ModelFolder]) -> list[list[ModelFolder]]:
    """Folders in the order to load them: each wave needs only what is in the waves before.

    Ensembles that go round in a circle make up the last wave; loading them says so.
    """
    left = {folder.name: folder for folder in folders}
    waves = []
    while left:
        wave = [f for f in left.values() if not any(n in left for n in needs(f.config))] or list(
            left.values()
        )
        waves.append(wave)
        for folder in wave:
            del left[folder.name]
    return waves


def dependants(catalog: Catalog, version: Version) -> list[str]:
    """Names of the ensembles that have a step on the version's model."""
    return [name for name, model in catalog.models.items() if version.model in needs(model.config)]


def served_by(catalog: Catalog, name: str) -> list[str]:
    """Names of the available ensembles that have a step on the model."""
    return [
        ensemble
        for ensemble, model in catalog.models.items()
        if catalog.available(ensemble) is not None and name in needs(model.config)
    ]


def missing(catalog: Catalog, name: str) -> ServeError | None:
    """Why the ensemble cannot serve now; None when all it needs is available."""
    model = catalog.models.get(name)
    for needed, numbers in needs(model.config if model is not None else None).items():
        for number in numbers:
            if catalog.available(needed, number) is None:
                gone = "which has no loaded version"
                if number is not None and catalog.available(needed) is not None:
                    gone = f"whose required version {number} is not loaded"
                return ServeError(Kind.INVALID_ARGUMENT, f"ensemble '{name}' depends on '{needed}' {gone}")
    return None
