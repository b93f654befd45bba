"""Access to routes and RPCs by scope and resource: cross-site requests, restricted APIs, and the start of a
server.

Every route of every dialect has one scope. Calls in ADMIN change the server for everybody, and no page of
another web site may make them. Browsers name the origin of a POST (`Origin`, `Sec-Fetch-Site`), and send JSON
to another site only after a preflight, which is never answered here; other clients send no origin, and need
none.

    Origin: http://evil.example        refused, and so is `null`
    Origin: http://10.0.0.7:8000       taken if that is the Host of the call, and its body is JSON
    Origin: http://models.corp:8000    refused: by DNS rebinding any name leads here; see `admin.origins`
    (none)                             taken

The resources of a route are what it shows or changes, in any dialect. A restriction puts a resource behind a
header with a secret value, for all dialects of a server:

    Restrictions.over_http({"model-repository": ("admin-key", "secret")})      admin-key: secret
    Restrictions.over_grpc(...)                           triton-grpc-protocol-admin-key: secret

A restricted endpoint has no `take` and a restricted RPC no `start`, so that nothing is read before the check.

A server listens before its models are loaded, so that an address in use is reported before minutes of
loading. At first only calls about health and metrics are answered. Once the models are listed, calls about
models are answered too, each model as soon as it is loaded; calls that change models wait until all are.
Others get UNAVAILABLE in their dialect's form.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserve.errors import Kind, ServeError, server_starting

if TYPE_CHECKING:
    from fastserve.net.request import Call, Endpoint


Refuse = Callable[["Call", ServeError], None]
FROM_A_PAGE = "this call is refused to web pages of another site (admin.origins)"
NOT_JSON = "this call is refused to web pages unless its Content-Type is application/json"


class Scope(Enum):
    """Name the kind of access that a route gives."""

    HEALTH = "health"
    METADATA = "metadata"
    METRICS = "metrics"
    INFER = "infer"
    ADMIN = "admin"


class Resource(Enum):
    """Name what a route reaches; the values are Triton's categories of restricted APIs."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


Resources = tuple[Resource, ...]
NOTHING: Resources = ()
"""The resources of a route that shows and changes nothing, such as an answer to a wrong verb."""
_USUAL: dict[Scope | None, Resources] = {
    Scope.HEALTH: (Resource.HEALTH,),
    Scope.METADATA: (Resource.METADATA,),
    Scope.METRICS: (Resource.STATISTICS,),
    Scope.INFER: (Resource.INFERENCE,),
    Scope.ADMIN: (Resource.SHARED_MEMORY, Resource.MODEL_REPOSITORY, Resource.TRACE, Resource.LOGGING),
}


def resources_of(scope: Scope | None, declared: Resources | None) -> Resources:
    """Return the resources of a route; one that declares none has the usual ones of its scope."""
    return _USUAL.get(scope, tuple(Resource)) if declared is None else declared


class AdminEndpoint:
    """An endpoint in the scope ADMIN."""

    __slots__ = ("_endpoint", "_origins", "_refuse")

    def __init__(self, endpoint: Endpoint, origins: Sequence[str], refuse: Refuse) -> None:
        self._endpoint = endpoint
        self._origins = origins
        self._refuse = refuse

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        fault = find_fault(call.header, self._origins)
        if fault:
            self._refuse(call, ServeError(Kind.PERMISSION_DENIED, fault))
            return None
        return self._endpoint(call)


def guard(endpoint: Endpoint, scope: Scope, origins: Sequence[str], refuse: Refuse) -> Endpoint:
    """Return the endpoint, held back from web pages in the scope ADMIN; `refuse` answers in a dialect's
    form."""
    return AdminEndpoint(endpoint, origins, refuse) if scope is Scope.ADMIN else endpoint


def find_fault(header: Callable[[bytes], bytes], origins: Sequence[str]) -> str:
    """Return why a call is refused, "" when it is not. `header` returns one by its lower-case name, b""
    for none."""
    origin = header(b"origin").decode("latin-1").strip().lower()
    if origin in origins and origin:
        return "" if _is_json(header(b"content-type")) else NOT_JSON
    if header(b"sec-fetch-site").strip().lower() not in (b"", b"none", b"same-origin"):
        return FROM_A_PAGE
    if not origin:
        return ""
    host = _authority(header(b"host").decode("latin-1").strip().lower())
    if _authority(origin.partition("://")[2]) != host or not _is_literal(host):
        return FROM_A_PAGE
    return "" if _is_json(header(b"content-type")) else NOT_JSON


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _authority(text: str) -> str:
    """Return HOST:PORT without a default port."""
    return text.removesuffix(":80").removesuffix(":443")


def _is_literal(authority: str) -> bool:
    """Return whether the host is an address or localhost, which no name server can redirect."""
    host = authority.partition("]")[0].lstrip("[") if "[" in authority else authority.partition(":")[0]
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


