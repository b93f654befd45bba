"""API keys: whose request it is, and whether it may have its route. One check, for every way a request takes.

    head --identify--> ApiKey or None --check(scope)--> nothing, UNAUTHENTICATED or PERMISSION_DENIED

A key is read from a request's head alone, as `Authorization: Bearer KEY`, `x-api-key` or `api-key`; a request
with two different keys has none. Without a key the verified subject of the client's certificate counts.

What is found is kept with the head: requests with equal heads, of clients with the same certificate, have
equal rights, and no connection has rights of its own that another request on it could use. It holds for one
*epoch*: a new one begins when the file changes or a key expires, and then every head is looked at again.

    HTTP   the router puts a KeyedEndpoint before every endpoint. Once it has let a head in, requests with
           this head skip it for the rest of the epoch, at no cost each. A body that is still to come is not
           read without a key (Router.check_key).
    gRPC   CallHead.admit, before a call begins; a head of this epoch costs a comparison of two numbers

A key for some models leads its requests to endpoints and methods of another *compartment*: built a second
time, over a catalog that has no other models. So no lookup, list, cache or template of a dialect has to know
of keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from fastserve.errors import Kind, Reason, ServeError, server_starting
from fastserve.net.access_control import Opening, Refuse, Scope
from fastserve.net.key_usage import KeyUsage, use_of
from fastserve.settings.key_file import KEY, KeyEntry, KeyFileReader

if TYPE_CHECKING:
    from fastserve.net.http1.large_bodies import ArrivedBody
    from fastserve.net.request import AccessLog, Call, Endpoint, RequestHead
    from fastserve.net.traffic_split import TrafficSplit

WANTED = "a valid API key is required: Authorization: Bearer KEY, x-api-key or api-key"
LACKS_SCOPE = "this API key lacks the scope {}"
WHOLE = "this server has nothing for API keys of some models"
_ALONE = (b"x-api-key", b"api-key")
_BEARER = b"bearer"
_DUMMY = KeyEntry("nobody", ("health",), "0" * 12, "0" * 32 + ":" + "0" * 64)
"""Compared with where no entry has the id, so that unknown ids take as long as wrong secrets."""


class ApiKey(NamedTuple):
    """A client that is known by its key or certificate, and its rights."""

    name: str
    scopes: frozenset[Scope]
    expires_at: float
    usage: KeyUsage
    """Of its name: it goes on when the key changes otherwise."""
    models: tuple[str, ...] = ()
    """Patterns of the models that it may use; none: all."""


class Compartment:
    """A part of the server, for the keys of some models, or for requests that were drawn. Listeners keep
    their part of it weakly. `split` draws among its requests; None: they were drawn already."""

    __slots__ = ("__weakref__", "split")

    def __init__(self, split: TrafficSplit | None = None) -> None:
        self.split = split


MOST_COMPARTMENTS = 256
"""Choices of models that are kept ready: each takes 27 KB, besides what is kept of its requests, and 2.4 ms
to be made again."""
MakeCompartment = Callable[[tuple[str, ...]], Compartment]


MakeUsage = Callable[[KeyEntry, "KeyUsage | None"], KeyUsage]
"""Of an entry, and of its name until now."""
Audit = Callable[[str, str, "int | str"], None]
"""Writes down an administrative call: the name of its key, the call, its status."""


def uncounted(entry: KeyEntry, known: KeyUsage | None) -> KeyUsage:
    """Return the usage of a key that nobody counts, and without limits."""
    return known or KeyUsage(entry.name)


def refuse_compartments(models: tuple[str, ...]) -> Compartment:
    """Raise ServeError: this server is whole."""
    raise ServeError(Kind.PERMISSION_DENIED, WHOLE, reason=Reason.API_KEY)


_NOBODY = _DUMMY, ApiKey("nobody", frozenset(), 0.0, KeyUsage(""))


class _Ring(NamedTuple):
    """The keys of one reading of the file."""

    by_id: Mapping[bytes, tuple[KeyEntry, ApiKey]]
    by_subject: Mapping[str, ApiKey]
    by_name: Mapping[str, tuple[KeyEntry, ApiKey]]

    def all(self) -> list[ApiKey]:
        return [key for _, key in self.by_name.values()]


class EpochFollower(Protocol):
    """A keeper of results of `ApiKeyGate.check`."""

    def begin_epoch(self, epoch: int) -> None:
        """Look at every head again from now on."""


class ApiKeyGate:
    """The keys of one front process. `load` once, then `renew` whenever the file may have changed or a key
    may have expired."""

    __slots__ = (
        "_clock", "_compartments", "_followers", "_make_compartment", "_make_usage", "_next_expiry", "_path",
        "_reader", "_ring", "_skipping", "_stamp", "_strangers", "_usages", "audit", "epoch", "opens_health",
        "stale",
    )  # fmt: skip

    def __init__(
        self,
        path: Path,
        *,
        opens_health: bool = True,
        clock: Callable[[], float] = time.time,
        make_compartment: MakeCompartment = refuse_compartments,
        make_usage: MakeUsage = uncounted,
        strangers: KeyUsage | None = None,
        audit: Audit | None = None,
    ) -> None:
        """`strangers` counts requests without a valid key."""
        self._path, self._clock, self._make_compartment = path, clock, make_compartment
        self._reader = KeyFileReader(path)
        self._make_usage, self._strangers, self.audit = make_usage, strangers or KeyUsage(""), audit
        self._usages: dict[str, KeyUsage] = {}  # by the names of keys
        self._compartments: dict[tuple[str, ...], Compartment] = {}  # those of models that keys name now
        self.opens_health = opens_health
        self.epoch = 0
        """Never 0 once `load` has returned."""
        self.stale = False
        """The file has changed and cannot be used: the keys are those of before."""
        self._ring = _Ring({}, {}, {})
        self._stamp: object = None
        self._next_expiry = float("inf")
        self._followers: list[EpochFollower] = []
        self._skipping: WeakKeyDictionary[RequestHead, KeyedEndpoint] = WeakKeyDictionary()

    def load(self) -> None:
        """Read the file. Raises ConfigError."""
        self._read()

    def renew(self) -> bool:
        """Read the file if it has changed, and expire keys; return whether it has changed. Raises ConfigError
        for a file that cannot be used: the keys stay as they are."""
        if self._clock() >= self._next_expiry:
            self._begin_epoch()
        stamp = self._look()
        if stamp == self._stamp and not self.stale:
            return False
        try:
            self._read()
        except BaseException:
            self.stale = True
            raise
        return True

    @property
    def count(self) -> int:
        """The clients whose keys have not expired."""
        now = self._clock()
        return sum(key.expires_at > now for key in self._ring.all())

    def seconds_to_expiry(self) -> float:
        """Return the time until the next key expires."""
        return max(0.0, self._next_expiry - self._clock())

    def follow(self, follower: EpochFollower) -> None:
        """Tell `follower` of this epoch and all that come."""
        self._followers.append(follower)
        follower.begin_epoch(self.epoch)

    def leave(self, follower: EpochFollower) -> None:
        self._followers.remove(follower)

    def skip(self, head: RequestHead, keyed: KeyedEndpoint, endpoint: Endpoint) -> None:
        """Let requests with this head skip `keyed` until the next epoch."""
        self._skipping[head] = keyed
        head.endpoint = endpoint

    def log_ends(self, access_log: AccessLog | None) -> AccessLog:
        """Return what is called when a request has ended, before `access_log`: it tells the watchers of the
        call, and counts errors."""

        def ended(call: Call, status: int, nbytes: int) -> None:
            if call.head.slow:
                for watcher in call.unwatch():
                    watcher(status)
            if status >= 400:
                usage = call.head.usage
                if usage is not None:
                    usage.count_error(str(status))
                elif status == 401:
                    self._strangers.count_error("401")
            if access_log is not None:
                access_log(call, status, nbytes)

        return ended

    def find_usage(self, name: str) -> KeyUsage | None:
        """Return the usage of a key by its name."""
        return self._usages.get(name)

    def flush(self) -> None:
        """Move what queues have noted of keys on to their counts."""
        for usage in self._usages.values():
            usage.flush()

    def note_refusal(self, call: Call, scope: Scope | None) -> None:
        """Have a call counted, and written down if it administers, that is refused for its key."""
        head, key = call.head, self.identify(call.head)
        head.usage = None if key is None else key.usage
        if key is not None:
            key.usage.requests.add()
        if scope is Scope.ADMIN and self.audit is not None:
            head.slow = True
            watch_audited(call, self.audit, head.usage)

    def count_rpc(self, usage: KeyUsage | None, code: int) -> None:
        """Count a call that has ended with this code."""
        if usage is not None:
            usage.requests.add()
            if code:
                usage.count_error(Kind(code).name)
        elif code == Kind.UNAUTHENTICATED.value:
            self._strangers.count_error(Kind.UNAUTHENTICATED.name)

    def identify(self, head: RequestHead) -> ApiKey | None:
        """Return the client of a request; None for one without a key, with a wrong one or with two."""
        given = set(_find_keys(head))
        if not given:
            return self._in_force(self._ring.by_subject.get(head.client)) if head.client else None
        if len(given) > 1:
            return None
        key = given.pop()
        match = KEY.fullmatch(key)
        entry, found = self._ring.by_id.get(match[1], (_DUMMY, None)) if match else (_DUMMY, None)
        return self._in_force(found) if entry.fits(key) and found is not None else None

    def admit(self, head: RequestHead, scope: Scope | None) -> ApiKey | None:
        """Return the key of a request for a route or an RPC, None where none is needed; `scope` None: there
        is no such route, and any key may be told so. Raises ServeError UNAUTHENTICATED, PERMISSION_DENIED."""
        if scope is Scope.HEALTH and self.opens_health:
            return None
        key = self.identify(head)
        if key is None:
            raise ServeError(Kind.UNAUTHENTICATED, WANTED, reason=Reason.API_KEY)
        if scope is not None and scope not in key.scopes:
            raise ServeError(Kind.PERMISSION_DENIED, LACKS_SCOPE.format(scope.value), reason=Reason.API_KEY)
        return key

    def compartment_of(self, key: ApiKey | None) -> Compartment | None:
        """Return the compartment whose endpoints answer a key's requests; None for the whole server. Raises
        ServeError where there can be none."""
        if key is None or not key.models:
            return None
        found = self._compartments.pop(key.models, None) or self._make_compartment(key.models)
        self._compartments[key.models] = found  # the last one now
        if len(self._compartments) > MOST_COMPARTMENTS:
            del self._compartments[next(iter(self._compartments))]
        return found

    def _in_force(self, key: ApiKey | None) -> ApiKey | None:
        return key if key is not None and key.expires_at > self._clock() else None

    def _look(self) -> object:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

    def _read(self) -> None:
        stamp = self._look()  # before: a change within the reading is seen by the next look
        by_id: dict[bytes, tuple[KeyEntry, ApiKey]] = {}
        by_subject: dict[str, ApiKey] = {}
        by_name: dict[str, tuple[KeyEntry, ApiKey]] = {}
        for entry in self._reader.read().keys:
            known, key = self._ring.by_name.get(entry.name, _NOBODY)
            if known is not entry:
                key = self._make_key(entry)
            by_name[entry.name] = entry, key
            if entry.subject:
                by_subject[entry.subject] = key
            else:
                by_id[entry.id.encode()] = entry, key
        self.flush()  # of keys that are gone, too
        self._ring, self._stamp, self.stale = _Ring(by_id, by_subject, by_name), stamp, False
        self._usages = {name: key.usage for name, (_, key) in by_name.items()}
        named = {key.models for key in self._ring.all()}
        self._compartments = {models: one for models, one in self._compartments.items() if models in named}
        self._begin_epoch()

    def _make_key(self, entry: KeyEntry) -> ApiKey:
        usage = self._make_usage(entry, self._usages.get(entry.name))
        scopes, models = frozenset(map(Scope, entry.scopes)), tuple(sorted(entry.models))
        return ApiKey(entry.name, scopes, entry.expires_at, usage, models)

    def _begin_epoch(self) -> None:
        now = self._clock()
        self._next_expiry = min(
            (k.expires_at for k in self._ring.all() if k.expires_at > now), default=float("inf")
        )
        for head, keyed in self._skipping.items():
            head.endpoint = keyed
        self._skipping.clear()
        self.epoch += 1
        for follower in list(self._followers):
            follower.begin_epoch(self.epoch)


def _find_keys(head: RequestHead) -> list[bytes]:
    """Return the keys in a request's headers. Another scheme of Authorization is none."""
    found = []
    for name, value in head.headers:
        if name in _ALONE:
            found.append(value.strip(b" \t"))
        elif name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == _BEARER:
                found.append(token.strip(b" \t"))
    return found


