"""Model control in the original's words (spec 5), over whoever really loads and unloads."""

from __future__ import annotations

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import VersionState
from fastserve.serving.model_control import NOT_EXPLICIT, RepositoryFace


class Control:
    """Loads and unloads where models are loaded by clients, and says so where not."""

    def __init__(self, catalog: Catalog, repository: RepositoryFace) -> None:
        self._catalog = catalog
        self._repository = repository

    async def load(self, name: str) -> None:
        """Load or reload a model. Raises ServeError UNAVAILABLE, INTERNAL."""
        self._must_be_explicit()
        try:
            await self._repository.load(name, None)
        except ServeError as fault:
            raise self._why_not(name, fault) from None

    def _why_not(self, name: str, fault: ServeError) -> ServeError:
        model = self._catalog.models.get(name)
        if fault.kind is Kind.NOT_FOUND or model is None or not model.versions:
            reason = "failed to poll from model repository"
            if model is not None and model.error is None:
                reason = "no version is available"
            return _internal(f"failed to load '{name}', {reason}")
        down = [n for n, v in sorted(model.versions.items()) if v.state is not VersionState.AVAILABLE]
        listed = ",".join(map(str, down))
        return _internal(f"failed to load '{name}', versions that are not available: {listed}")

    async def unload(self, name: str) -> None:
        """Unload a model; one that nobody knows is unloaded already. Raises ServeError."""
        self._must_be_explicit()
        try:
            await self._repository.unload(name, False)
        except ServeError as fault:
            if fault.kind is not Kind.NOT_FOUND:
                raise _internal(f"failed to unload '{name}'") from None

    async def names(self) -> list[str]:
        """Every model folder of the repository, loaded or not."""
        return sorted(await self._repository.names())

    def _must_be_explicit(self) -> None:
        if not self._repository.explicit:
            raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)


def _internal(text: str) -> ServeError:
    return ServeError(Kind.INTERNAL, text)
