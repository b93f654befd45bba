"""A model's name and a version's number -> the version that answers, with the original's texts (spec 3.4)."""

from __future__ import annotations

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version

LATEST = -1


def find_version(catalog: Catalog, name: str, number: int) -> Version:
    """The available version; LATEST for the highest. Raises ServeError UNAVAILABLE."""
    version = catalog.available(name, None if number == LATEST else number)
    if version is not None:
        return version
    model = catalog.models.get(name)
    if model is None:
        raise _unknown(name, " is not found")
    if number == LATEST:
        raise _unknown(name, " has no available versions")
    known = number in model.versions
    raise _unknown(name, f" version {number} is not {'at ready state' if known else 'found'}")


def _unknown(name: str, words: str) -> ServeError:
    return ServeError(Kind.UNAVAILABLE, f"Request for unknown model: '{name}'{words}")
