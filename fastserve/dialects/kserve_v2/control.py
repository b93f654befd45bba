"""The model repository extension (spec 7) in the original's words. The server's repository does the work."""

from __future__ import annotations

from typing import Any

from fastserve.dialects.kserve_v2.errors import internal, invalid, unsupported
from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version, VersionState
from fastserve.serving.model_control import NOT_EXPLICIT, LoadOverride, RepositoryFace

_STATES = {
    VersionState.START: "LOADING",
    VersionState.LOADING: "LOADING",
    VersionState.AVAILABLE: "READY",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.END: "UNAVAILABLE",
}


async def list_models(face: RepositoryFace, catalog: Catalog, only_ready: bool) -> list[dict[str, Any]]:
    """The index: every model and version, in the order of their names."""
    names = sorted({*catalog.models, *(await face.names())})
    entries = [entry for name in names for entry in _list_model(catalog, name)]
    return [entry for entry in entries if not only_ready or entry.get("state") == "READY"]


def _list_model(catalog: Catalog, name: str) -> list[dict[str, Any]]:
    model = catalog.models.get(name)
    if model is not None and model.versions:
        return [_list_version(model.versions[number]) for number in sorted(model.versions)]
    if model is not None and model.error is not None:
        return [{"name": name, "version": "1", "state": "UNAVAILABLE", "reason": model.error.message}]
    return [{"name": name}]


def _list_version(version: Version) -> dict[str, Any]:
    entry = {"name": version.model, "version": str(version.number), "state": _STATES[version.state]}
    if version.error is not None:
        entry["reason"] = version.error.message
    elif version.state is VersionState.END:
        entry["reason"] = "unloaded"
    return entry


async def load_model(
    face: RepositoryFace, catalog: Catalog, name: str, override: LoadOverride | None
) -> None:
    """Load one model and wait for it. Raises ServeError in the original's words."""
    _must_be_explicit(face)
    check_name(name)
    failed = internal(f"failed to load '{name}', failed to poll from model repository")
    if override is not None and override.files and override.config is None:
        raise failed
    try:
        await face.load(name, override)
    except ServeError as fault:
        if fault.kind is Kind.NOT_FOUND:
            raise failed from None
        raise invalid(f"load failed for model '{name}': {_reasons(catalog, name, fault)}") from None


async def unload_model(face: RepositoryFace, name: str, dependents: bool) -> None:
    """Unload one model; one that is not loaded is no fault. Raises ServeError."""
    _must_be_explicit(face)
    try:
        await face.unload(name, dependents)
    except ServeError as fault:
        if fault.kind is not Kind.NOT_FOUND:
            raise


def check_repository(name: str) -> None:
    """Raises ServeError for a repository named in the path: there is one, and it has no name."""
    if name:
        raise unsupported("'repository_name' specification is not supported")


def check_name(name: str) -> None:
    """Raises ServeError for what cannot be a model's folder."""
    if not name:
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise invalid(f"invalid model name '{name}', model name must not contain path traversal characters")


def _must_be_explicit(face: RepositoryFace) -> None:
    if not face.explicit:
        raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)


def _reasons(catalog: Catalog, name: str, fault: ServeError) -> str:
    model = catalog.models.get(name)
    failed = sorted(v.number for v in model.versions.values() if v.error is not None) if model else []
    if model is None or not failed:
        return fault.message
    return "".join(f"version {n} is at UNAVAILABLE state: {_message(model.versions[n])};\n" for n in failed)


def _message(version: Version) -> str:
    return version.error.message if version.error is not None else ""
