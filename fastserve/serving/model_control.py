"""The repository as dialects see it: what their clients may ask to be loaded. Who loads is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastserve.config import ModelEntry, Settings
from fastserve.errors import Kind, ServeError

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


@dataclass(slots=True)
class LoadOverride:
    """What a client loads in place of what is on disk. `config` is a ModelConfig as JSON text."""

    config: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)


class RepositoryFace(Protocol):
    """The part of the server's repository a dialect sees. Every call raises ServeError."""

    @property
    def explicit(self) -> bool:
        """Whether models are loaded and unloaded by clients."""
        ...

    async def names(self) -> list[str]:
        """Every model there is a folder of."""
        ...

    async def load(self, name: str, override: LoadOverride | None) -> None:
        """Returns when the model is up. NOT_FOUND when there is no such model or the override is unusable."""
        ...

    async def unload(self, name: str, dependents: bool) -> None:
        """The versions are gone from the catalog at once; NOT_FOUND when the model was never loaded."""
        ...

    async def replace_models(self, entries: Sequence[ModelEntry]) -> None:
        """Serve these in place of the ones `models` named, and return when they are up."""
        ...


def exposes(settings: Settings) -> Sequence[str]:
    """DialectSpec.exposes of dialects whose clients load models, name shared memory and set the log."""
    explicit = settings.model_control == "explicit"
    allowed = {
        "load and unload models": explicit,
        "run code of its own, as files of a load": explicit and settings.admin.file_overrides,
        "read and write this machine's shared memory": settings.allow_client_shm,
        "change what is logged": settings.admin.log_settings,
    }
    return [what for what, is_so in allowed.items() if is_so]


def must_be_explicit(face: RepositoryFace) -> None:
    """Raises ServeError, in the words of Triton's APIs, where clients do not say what is loaded."""
    if not face.explicit:
        raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)


class NoRepository:
    """Where models cannot be loaded by clients: the library, and tests."""

    explicit = False

    async def names(self) -> list[str]:
        return []

    async def load(self, name: str, override: LoadOverride | None) -> None:
        raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)

    async def unload(self, name: str, dependents: bool) -> None:
        raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)

    async def replace_models(self, entries: Sequence[ModelEntry]) -> None:
        raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)
