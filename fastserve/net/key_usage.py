"""The use of API keys: requests are counted, and held to the limits of their key.

    usage = KeyUsage("search", counts)                  of one key, in one front process
    usage.hold(KeyLimits(requests=50, concurrency=4), find_share)
    share = usage.take()                                RateLimitError for a request over a limit
    share.running.add(-1)                               when it has ended, if `counts_running`
    usage.charge_rows(8); usage.charge_tokens(20)       once they are known

A limit is one for all front processes. Each has numbers of its own in shared memory, which it alone writes,
and reads those of the others:

    under way    the sum of all fronts' `running`; a front that dies is taken out of it (server/key_shares.py)
    rate         a bucket of a second's worth, in seconds: now - forfeited - the sum of all fronts' `used`.
                 What flows into a full bucket is forfeited, by whichever front sees it

A request is noted before the sum of those under way is read, so that two fronts do not both take the last
place. Of a rate each of several fronts may be a request ahead for a moment: it is counted, so the rate holds.

What a request costs in rows is known when it runs, and in tokens when it ends. So a request is let in while
these buckets are not below zero, and its cost may bring them there: the next ones wait for as long as that
takes to flow in again. So a request of more rows than a second's worth is served, and paid for afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from fastserve._ext.fast_path import Account, CountedEndpoint
from fastserve.errors import RateLimitError, ServeError
from fastserve.net.http1.large_bodies import ArrivedBody

if TYPE_CHECKING:
    from fastserve.net.access_control import Refuse
    from fastserve.net.request import Call, Endpoint

AGAIN_S = 1.0
"""When a client may try again that has too many requests under way: nobody knows when one ends."""
Resource = Literal["requests", "rows", "tokens"]


class Count(Protocol):
    """A number that grows."""

    def add(self, n: int = 1) -> None: ...


class Level(Protocol):
    """A number that all front processes read."""

    @property
    def value(self) -> float: ...

    def set(self, value: float) -> None: ...

    def add(self, amount: float = 1.0) -> None: ...


class Bucket(NamedTuple):
    """The numbers of one rate: those of this front process, and of all."""

    used: Level
    forfeited: Level
    """One for all fronts."""
    all_used: Sequence[Level]


class KeyShare(NamedTuple):
    """The numbers of one key."""

    running: Level
    all_running: Sequence[Level]
    requests: Bucket
    rows: Bucket
    tokens: Bucket
    whole: bool = True
    """False where this front has no part of the shared memory yet: its limit is its part of the key's."""


class KeyLimits(NamedTuple):
    """The limits of a key: requests, rows and tokens a second, and requests under way; 0 is any number."""

    requests: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    concurrency: int = 0


class NoCount:
    """A count that nobody reads."""

    def add(self, n: int = 1) -> None:
        pass


class KeyCounts(NamedTuple):
    """The counts of one key: requests, rows, tokens, nanoseconds of compute, and errors by their code."""

    requests: Count = NoCount()
    rows: Count = NoCount()
    tokens: Count = NoCount()
    compute_ns: Count = NoCount()
    error_of: Callable[[str], Count] = lambda code: NoCount()