Narrow = Callable[[Compartment, "RequestHead"], "Endpoint"]


class KeyTerms(NamedTuple):
    """Terms for reaching an endpoint: a key of this gate with `scope`. `refuse` answers other requests, and
    `narrow` finds the endpoints of compartments."""

    gate: ApiKeyGate
    opening: Opening
    scope: Scope | None
    refuse: Refuse
    narrow: Narrow


class KeyedEndpoint:
    """An endpoint for requests whose key allows it.

    It stands around every other guard, and around the wait for the server's start."""

    __slots__ = ("_endpoint", "_gate", "_narrow", "_narrowed", "_opening", "_refuse", "_scope")

    def __init__(self, terms: KeyTerms, endpoint: Endpoint) -> None:
        self._gate, self._opening, self._scope, self._refuse, self._narrow = terms
        self._endpoint = endpoint
        self._narrowed: WeakKeyDictionary[Compartment, Endpoint] = WeakKeyDictionary()

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        head, gate, usage = call.head, self._gate, None
        audit = gate.audit if self._scope is Scope.ADMIN else None
        try:
            key = gate.admit(head, self._scope)
            if self._scope in self._opening.closed:
                raise server_starting()
            endpoint = self._endpoint_for(head, key)
        except ServeError as fault:
            gate.note_refusal(call, self._scope)
            self._refuse(call, fault)
            return None
        if key is not None:
            usage = key.usage
            endpoint = use_of(usage, endpoint, self._refuse)
        if audit is not None:
            endpoint = AuditedEndpoint(audit, usage, endpoint)
        head.usage = usage
        # Never taken back: calls of this head may be under way that are watched.
        head.slow = head.slow or audit is not None or (usage is not None and usage.counts_running)
        gate.skip(head, self, endpoint)
        return endpoint(call)

    def _endpoint_for(self, head: RequestHead, key: ApiKey | None) -> Endpoint:
        """Return the endpoint that the key leads to. Raises ServeError."""
        compartment = self._gate.compartment_of(key)
        if compartment is None or self._scope is None:  # what is not there is not there for anybody
            return self._endpoint
        found = self._narrowed.get(compartment)
        if found is None:
            found = self._narrowed[compartment] = self._narrow(compartment, head)
        return found

    def check(self, head: RequestHead) -> ApiKey | None:
        """Return the key of a request with this head. Raises ServeError."""
        return self._gate.admit(head, self._scope)


