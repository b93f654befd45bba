"""The owner's catalog as a message, and as the catalog of another front process."""

from __future__ import annotations

from typing import Any

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Model, Version, VersionState


def catalog_message(catalog: Catalog) -> dict[str, Any]:
    """Every model, its labels and the state of every version it ever had."""
    return {"op": "catalog", "models": {name: _write_model(model) for name, model in catalog.models.items()}}


def _write_model(model: Model) -> dict[str, Any]:
    versions = [[v.number, id(v), v.state.value, _write_error(v.error)] for v in model.versions.values()]
    return {
        "labels": model.labels,
        "versions": versions,
        "latest": model.latest.number if model.latest else None,
        "error": _write_error(model.error),
    }


def _write_error(error: ServeError | None) -> list[Any] | None:
    return [error.kind.value, error.message] if error else None


def _read_error(written: list[Any] | None) -> ServeError | None:
    return ServeError(Kind(written[0]), written[1]) if written else None


def apply_catalog(catalog: Catalog, message: dict[str, Any], opened: dict[int, Version]) -> None:
    """Make `catalog` what the message says. `opened` are the versions this process has a queue for, by
    the owner's id; others are listed with their state and cannot serve."""
    for name in set(catalog.models) - set(message["models"]):
        del catalog.models[name]
    for name, written in message["models"].items():
        model = catalog.model(name)
        model.labels = {label: int(number) for label, number in written["labels"].items()}
        model.versions = {row[0]: _read_version(name, row, opened, model) for row in written["versions"]}
        model.error = _read_error(written["error"])
        latest = written["latest"]
        model.latest = model.versions.get(latest) if latest is not None else None


def _read_version(name: str, row: list[Any], opened: dict[int, Version], model: Model) -> Version:
    number, key, state, error = row
    version = opened.get(key) or model.versions.get(number) or Version.unloaded(name, number)
    version.state = VersionState(state)
    version.error = _read_error(error)
    return version
