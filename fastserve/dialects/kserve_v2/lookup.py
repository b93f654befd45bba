"""A model name and a version text -> the version that answers, with the original's texts (spec 2)."""

from __future__ import annotations

import re

from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
INT64_MAX = 2**63 - 1


def read_version(text: str) -> int | None:
    """A version as clients write it; None for the latest. Raises ServeError INVALID_ARGUMENT."""
    if not text:
        return None
    match = _NUMBER.match(text)
    number = int(match[1]) if match and len(match[1]) <= 20 else INT64_MAX + 1
    if abs(number) > INT64_MAX:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if number < 0:
        raise invalid(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number


def ready_versions(catalog: Catalog, name: str) -> list[Version]:
    """The ready versions of a model, lowest first; none for a model nobody knows."""
    model = catalog.models.get(name)
    return model.available() if model is not None else []
