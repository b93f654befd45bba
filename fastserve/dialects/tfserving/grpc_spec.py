"""What every RPC of this dialect has in common: its ModelSpec, its errors, and how it is counted (spec 4)."""

from __future__ import annotations

from typing import Any

from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import Service, own_words
from fastserve.dialects.tfserving.signatures import find_version
from fastserve.errors import ServeError, invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.signature import DEFAULT_SIGNATURE
from fastserve.repository.version import Version

DETAIL_BYTES = 1024
TRUNCATED = "...TRUNCATED"


def target_of(request: Any) -> Target:
    """What the model_spec of a message names. Raises ServeError when there is none (spec 4.3)."""
    if not request.HasField("model_spec"):
        raise invalid("Missing ModelSpec")
    spec, chosen = request.model_spec, request.model_spec.WhichOneof("version_choice")
    number = spec.version.value if chosen == "version" else None
    return Target(spec.name, number, spec.version_label if chosen == "version_label" else None, "")


def find_model(catalog: Catalog, target: Target) -> Version:
    """The version of a call that has to name its model. Raises ServeError."""
    if not target.name:
        raise invalid("ModelSpec has no name specified.")
    return find_version(catalog, target)


def fill_spec(spec: Any, version: Version, signature_name: str | None) -> None:
    """The model_spec of a response: the version is always told, a label never (spec 4.3)."""
    spec.name = version.model
    spec.version.value = version.number
    if signature_name is not None:
        spec.signature_name = signature_name or DEFAULT_SIGNATURE


def tell(fault: ServeError) -> ServeError:
    """The status of a fault: in the original's words, and no longer than it makes them (spec 4.4)."""
    fault = own_words(fault)
    raw = fault.message.encode("utf-8", "replace")
    if len(raw) <= DETAIL_BYTES:
        return fault
    text = raw[:DETAIL_BYTES].decode("utf-8", "ignore") + TRUNCATED
    return ServeError(fault.kind, text, retry_after_s=fault.retry_after_s)


def refuse_rpc(service: Service, model: str, fault: ServeError, *, on_page: bool = True) -> ServeError:
    """The same, counted; `on_page`: on the original's metrics page too."""
    told = tell(fault)
    service.count_refused(model, fault, told, on_page=on_page)
    return told
