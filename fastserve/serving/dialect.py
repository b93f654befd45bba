"""The protocol face: what a dialect declares to the server, what a front process gives it, and plain replies.

    SPEC = DialectSpec(name="echo", options=NoOptions, build=Echo, routes=ROUTES)      echo/spec.py
    SPECS = (..., ECHO)                                                                dialects/__init__.py

The server knows specs, and nothing else of any dialect. The scope of every route and RPC stands in a spec's
tables and nowhere else: the dialect reads it there, and `net` enforces it. DialectService is what the
endpoints of one dialect share in a front process; `show_answer` answers requests besides inference.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from fastserve import __version__
from fastserve.engine import Engine
from fastserve.errors import ServeError, unsupported
from fastserve.metrics import Heartbeat, Readiness, Registry
from fastserve.metrics.names import Traffic
from fastserve.net import Call
from fastserve.net.access_control import Resources, Scope
from fastserve.net.router import Route, Yields, refuse_plainly
from fastserve.repository.catalog import Catalog, PartialCatalog, TrafficCatalog, VersionListeners
from fastserve.repository.version import Version
from fastserve.request import Recorded
from fastserve.serving.api_operations import ApiOperation, ModelFacts, nothing_of_model, nothing_of_server
from fastserve.serving.client_shared_memory import Regions
from fastserve.serving.model_control import NoRepository, PartialRepository, RepositoryFace
from fastserve.serving.model_view import ModelViews
from fastserve.serving.replication import ReplicatedState
from fastserve.settings import Settings
from fastserve.settings.fields import convert
from fastserve.util.offload import Offload

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


Options = TypeVar("Options")
Shared = TypeVar("Shared")
PART = " of "
"""Between a dialect's name and the models that it sees, where those are not all."""

# Called on the loop for what writes the page beside it.
Page = Callable[[], Awaitable[Callable[[], bytes]]]
Stop = Callable[[bool], Awaitable[None]]
Spread = Callable[[str, str], Awaitable[bool]]


def models_text(patterns: Sequence[str]) -> str:
    """Return the name of a choice of models, the same in every front process."""
    return json.dumps(sorted(patterns))


async def refuse_to_stop(force: bool) -> None:
    """Raises ServeError."""
    raise unsupported("this server is not stopped by its clients")


async def nobody_else(dialect: str, word: str) -> bool:
    """There is one front process."""
    return False


async def nothing_to_show() -> Callable[[], bytes]:
    return bytes


@dataclass(kw_only=True)
class ServingContext:
    """Services of one front process for its dialects, which change nothing of them."""

    engine: Engine
    registry: Registry
    part: PartialCatalog | None = None
    """The models that clients of these dialects may use, where those are not all."""
    settings: Settings = Settings()  # noqa: RUF009 -- frozen
    repository: RepositoryFace = field(default_factory=NoRepository)
    regions: Regions = field(default_factory=lambda: Regions(False))
    readiness: Readiness = field(default_factory=Readiness)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    model_metrics: Page = nothing_to_show
    """Metrics of models: Triton's nv_* metrics, and those of the models' own."""
    stop: Stop = refuse_to_stop
    """End the server: what is under way is finished, or with True cut off. Returns at once. Raises ServeError
    when it is ending already, and where nobody may."""
    spread: Spread = nobody_else
    """Say a word to the dialect of this name in every other front process (`Dialect.hear`): whether it was
    meant for one of them."""
    state: ReplicatedState = field(default_factory=ReplicatedState)
    """State that clients change and all front processes have alike."""
    started_ns: int = field(default_factory=monotonic_ns)
    """When the server started."""
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def catalog(self) -> Catalog:
        """The models that clients of these dialects may use."""
        return self.engine.catalog if self.part is None else self.part

    def share(self, name: str, make: Callable[[], Shared]) -> Shared:
        """Return what all dialects of a front process have one of, also where several are built of a kind for
        clients that see other models (`narrow`)."""
        if name not in self.shared:
            self.shared[name] = make()
        found: Shared = self.shared[name]
        return found

    def narrow(self, patterns: Sequence[str]) -> ServingContext:
        """Return the context of dialects for clients who may use the models of these names (fnmatch) alone,
        and change nothing. They have no shared memory: its regions are everybody's."""
        catalog = PartialCatalog(self.engine.catalog, patterns)
        models = models_text(patterns)

        def spread(dialect: str, word: str) -> Awaitable[bool]:
            return self.spread(f"{dialect}{PART}{models}", word)

        return replace(
            self,
            part=catalog,
            repository=PartialRepository(self.repository, catalog.allows),
            regions=Regions(False),
            stop=refuse_to_stop,
            spread=spread,
            state=ReplicatedState(),
        )

    def draw(self, arms: Mapping[str, str], spread: Spread) -> ServingContext:
        """Return the context of dialects for requests that were drawn: those that name no version of a model
        get the version of its key in `arms`."""
        patterns = ["*"] if self.part is None else self.part.patterns
        part = TrafficCatalog(self.engine.catalog, patterns, arms)
        return replace(self, part=part, spread=spread, state=ReplicatedState())