class KeyUsage(Account):
    """The use of one key in one front process."""

    __slots__ = (
        "_counts", "_errors", "_find_share", "_fronts", "_limits", "_rates", "_share", "clock", "limited",
        "name", "requests",
    )  # fmt: skip

    def __init__(self, name: str, counts: KeyCounts = KeyCounts()) -> None:  # noqa: B008  (a constant)
        self.name, self.requests, self._counts = name, counts.requests, counts
        self.clock: Callable[[], float] = monotonic
        self._errors: dict[str, Count] = {}
        self._find_share: Callable[[str], KeyShare] | None = None
        self._share: KeyShare | None = None
        self._limits, self._fronts = KeyLimits(), 1
        self._rates: tuple[tuple[Resource, float], ...] = ()
        self.limited = False

    def hold(self, limits: KeyLimits, find_share: Callable[[str], KeyShare], fronts: int = 1) -> None:
        """Hold requests to these limits from now on. `find_share` has the numbers that `fronts` processes
        share."""
        self._limits, self._find_share = limits, find_share
        self._fronts, self._share = fronts, None
        given: tuple[tuple[Resource, float], ...]
        given = ("requests", limits.requests), ("rows", limits.rows), ("tokens", limits.tokens)
        self._rates = tuple(one for one in given if one[1])
        self.charged = bool(limits.rows)
        self.limited = any(limits)

    @property
    def counts_running(self) -> bool:
        """Return whether each request that was taken is given back."""
        return bool(self._limits.concurrency)

    def count_error(self, code: str) -> None:
        """Count a request that is answered with an error: an HTTP status, or the name of gRPC's."""
        found = self._errors.get(code)
        if found is None:
            found = self._errors[code] = self._counts.error_of(code)
        found.add()

    def take(self) -> KeyShare:
        """Take room for a request, and return where to give it back. Raises RateLimitError."""
        share, most = self._find(), self._limits.concurrency
        part = 1 if share.whole else self._fronts
        if most:
            share.running.add()
            if sum([one.value for one in share.all_running]) > max(1, most // part):
                share.running.add(-1)
                text = f"this API key may have {most} requests under way"
                raise RateLimitError(text, "concurrency", most, 0, AGAIN_S)
        try:
            for resource, per_second in self._rates:
                self._look(share, resource, per_second / part)
        except RateLimitError:
            if most:
                share.running.add(-1)
            raise
        if self._limits.requests:
            share.requests.used.add(part / self._limits.requests)
        return share

    def undo(self, share: KeyShare) -> None:
        """Give back what `take` took: the request comes again."""
        if self._limits.concurrency:
            share.running.add(-1)
        if self._limits.requests:
            share.requests.used.add(-(1 if share.whole else self._fronts) / self._limits.requests)

    def check_rows(self) -> None:
        """Raise RateLimitError where the rows of earlier requests have to be waited for."""
        share = self._find()
        if self._limits.rows:
            self._look(share, "rows", self._limits.rows / (1 if share.whole else self._fronts))

    def has_rows(self) -> bool:
        """Return whether `check_rows` would let a request pass."""
        try:
            self.check_rows()
        except RateLimitError:
            return False
        return True

    def charge_rows(self, rows: int) -> None:
        """Charge rows against their limit, which has to be there."""
        share = self._find()
        share.rows.used.add(rows * (1 if share.whole else self._fronts) / self._limits.rows)

    def charge_tokens(self, tokens: int) -> None:
        """Count tokens, and charge them against their limit where there is one."""
        self._counts.tokens.add(tokens)
        if self._limits.tokens:
            share = self._find()
            share.tokens.used.add(tokens * (1 if share.whole else self._fronts) / self._limits.tokens)

    def flush(self) -> None:
        """Move what the queues have noted on to the counts."""
        if self.rows:
            self._counts.rows.add(self.rows)
            self.rows = 0
        if self.compute_ns >= 1:
            whole = int(self.compute_ns)
            self._counts.compute_ns.add(whole)
            self.compute_ns -= whole

    def describe_room(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers that tell a client of the rate of which it has least left; none without one."""
        if not self._rates:
            return ()
        share = self._find()
        part = 1 if share.whole else self._fronts
        levels = [(*self._level(share, name, rate / part), name, rate) for name, rate in self._rates]
        level_s, most_s, name, rate = min(levels, key=lambda one: one[0] / one[1])
        return limit_headers(name, rate, max(0.0, level_s * rate / part), most_s - level_s)

    def _find(self) -> KeyShare:
        share = self._share
        if share is None or not share.whole:
            assert self._find_share is not None
            share = self._share = self._find_share(self.name)
        return share

    def _level(self, share: KeyShare, resource: Resource, rate: float) -> tuple[float, float]:
        """Return what is in a bucket and what may be, in seconds."""
        bucket: Bucket = getattr(share, resource)
        most_s = max(1.0, 1 / rate) if resource == "requests" else 1.0
        left_s = self.clock() - sum([one.value for one in bucket.all_used])
        level_s = left_s - bucket.forfeited.value
        if level_s > most_s:
            bucket.forfeited.set(left_s - most_s)  # no `add`: two fronts may see it at the same time
            level_s = most_s
        return level_s, most_s

    def _look(self, share: KeyShare, resource: Resource, rate: float) -> None:
        """Raise RateLimitError where a rate has no room for a request."""
        level_s, most_s = self._level(share, resource, rate)
        cost_s = 1 / rate if resource == "requests" else 0.0
        if level_s < cost_s:
            allowed: float = getattr(self._limits, resource)
            text = f"this API key may send {allowed:g} {resource} a second"
            if resource == "tokens":
                text = f"this API key may use {allowed:g} tokens a second"
            raise RateLimitError(text, resource, allowed, 0, cost_s - level_s, most_s - level_s)


def limit_headers(
    resource: str, limit: float, remaining: float, reset_s: float
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that tell of one limit of a key."""
    return (
        (b"x-ratelimit-resource", resource.encode()),
        (b"x-ratelimit-limit", b"%g" % limit),
        (b"x-ratelimit-remaining", b"%d" % int(remaining + 1e-6)),
        (b"x-ratelimit-reset", b"%.3f" % reset_s),
    )


class TakingCountedEndpoint(CountedEndpoint):
    """A CountedEndpoint of an endpoint that reads large bodies out of the socket itself."""

    __slots__ = ()

    def take(self, call: Call, body: ArrivedBody) -> bool:
        taken: bool = self.endpoint.take(call, body)
        if taken:
            self.counter.add()
        return taken


class LimitedEndpoint:
    """An endpoint of one key's requests, which are held to its limits. Bodies are read before."""

    __slots__ = ("_endpoint", "_refuse", "_usage")

    def __init__(self, usage: KeyUsage, endpoint: Endpoint, refuse: Refuse) -> None:
        self._usage, self._endpoint, self._refuse = usage, endpoint, refuse

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        usage = self._usage
        usage.requests.add()
        try:
            share = usage.take()
        except ServeError as fault:
            self._refuse(call, fault)
            return None
        if usage.counts_running:
            call.watch(lambda status: share.running.add(-1))
        return self._endpoint(call)


class TakingLimitedEndpoint(LimitedEndpoint):
    """A LimitedEndpoint of an endpoint that reads large bodies out of the socket itself."""

    __slots__ = ()

    def take(self, call: Call, body: ArrivedBody) -> bool:
        usage = self._usage
        try:
            share = usage.take()
        except ServeError:
            return False  # the call itself finds out
        if usage.counts_running:  # first: it may be answered at once
            call.watch(lambda status: share.running.add(-1))
        taken: bool = False
        try:
            taken = self._endpoint.take(call, body)  # type: ignore[attr-defined]
        finally:
            if not taken:
                call.unwatch()
                usage.undo(share)
        usage.requests.add()
        return taken


def use_of(usage: KeyUsage, endpoint: Endpoint, refuse: Refuse) -> Endpoint:
    """Return the endpoint for the requests of a key; `refuse` answers those over its limits."""
    takes = hasattr(endpoint, "take")
    if not usage.limited:
        counted = TakingCountedEndpoint if takes else CountedEndpoint
        return counted(usage, usage.requests, endpoint)
    made = TakingLimitedEndpoint if takes else LimitedEndpoint
    return made(usage, endpoint, refuse)
