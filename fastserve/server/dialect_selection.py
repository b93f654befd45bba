"""Selection of dialects: those of the server, of each listener, of keys of some models; and warnings."""

from __future__ import annotations

import importlib
import ipaddress
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastserve.dialects import SPECS
from fastserve.errors import ConfigError
from fastserve.net.access_control import Scope
from fastserve.net.api_keys import Compartment
from fastserve.net.traffic_split import TrafficSplit
from fastserve.repository.version import Version
from fastserve.request import Recorded
from fastserve.serving.dialect import Dialect, DialectSpec, ListenerPolicy, ServingContext
from fastserve.settings import Listener, Settings

if TYPE_CHECKING:
    from fastserve.net.grpc import Method

Spec = DialectSpec[Any]

BY_DEFAULT = (ListenerPolicy.DEFAULT, ListenerPolicy.REPLACES_ORIGINAL)

ALONE = (ListenerPolicy.REPLACES_ORIGINAL, ListenerPolicy.EXCLUSIVE)


def find_specs(settings: Settings) -> tuple[Spec, ...]:
    """Return every dialect of this server, the users' own first. Raises ConfigError."""
    specs = (*(_import_spec(path) for path in settings.dialects), *SPECS)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"dialects: there are two of the name {name!r}")
    for name in settings.dialect_options:
        if not any(spec.name == name and not spec.section for spec in specs):
            known = ", ".join(spec.name for spec in specs if not spec.section)
            raise ConfigError(f"dialect_options: given {name!r}, allowed: {known}")
    for spec in specs:
        spec.read_options(settings)
    return specs


def recorded_reader(settings: Settings) -> Callable[[Version], Iterator[Recorded]]:
    """Return a reader of the recorded requests that a version brings. Raises ConfigError."""
    specs = find_specs(settings)
    return lambda version: (one for spec in specs for one in spec.recorded(settings, version))


def _import_spec(path: str) -> Spec:
    module, _, name = path.partition(":")
    try:
        spec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as fault:
        raise ConfigError(f"dialects: {path}: {fault}") from None
    if not isinstance(spec, DialectSpec):
        raise ConfigError(f"dialects: {path}: given a {type(spec).__name__}, allowed: a DialectSpec")
    return spec


def choose_http(specs: Sequence[Spec], listener: Listener) -> list[Spec]:
    """Return the dialects of an HTTP listener, in the order of their routes. Raises ConfigError."""
    named = choose(specs, listener)
    if len(named) == 1 and named[0].listeners in ALONE:
        return named
    return [spec for spec in specs if spec in named or spec.listeners is ListenerPolicy.EVERY_HTTP]


def choose_grpc(specs: Sequence[Spec], listener: Listener) -> list[Spec]:
    """Return the dialects of a gRPC listener. Raises ConfigError."""
    return [spec for spec in choose(specs, listener) if spec.rpcs]


def choose(specs: Sequence[Spec], listener: Listener) -> list[Spec]:
    """Return the dialects that a listener names, or the default ones. Raises ConfigError."""
    if not listener.dialects:
        return [spec for spec in specs if spec.listeners in BY_DEFAULT]
    known = {spec.name: spec.listeners for spec in specs}
    for name in listener.dialects:
        policy = known.get(name)
        if policy is None or (policy is ListenerPolicy.EXCLUSIVE and len(listener.dialects) > 1):
            mixed = ", ".join(n for n, p in known.items() if p is not ListenerPolicy.EXCLUSIVE)
            alone = " or ".join(n for n, p in known.items() if p is ListenerPolicy.EXCLUSIVE)
            raise ConfigError(
                f"{listener.address}: dialects: given {name!r}, allowed: {mixed}, or {alone} alone"
            )
    return [spec for spec in specs if spec.name in listener.dialects]


WHOLE_SERVER = {Scope.METRICS, Scope.ADMIN}
"""Scopes that a key of some models cannot have."""


class DialectCompartment(Compartment):
    """The dialects of a front process once more, over some of its models, or for requests that were drawn."""

    __slots__ = ("_dialects", "context")

    def __init__(
        self, context: ServingContext, specs: Sequence[Spec], split: TrafficSplit | None = None
    ) -> None:
        super().__init__(split)
        self.context = context
        self._dialects = {
            spec.name: spec.build(context, spec.read_options(context.settings))
            for spec in specs
            if not spec.scopes or spec.scopes - WHOLE_SERVER
        }

    def on_listener(self, spoken: Sequence[Spec]) -> list[Dialect]:
        """Return the dialects of an HTTP listener that speaks these."""
        pairs = [(spec, self._dialects[spec.name]) for spec in spoken if spec.name in self._dialects]
        return [dialect.on_listener(pairs) for _, dialect in pairs]

    def methods(self, spoken: Sequence[Spec]) -> list[Method]:
        """Return the RPCs of a gRPC listener that speaks these."""
        return [
            method
            for spec in spoken
            if spec.name in self._dialects
            for method in spec.methods_of(self._dialects[spec.name])
        ]

    def hear(self, dialect: str, word: str) -> bool:
        """Pass on a dialect's message from its like in another front process; see Dialect.hear."""
        spoken = self._dialects.get(dialect)
        return spoken is not None and spoken.hear(word)