GRPC_PREFIX = "triton-grpc-protocol-"


class Secret(NamedTuple):
    """Hold a header, its value, and the error of a call without it."""

    header: str
    value: bytes
    kind: Kind
    message: str

    def fault(self) -> ServeError:
        """Return a new error: one that is raised again keeps its first traceback."""
        return ServeError(self.kind, self.message)


class Restrictions:
    """Hold the secrets of one transport by resource."""

    __slots__ = ("_secrets",)

    def __init__(self, secrets: Mapping[Resource, Secret]) -> None:
        self._secrets = secrets

    @classmethod
    def over_http(cls, given: Mapping[str, tuple[str, str]]) -> Restrictions:
        """Make restrictions from category -> (header, value)."""
        text = "This API is restricted, expecting header '%s'"
        return cls(
            {
                Resource(name): Secret(header.lower(), value.encode(), Kind.PERMISSION_DENIED, text % header)
                for name, (header, value) in given.items()
            }
        )

    @classmethod
    def over_grpc(cls, given: Mapping[str, tuple[str, str]]) -> Restrictions:
        """Make restrictions of metadata from category -> (header, value); keys get GRPC_PREFIX."""
        text = f"This protocol is restricted, expecting header '{GRPC_PREFIX}%s'"
        return cls(
            {
                Resource(name): Secret(
                    GRPC_PREFIX + header.lower(), value.encode(), Kind.UNAVAILABLE, text % header
                )
                for name, (header, value) in given.items()
            }
        )

    def wanted(self, resources: Resources) -> tuple[Secret, ...]:
        """Return the secrets that a call of these resources has to send."""
        found = (self._secrets.get(resource) for resource in resources)
        return tuple(dict.fromkeys(secret for secret in found if secret is not None))

    def wanted_of(self, scope: Scope | None, resources: Resources | None) -> tuple[Secret, ...]:
        """Return the secrets that a call of a route or an RPC has to send."""
        return self.wanted(resources_of(scope, resources)) if self._secrets else ()

    def guard_endpoint(
        self, endpoint: Endpoint, scope: Scope, resources: Resources | None, refuse: Refuse
    ) -> Endpoint:
        """Return the endpoint for calls that send the secrets of its route; `refuse` answers the others."""
        wanted = self.wanted_of(scope, resources)
        return RestrictedEndpoint(endpoint, wanted, refuse) if wanted else endpoint


NO_RESTRICTIONS = Restrictions({})


class RestrictedEndpoint:
    """An endpoint behind secrets."""

    __slots__ = ("_endpoint", "_refuse", "_wanted")

    def __init__(self, endpoint: Endpoint, wanted: Sequence[Secret], refuse: Refuse) -> None:
        self._endpoint = endpoint
        self._refuse = refuse
        self._wanted = [(secret.header.encode(), secret) for secret in wanted]

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        for header, secret in self._wanted:
            if not compare_digest(call.header(header), secret.value):
                self._refuse(call, secret.fault())
                return None
        return self._endpoint(call)


AT_ONCE = (Scope.HEALTH, Scope.METRICS)


class Opening:
    """Tell which scopes the server answers while it starts. All listeners of a process share one."""

    __slots__ = ("closed", "done")

    def __init__(self, *, done: bool = True) -> None:
        self.done = done
        self.closed = frozenset[Scope | None]() if done else frozenset({None, *Scope}).difference(AT_ONCE)

    def list_models(self) -> None:
        """Answer calls about models from now on: the server knows which ones it will have."""
        self.closed &= {Scope.ADMIN}

    def finish(self) -> None:
        """Answer every call from now on."""
        self.done, self.closed = True, frozenset()

    def check(self, scope: Scope | None) -> None:
        """Raise ServeError UNAVAILABLE for calls that cannot be answered yet."""
        if scope in self.closed:
            raise server_starting()

    def hold(self, endpoint: Endpoint, scope: Scope | None, refuse: Refuse) -> Endpoint:
        """Return the endpoint; until its scope is open, `refuse` answers its calls."""
        return HeldEndpoint(self, endpoint, scope, refuse) if scope in self.closed else endpoint


class HeldEndpoint:
    """Decide for each call whether its scope is open. Calls with equal heads share the endpoint that was
    looked up before, so the router cannot decide once."""

    __slots__ = ("_endpoint", "_opening", "_refuse", "_scope")

    def __init__(self, opening: Opening, endpoint: Endpoint, scope: Scope | None, refuse: Refuse) -> None:
        self._opening = opening
        self._endpoint = endpoint
        self._scope = scope
        self._refuse = refuse

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if self._scope in self._opening.closed:
            self._refuse(call, server_starting())
            return None
        call.head.endpoint = self._endpoint  # from now on without the detour
        return self._endpoint(call)
