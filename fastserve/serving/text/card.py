"""A text model as OpenAI's API names one. Who else answers GET /v1/models/NAME adds these keys to what it
says of a text model, so that the clients of both can read one reply.
"""

from __future__ import annotations

from typing import Any

from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.serving.dialect import EngineFace

OWNER = "fastserve"


def created_of(version: Version) -> int:
    """When its folder was last written, in seconds of the epoch: the same in every process."""
    try:
        return int(version.folder.stat().st_mtime)
    except OSError:
        return 0


def model_card(version: Version) -> dict[str, Any]:
    """The four keys that clients want."""
    return {"id": version.model, "object": "model", "created": created_of(version), "owned_by": OWNER}


def card_of(engine: EngineFace, catalog: Catalog, name: str) -> dict[str, Any]:
    """The same of the newest version of that name; nothing where that is no text model."""
    version = catalog.available(name)
    return {} if version is None or engine.text_info(version) is None else model_card(version)