class ListenerPolicy(Enum):
    """The listeners that speak a dialect, and the dialects beside it there."""

    DEFAULT = "default"
    """Listeners that name it, and those that name no dialect."""
    REPLACES_ORIGINAL = "replaces original"
    """As DEFAULT. A listener that names it alone speaks nothing else: it stands where its original stood."""
    OPT_IN = "opt-in"
    """Listeners that name it."""
    EXCLUSIVE = "exclusive"
    """Listeners that name it alone, since it answers every path. Nothing else is spoken there."""
    EVERY_HTTP = "every HTTP"
    """Every HTTP listener, except where a dialect replaces its original or is exclusive."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a dialect that has nothing to set."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One row of a dialect's table. In `path` capitals stand for a client's words, brackets are round what
    may be left out; the dialect matches as it likes. `scopes` are by verb. `resources` are what it reaches,
    where that is not what its scope says (`access_control.resources_of`)."""

    name: str
    path: str
    scopes: Mapping[str, Scope]
    resources: Resources | None = None

    def __post_init__(self) -> None:
        if not self.scopes:
            raise TypeError(f"{self.path}: a route needs a Scope for each of its verbs, given none")
        for verb, scope in self.scopes.items():
            if not isinstance(scope, Scope):
                raise TypeError(f"{verb} {self.path}: a route needs a Scope, given {scope!r}")


class Dialect:
    """A dialect as built for one front process, shared by its listeners. With `answer_unknown` and
    `route_unknown` (net.router.KnowsTheUnknown) it has words for what is nobody's."""

    def route(self, method: str, target: str) -> Route | None:
        """The route of an HTTP target, None when it is not this dialect's. Depends on its arguments only."""
        return None

    def refuse(self, call: Call, fault: ServeError) -> None:
        """Answer a call that its scope holds back."""
        refuse_plainly(call, fault)

    def grpc_methods(self) -> list[Method]:
        """The RPCs that the spec lists. Called where a gRPC listener speaks this dialect."""
        return []

    def on_listener(self, spoken: Sequence[tuple[DialectSpec[Any], Dialect]]) -> Dialect:
        """Return the dialect for one HTTP listener, where it depends on what else that speaks."""
        return self

    def hear(self, word: str) -> bool:
        """Receive this dialect's word from another front (ServingContext.spread); True if it applies."""
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
    """The type of its settings; NoOptions for none."""
    build: Callable[[ServingContext, Options], Dialect]
    """Called once per front process, if a listener speaks it."""
    section: str = ""
    """The field of the settings that holds the options; "": they are in `dialect_options`, under its name."""
    routes: tuple[HttpRoute, ...] = ()
    rpcs: Mapping[str, Scope] = field(default_factory=dict)
    """By path, "/package.Service/Name". Reflection and grpc.health.v1 know the services from here."""
    rpc_resources: Mapping[str, Resources] = field(default_factory=dict)
    """Resources that RPCs reach, by path, where their scope does not say (`access_control.resources_of`)."""
    descriptors: Callable[[], list[bytes]] = list
    """The description of the RPCs for reflection: serialized FileDescriptorSets."""
    listeners: ListenerPolicy = ListenerPolicy.DEFAULT
    """The listeners that speak it."""
    own_port: Callable[[Settings], int] = lambda settings: 0
    """A port beside that of the first HTTP listener, on which this is spoken alone; 0 for none."""
    health_names: tuple[str, ...] = ()
    """Further names of its services in grpc.health.v1."""
    exposes: Callable[[Settings], Sequence[str]] = lambda settings: ()
    """Actions beside requests to models that these settings allow to any client, such as "load models".
    The start-up banner warns of them where the listener is open to anybody."""
    recorded: Callable[[Settings, Version], Iterable[Recorded]] = lambda settings, version: ()
    """Requests in its form that a version brings, to be run before it is available; whether a listener speaks
    it or not. Taken one by one, in a thread; raises ServeError, ConfigError, there or on the way."""
    describe_server: Callable[[Settings, Sequence[ModelFacts]], Iterable[ApiOperation]] = nothing_of_server
    """Operations for /openapi.json that are of no single model, of the models that are served now."""
    describe_model: Callable[[ModelFacts], Iterable[ApiOperation]] = nothing_of_model
    """Operations of one model; see `serving/api_operations.py`."""
    any_health_name: bool = False
    """Alone on a gRPC listener, grpc.health.v1 answers for the server under whatever name it is asked."""

    def __post_init__(self) -> None:
        for path, scope in self.rpcs.items():
            if not isinstance(scope, Scope):
                raise TypeError(f"{path}: an RPC needs a Scope, given {scope!r}")

    @property
    def services(self) -> tuple[str, ...]:
        """The names of its gRPC services."""
        return tuple(dict.fromkeys(path.split("/")[1] for path in self.rpcs))

    @property
    def scopes(self) -> set[Scope]:
        """The scopes of its routes and RPCs."""
        return {*self.rpcs.values(), *(scope for route in self.routes for scope in route.scopes.values())}

    def read_options(self, settings: Settings) -> Options:
        """Its options as the settings have them. Raises ConfigError."""
        if self.section:
            options: Options = getattr(settings, self.section)
            return options
        given = settings.dialect_options.get(self.name, {})
        return convert(given, self.options, f"dialect_options.{self.name}")

    def methods_of(self, dialect: Dialect) -> list[Method]:
        """The RPCs of what `build` gave, each with what it reaches. Raises RuntimeError when they are not
        those of the table."""
        methods = dialect.grpc_methods()
        if {method.path: method.scope for method in methods} != dict(self.rpcs):
            raise RuntimeError(f"{self.name}: the RPCs, or their scopes, are not those of its spec")
        return [replace(method, resources=self.rpc_resources.get(method.path)) for method in methods]


