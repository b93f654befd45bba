"""Model control as dialects see it: the server's repository, and which models clients may load and unload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastserve.errors import Kind, ServeError, unsupported
from fastserve.net.access_control import Resource
from fastserve.repository.version import Version, VersionState
from fastserve.settings import ModelEntry, Settings
from fastserve.settings.model_options import TrafficRules

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


@dataclass(slots=True)
class LoadOverride:
    """Config and files that a client loads instead of those on disk; `config` is a ModelConfig in JSON."""

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

    async def set_rules(self, name: str, rules: TrafficRules | None) -> None:
        """Have requests without a version go to other versions, until the rules of the model's config change;
        None: by the config again. NOT_FOUND, INVALID_ARGUMENT for versions that are not available."""
        ...

    async def want(self, name: str) -> None:
        """Returns when a model that is loaded on demand is up. UNAVAILABLE with the reason when it is not."""
        ...


def exposes(settings: Settings) -> Sequence[str]:
    """DialectSpec.exposes of dialects whose clients load models, name shared memory and set the log. What
    wants a header over both transports is left out."""
    over_http, over_grpc = settings.triton.restrictions_over_http, settings.triton.restrictions_over_grpc
    kept = {name for name in over_http if name in over_grpc}
    loads = settings.model_control == "explicit" and Resource.MODEL_REPOSITORY.value not in kept
    shares = settings.allow_client_shm and Resource.SHARED_MEMORY.value not in kept
    allowed = {
        "load and unload models": loads,
        "run code of its own, as files of a load": loads and settings.admin.file_overrides,
        "read and write this machine's shared memory": shares,
        "change what is logged": settings.admin.log_settings and Resource.LOGGING.value not in kept,
    }
    return [what for what, is_so in allowed.items() if is_so]


def must_be_explicit(face: RepositoryFace) -> None:
    """Raises ServeError, in the words of Triton's APIs, where clients do not say what is loaded."""
    if not face.explicit:
        raise ServeError(Kind.UNAVAILABLE, NOT_EXPLICIT)


DORMANT = "not in memory: its first request loads it"

_STATES = {
    VersionState.START: "LOADING",
    VersionState.LOADING: "LOADING",
    VersionState.AVAILABLE: "READY",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.END: "UNAVAILABLE",
}


def triton_state(version: Version) -> tuple[str, str]:
    """Return a version's state as Triton's APIs name it, and the reason for it, "" for none.

    A version is READY exactly while model readiness says yes: with no worker that answers it is UNAVAILABLE,
    and one that is loaded on demand is READY.
    """
    if waits_for_demand(version):
        return "READY", DORMANT
    if version.state is VersionState.AVAILABLE and version.down:
        return "UNAVAILABLE", version.down
    if version.error is not None:
        return _STATES[version.state], version.error.message
    return _STATES[version.state], "unloaded" if version.state is VersionState.END else ""


def waits_for_demand(version: Version) -> bool:
    """Return whether a version is not in memory, and its next request loads it: clients that wait until a
    model is ready before they ask it take it for ready."""
    return version.dormant and version.state is VersionState.START


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

    async def set_rules(self, name: str, rules: TrafficRules | None) -> None:
        raise unsupported("this server's traffic is not changed by its clients")

    async def want(self, name: str) -> None:
        raise ServeError(Kind.UNAVAILABLE, f"model {name} is not loaded")


class PartialRepository(NoRepository):
    """The repository as clients see it who may use some models, and neither load nor unload any."""

    def __init__(self, whole: RepositoryFace, allows: Callable[[str], bool]) -> None:
        self._whole, self._allows = whole, allows

    async def names(self) -> list[str]:
        return [name for name in await self._whole.names() if self._allows(name)]

    async def want(self, name: str) -> None:
        await self._whole.want(name)