class AuditedEndpoint:
    """An endpoint whose calls are written down when they have ended."""

    __slots__ = ("_audit", "_endpoint", "_usage")

    def __init__(self, audit: Audit, usage: KeyUsage | None, endpoint: Endpoint) -> None:
        self._audit, self._usage, self._endpoint = audit, usage, endpoint

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        watch_audited(call, self._audit, self._usage)
        return self._endpoint(call)


def watch_audited(call: Call, audit: Audit, usage: KeyUsage | None) -> None:
    """Have a call written down when it has ended."""
    call.watch(partial(audit, "" if usage is None else usage.name, f"{call.method} {call.target}"))


class TakingKeyedEndpoint(KeyedEndpoint):
    """A KeyedEndpoint of an endpoint that reads large bodies out of the socket itself."""

    __slots__ = ()

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Offer the body to the endpoint; False before the key is known, which the call itself finds out."""
        head = call.head
        try:
            key = self.check(head)
            endpoint = self._endpoint_for(head, key)
        except ServeError:
            return False
        if key is not None:
            endpoint = use_of(key.usage, endpoint, self._refuse)
            head.usage, head.slow = key.usage, head.slow or key.usage.counts_running
        if self._scope in self._opening.closed or not hasattr(endpoint, "take"):
            return False
        taken: bool = endpoint.take(call, body)
        return taken


def keyed(terms: KeyTerms, endpoint: Endpoint) -> KeyedEndpoint:
    """Return the endpoint behind the gate."""
    made = TakingKeyedEndpoint if hasattr(endpoint, "take") else KeyedEndpoint
    return made(terms, endpoint)