log = logging.getLogger(__name__)


def is_public(listener: Listener) -> bool:
    """Return whether other machines may reach the address; True for a host name."""
    if listener.in_file or listener.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(listener.host).is_loopback
    except ValueError:
        return True


def list_open_places(settings: Settings) -> list[str]:
    """Return the addresses that other machines may reach, and where neither a key nor a client's certificate
    is asked for. Raises ConfigError."""
    if settings.keys:
        return []
    mutual = bool(settings.tls.client_ca) and settings.tls.client_auth == "required"
    http, grpc = all_listeners(settings)
    found = [one.address for one in (*http, *grpc) if is_public(one) and not (mutual and one.tls)]
    return list(dict.fromkeys(found))


def refuse_open_places(settings: Settings) -> None:
    """Raise ConfigError for a server that would serve strangers though nobody has said so."""
    places = list_open_places(settings)
    if places and not settings.insecure_public:
        raise ConfigError(
            f"{', '.join(places)}: other machines may reach this, and nobody needs a key. Give --keys FILE "
            "(`fastserve key new NAME --file FILE` makes one), --tls-client-ca FILE, or an address of this "
            "machine alone (127.0.0.1, unix:PATH); --insecure-public serves whoever comes"
        )


def all_listeners(settings: Settings) -> tuple[tuple[Listener, ...], tuple[Listener, ...]]:
    """Return the HTTP and the gRPC listeners of the settings. Raises ConfigError.

    A dialect with a port of its own has it on the host of the first HTTP listener.
    """
    http, grpc = (*settings.listen, *settings.http), (*settings.listen, *settings.grpc)
    first = next((one for one in http if not one.in_file), None)
    host = first.address.rpartition(":")[0] if first else "127.0.0.1"
    ports = ((spec.name, spec.own_port(settings)) for spec in find_specs(settings))
    tls = first is None or first.tls
    return (*http, *(Listener(f"{host}:{port}", (name,), tls) for name, port in ports if port)), grpc


def list_exposures(settings: Settings) -> list[str]:
    """Return a sentence for each thing that any client of a public address may do."""
    if settings.keys:  # it needs a key whose scope allows it
        return []
    places: dict[str, list[str]] = {}
    for listener in (*settings.listen, *settings.http, *settings.grpc):
        if is_public(listener):
            spoken = choose(find_specs(settings), listener)
            for what in dict.fromkeys(what for spec in spoken for what in spec.exposes(settings)):
                places.setdefault(what, []).append(listener.address)
    return [
        f"whoever reaches {', '.join(found)} may {what}: there are no keys; see docs/security.md"
        for what, found in places.items()
    ]


def list_half_restricted(settings: Settings) -> list[str]:
    """Return a sentence for each API that is restricted over one transport and open over the other."""
    options = settings.triton
    http = "triton.http_restricted_api", "a header over HTTP", (*settings.listen, *settings.http)
    grpc = "triton.grpc_restricted_protocol", "metadata over gRPC", (*settings.listen, *settings.grpc)
    over_http, over_grpc = options.restrictions_over_http, options.restrictions_over_grpc
    found: list[str] = []
    for (field, wanted, _), (other, words, places), kept, missing in (
        (http, grpc, over_http, over_grpc),
        (grpc, http, over_grpc, over_http),
    ):
        open_ones = [name for name in kept if name not in missing]
        if open_ones and places:
            transport = words.rpartition(" ")[2]
            where = ", ".join(dict.fromkeys(place.address for place in places))
            names = ", ".join(open_ones)
            found.append(
                f"{field}: {names} want {wanted}, and over {transport} ({where}) nothing; set {other} too"
            )
    return found


def warn_of_exposures(settings: Settings) -> None:
    """Log each exposure."""
    places = list_open_places(settings)
    serves = [f"{', '.join(places)}: whoever comes is served, nobody needs a key; see docs/security.md"]
    found = *(serves if places else ()), *list_exposures(settings), *list_half_restricted(settings)
    for sentence in found:
        log.warning("%s", sentence)
