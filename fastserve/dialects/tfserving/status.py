"""Model status (spec 3.6): every version ever seen, highest first, as protobuf prints JSON.

read  Target -> versions      write  versions -> bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fastserve.dialects.tfserving.errors import invalid
from fastserve.dialects.tfserving.routes import Target
from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version


def find_versions(catalog: Catalog, target: Target) -> list[Version]:
    """The versions a status call asks about. A label is ignored, as the original does. Raises ServeError."""
    if not target.name:
        raise invalid("Missing model name in request.")
    model = catalog.models.get(target.name)
    if model is None or not model.versions:
        raise ServeError(Kind.NOT_FOUND, f"Could not find any versions of model {target.name}")
    if target.version is None:
        return list(model.versions.values())
    if target.version not in model.versions:
        raise ServeError(Kind.NOT_FOUND, f"Could not find version {target.version} of model {target.name}")
    return [model.versions[target.version]]


def write_status(versions: Iterable[Version]) -> bytes:
    """The whole body of a status reply."""
    rows = [
        (version.number, version.state.name, version.error)
        for version in sorted(versions, key=lambda version: version.number, reverse=True)
    ]
    return print_json(
        {
            "model_version_status": [
                {
                    "version": str(number),
                    "state": state,
                    "status": {
                        "error_code": error.kind.name if error else "OK",
                        "error_message": error.message if error else "",
                    },
                }
                for number, state, error in rows
            ]
        }
    )


def print_json(message: dict[str, object] | Sequence[object]) -> bytes:
    """`message` laid out as protobuf's JSON printer does: one space of indent, a newline at the end."""
    text = json.dumps(message, indent=1, ensure_ascii=False)
    # The printer keeps its output safe inside HTML; these two occur inside strings only.
    text = text.replace("<", "\\u003c").replace(">", "\\u003e")
    return text.encode("utf-8", "surrogateescape") + b"\n"