class DialectService:
    """One per dialect and front process."""

    timeout_ns = 0
    """How long a request may take where its client does not say; 0 for ever."""

    def __init__(self, context: ServingContext, dialect: str) -> None:
        engine = context.engine
        self.context, self.engine, self.catalog = context, engine, context.catalog
        self.repository, self.regions, self.readiness = context.repository, context.regions, context.readiness
        self.limits, self.admin = context.settings.limits, context.settings.admin
        self.offload = Offload()
        self.keepers, self.views = VersionListeners(self.catalog), ModelViews(engine.catalog)
        self.traffic = Traffic(context.registry, dialect, self.catalog.models)
        self.traffic.accounted = bool(context.settings.keys)

    def deadline_ns(self, received_ns: int, theirs_ns: int) -> int:
        """When the time of a request that came then is up: by `timeout_ns` or by its own deadline, whichever
        is sooner; 0 for never."""
        if not self.timeout_ns:
            return theirs_ns
        own_ns = received_ns + self.timeout_ns
        return min(own_ns, theirs_ns) if theirs_ns else own_ns

    def count_fault(
        self, model: str, fault: ServeError, exchange: object = None, version: object = ""
    ) -> None:
        """Count a request that is answered with `fault`; `version` where it had reached one."""
        self.traffic.refused(model, fault.kind.name, version, message=fault.message, exchange=exchange)


ALIVE = HttpRoute("root", "/", dict.fromkeys(("GET", "HEAD"), Scope.HEALTH))
"""KServe's liveness of the server: that it answers at all, ready or not."""

ALIVE_LINE = f"fastserve {__version__} is alive: /console, /metrics and /healthz/ready tell more.\n".encode()
Show = Callable[[Call, Any], None]
Refuse = Callable[[Call, ServeError], None]


def show_answer(
    call: Call, ask: Callable[[], Any], show: Show, refuse: Refuse
) -> Coroutine[Any, Any, None] | None:
    """Answer with what `ask` gives, or what that gives when it is waited for; `refuse` tells a ServeError."""
    try:
        shown = ask()
        if isinstance(shown, Awaitable):
            return _show_later(call, shown, show, refuse)
        show(call, shown)
    except ServeError as fault:
        refuse(call, fault)
    return None


async def _show_later(call: Call, asked: Awaitable[Any], show: Show, refuse: Refuse) -> None:
    call.on_gone = None
    try:
        show(call, await asked)
    except ServeError as fault:
        refuse(call, fault)


def is_root(method: str, target: str) -> bool:
    """Whether it asks for / as one may."""
    return target.partition("?")[0] == ALIVE.path and method in ALIVE.scopes


def alive_route() -> Route:
    """Return the route of KServe's /, for the dialects that its client uses."""
    return Route(show_alive, Scope.HEALTH, Yields.FIRST)


def show_alive(call: Call) -> None:
    """In the body that KServe's client reads; to browsers a line that a person can."""
    if b"text/html" in call.header(b"accept"):
        call.reply(200, ALIVE_LINE, b"text/plain")
    else:
        call.reply(200, b'{"status":"alive"}')
