"""What a dialect says of itself, and what a front process gives the dialects it builds.

    SPEC = DialectSpec(name="echo", options=NoOptions, build=Echo, routes=ROUTES)      echo/spec.py
    SPECS = (..., ECHO)                                                                dialects/__init__.py

The server knows specs, and nothing else of any dialect. The scope of every route and RPC stands in a spec's
tables and nowhere else: the dialect reads it there, and the wire does what it asks for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from fastserve.codec.text import Heard, Info, Run, TextNote
from fastserve.config import Settings
from fastserve.config.fields import convert
from fastserve.errors import Kind, ServeError
from fastserve.metrics import Heartbeat, Readiness, Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse, Recorded
from fastserve.serving.model_control import NoRepository, RepositoryFace
from fastserve.serving.shared_memory import Regions
from fastserve.wire.dialect import Route, refuse_plainly
from fastserve.wire.scope import Scope

if TYPE_CHECKING:
    from fastserve.wire import Call
    from fastserve.wire.grpc import Method

Options = TypeVar("Options")
# Called on the loop for what writes the page beside it.
Page = Callable[[], Callable[[], bytes]]


Stop = Callable[[bool], Awaitable[None]]
Spread = Callable[[str, str], Awaitable[bool]]


async def refuse_to_stop(force: bool) -> None:
    """Raises ServeError."""
    raise ServeError(Kind.UNIMPLEMENTED, "this server is not stopped by its clients")


async def nobody_else(dialect: str, word: str) -> bool:
    """There is one front process."""
    return False


class EngineFace(Protocol):
    """The part of the engine a dialect sees."""

    @property
    def catalog(self) -> Catalog: ...

    async def infer(self, version: Version, request: InferRequest) -> InferResponse: ...

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]: ...

    def text_info(self, version: Version) -> Info | None: ...

    def generate(self, version: Version, ids: Sequence[int], note: TextNote, heard: Heard) -> Run: ...


@dataclass(kw_only=True)
class ServingContext:
    """What one front process has for all its dialects. They keep what they need of it and change nothing."""

    engine: EngineFace
    registry: Registry
    settings: Settings = Settings()  # noqa: RUF009 -- frozen
    repository: RepositoryFace = field(default_factory=NoRepository)
    regions: Regions = field(default_factory=lambda: Regions(False))
    readiness: Readiness = field(default_factory=Readiness)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    model_metrics: Page = lambda: bytes
    """What is measured of models: Triton's nv_* metrics, and those of the models' own."""
    stop: Stop = refuse_to_stop
    """End the server: what is under way is finished, or with True cut off. Returns at once. Raises ServeError
    when it is ending already, and where nobody may."""
    spread: Spread = nobody_else
    """Say a word to the dialect of this name in every other front process (`Dialect.hear`): whether it was
    meant for one of them."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a dialect that has nothing to set."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One row of a dialect's table. In `path` capitals stand for a client's words, brackets are round what
    may be left out; the dialect matches as it likes. `scopes` are by verb."""

    name: str
    path: str
    scopes: Mapping[str, Scope]


class Dialect:
    """A dialect as built for one front process, shared by its listeners. With `answer_unknown` and
    `route_unknown` (wire.dialect.KnowsTheUnknown) it has words for what is nobody's."""

    def route(self, method: str, target: str) -> Route | None:
        """The route of an HTTP target, None when it is not this dialect's. Depends on its arguments only."""
        return None

    def refuse(self, call: Call, fault: ServeError) -> None:
        """Answer a call that its scope holds back."""
        refuse_plainly(call, fault)

    def grpc_methods(self) -> list[Method]:
        """The RPCs that the spec lists. Called where a gRPC listener speaks this dialect."""
        return []

    def hear(self, word: str) -> bool:
        """What this dialect says in another front (ServingContext.spread): whether it is meant here."""
        return False

    def open(self) -> None:
        """The listeners are open, on the running loop; models may still be loading."""

    def close(self) -> None:
        """The listeners are closed. Called without `open` when one of them could not be opened."""


@dataclass(frozen=True, kw_only=True)
class DialectSpec(Generic[Options]):
    """All that the server knows of a dialect."""

    name: str
    """In the configuration of listeners, and in metrics."""
    options: type[Options]
    """What can be set of it; NoOptions for nothing."""
    build: Callable[[ServingContext, Options], Dialect]
    """Called once per front process, if a listener speaks it."""
    section: str = ""
    """The field of the settings that holds the options; "": they are in `dialect_options`, under its name."""
    routes: tuple[HttpRoute, ...] = ()
    rpcs: Mapping[str, Scope] = field(default_factory=dict)
    """By path, "/package.Service/Name". Reflection and grpc.health.v1 know the services from here."""
    descriptors: Callable[[], list[bytes]] = list
    """What reflection shows of the RPCs: serialized FileDescriptorSets."""
    unasked: bool = True
    """Spoken by listeners that name no dialect."""
    beside_others: bool = False
    """Spoken by every HTTP listener besides, but where one that stands in is alone."""
    stands_in: bool = False
    """Alone on a listener it is what its original is there: nothing is spoken beside it."""
    never_mixed: bool = False
    """Answers every path, so it has its listeners for itself."""
    own_port: Callable[[Settings], int] = lambda settings: 0
    """A port beside that of the first HTTP listener, on which this is spoken alone; 0 for none."""
    health_names: tuple[str, ...] = ()
    """What grpc.health.v1 calls its services besides their own names."""
    exposes: Callable[[Settings], Sequence[str]] = lambda settings: ()
    """What these settings let whoever reaches it do beside asking models, such as "load and unload models".
    Said loudly at the start where anybody may."""
    recorded: Callable[[Settings, Version], Iterable[Recorded]] = lambda settings, version: ()
    """Requests in its form that a version brings, to be run before it is available; whether a listener speaks
    it or not. Taken one by one, in a thread; raises ServeError, ConfigError, there or on the way."""
    any_health_name: bool = False
    """Alone on a gRPC listener, grpc.health.v1 answers for the server under whatever name it is asked."""

    @property
    def services(self) -> tuple[str, ...]:
        """The names of its gRPC services."""
        return tuple(dict.fromkeys(path.split("/")[1] for path in self.rpcs))

    @property
    def scopes(self) -> set[Scope]:
        """What its calls let clients do."""
        return {*self.rpcs.values(), *(scope for route in self.routes for scope in route.scopes.values())}

    def read_options(self, settings: Settings) -> Options:
        """Its options as the settings have them. Raises ConfigError."""
        if self.section:
            options: Options = getattr(settings, self.section)
            return options
        given = settings.dialect_options.get(self.name, {})
        return convert(given, self.options, f"dialect_options.{self.name}")

    def methods_of(self, dialect: Dialect) -> list[Method]:
        """The RPCs of what `build` gave. Raises RuntimeError when they are not those of the table."""
        methods = dialect.grpc_methods()
        if {method.path: method.scope for method in methods} != dict(self.rpcs):
            raise RuntimeError(f"{self.name}: the RPCs, or their scopes, are not those of its spec")
        return methods
