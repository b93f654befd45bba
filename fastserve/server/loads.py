"""The repository as dialects see it: what clients may ask of it, in the owner and in other fronts."""

from __future__ import annotations

from fastserve.dialects.kserve_v2.repository import LoadOverride
from fastserve.errors import Kind, ServeError
from fastserve.repository.overrides import Override
from fastserve.repository.repository import Repository


class ClientLoads:
    """Loads and unloads that clients ask for, in the process that owns the models."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    @property
    def explicit(self) -> bool:
        return self._repository.settings.model_control == "explicit"

    async def names(self) -> list[str]:
        return await self._repository.names()

    async def load(self, name: str, override: LoadOverride | None) -> None:
        """Raises ServeError."""
        brought = None if override is None else Override(override.config or "{}", override.files)
        await self._repository.load(name, override=brought)

    async def unload(self, name: str, dependents: bool) -> None:
        """Raises ServeError."""
        await self._repository.unload(name)


class OthersLoads:
    """In a front process that does not own the models: it cannot change them."""

    def __init__(self, explicit: bool) -> None:
        self.explicit = explicit

    async def names(self) -> list[str]:
        return []

    async def load(self, name: str, override: LoadOverride | None) -> None:
        """Raises ServeError."""
        raise ServeError(Kind.UNAVAILABLE, "this front process does not load models; try again")

    async def unload(self, name: str, dependents: bool) -> None:
        """Raises ServeError."""
        raise ServeError(Kind.UNAVAILABLE, "this front process does not unload models; try again")
