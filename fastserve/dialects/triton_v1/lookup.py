"""A model's name and a version's number -> the version that answers, with the original's texts (spec 3.4)."""

from __future__ import annotations

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.serving import model_view

LATEST = -1


def find_version(catalog: Catalog, name: str, number: int) -> Version:
    """The available version; LATEST for the highest. Raises ServeError UNAVAILABLE."""
    try:
        return model_view.find_version(catalog, name, None if number == LATEST else number)
    except ServeError as fault:
        raise ServeError(Kind.UNAVAILABLE, fault.message) from None
