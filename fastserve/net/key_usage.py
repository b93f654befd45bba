"""The use of API keys: requests are counted, and held to the limits of their key.

    usage = KeyUsage("search", requests, error_of)      of one key, in one front process
    usage.hold(50, 4, find_share)                       requests a second, and under way at a time
    share = usage.take()                                RateLimitError for a request over a limit
    share.running.add(-1)                               when it has ended, if `counts_running`

A limit is one for all front processes. Each has numbers of its own in shared memory, which it alone writes,
and reads those of the others:

    under way    the sum of all fronts' `running`; a front that dies is taken out of it (server/key_shares.py)
    rate         a bucket of a second's worth, in seconds: now - forfeited - the sum of all fronts' `used`.
                 What flows into a full bucket is forfeited, by whichever front sees it

A request is noted before the sum of those under way is read, so that two fronts do not both take the last
place. Of a rate each of several fronts may be a request ahead for a moment: it is counted, so the rate holds.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastserve.errors import RateLimitError, ServeError
from fastserve.net.http1.large_bodies import ArrivedBody

if TYPE_CHECKING:
    from fastserve.net.access_control import Refuse
    from fastserve.net.request import Call, Endpoint

AGAIN_S = 1.0
"""When a client may try again that has too many requests under way: nobody knows when one ends."""


class Count(Protocol):
    """A number that grows."""

    def add(self, n: int = 1) -> None: ...


class Level(Protocol):
    """A number that all front processes read."""

    @property
    def value(self) -> float: ...

    def set(self, value: float) -> None: ...

    def add(self, amount: float = 1.0) -> None: ...


class KeyShare(NamedTuple):
    """The numbers of one key: those of this front process, and of all."""

    running: Level
    used: Level
    forfeited: Level
    """One for all fronts."""
    all_running: Sequence[Level]
    all_used: Sequence[Level]
    whole: bool = True
    """False where this front has no part of the shared memory yet: its limit is its part of the key's."""


class NoCount:
    """A count that nobody reads."""

    def add(self, n: int = 1) -> None:
        pass


class KeyUsage:
    """The use of one key in one front process."""

    __slots__ = (
        "_concurrency", "_error_of", "_errors", "_find_share", "_fronts", "_rate", "_share", "clock",
        "limited", "name", "requests",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        requests: Count | None = None,
        error_of: Callable[[str], Count] = lambda code: NoCount(),
    ) -> None:
        """`requests` counts them, `error_of` has the counts of those that were answered with an error, by its
        code."""
        self.name, self.requests, self._error_of = name, requests or NoCount(), error_of
        self.clock: Callable[[], float] = monotonic
        self._errors: dict[str, Count] = {}
        self._find_share: Callable[[str], KeyShare] | None = None
        self._share: KeyShare | None = None
        self._rate, self._concurrency, self._fronts = 0.0, 0, 1
        self.limited = False

    def hold(
        self, per_second: float, concurrency: int, find_share: Callable[[str], KeyShare], fronts: int = 1
    ) -> None:
        """Hold requests to these limits from now on; 0 is none. `find_share` has the numbers that `fronts`
        processes share."""
        self._rate, self._concurrency, self._find_share = per_second, concurrency, find_share
        self._fronts, self._share = fronts, None
        self.limited = bool(per_second or concurrency)

    @property
    def counts_running(self) -> bool:
        """Return whether each request that was taken is given back."""
        return bool(self._concurrency)

    def count_error(self, code: str) -> None:
        """Count a request that is answered with an error: an HTTP status, or the name of gRPC's."""
        found = self._errors.get(code)
        if found is None:
            found = self._errors[code] = self._error_of(code)
        found.add()

    def take(self) -> KeyShare:
        """Take room for a request, and return where to give it back. Raises RateLimitError."""
        share = self._share
        if share is None or not share.whole:
            assert self._find_share is not None
            share = self._share = self._find_share(self.name)
        part = 1 if share.whole else self._fronts
        if self._concurrency:
            most = max(1, self._concurrency // part)
            share.running.add()
            if sum([one.value for one in share.all_running]) > most:
                share.running.add(-1)
                text = f"this API key may have {self._concurrency} requests under way"
                raise RateLimitError(text, self._concurrency, 0, AGAIN_S)
        if self._rate:
            try:
                self._spend(share, self._rate / part)
            except RateLimitError:
                if self._concurrency:
                    share.running.add(-1)
                raise
        return share

    def undo(self, share: KeyShare) -> None:
        """Give back what `take` took: the request comes again."""
        if self._concurrency:
            share.running.add(-1)
        if self._rate:
            share.used.add(-1 / (self._rate / (1 if share.whole else self._fronts)))

    def _spend(self, share: KeyShare, rate: float) -> None:
        cost_s = 1 / rate
        most_s = max(1.0, cost_s)
        left_s = self.clock() - sum([one.value for one in share.all_used])
        level_s = left_s - share.forfeited.value
        if level_s > most_s:
            share.forfeited.set(left_s - most_s)  # no `add`: two fronts may see it at the same time
            level_s = most_s
        if level_s < cost_s:
            text = f"this API key may send {self._rate:g} requests a second"
            raise RateLimitError(text, self._rate, 0, cost_s - level_s, most_s - level_s)
        share.used.add(cost_s)


def count_requests(usage: KeyUsage, endpoint: Endpoint) -> Endpoint:
    """Return the endpoint of one key's requests, which are counted. A function: calls of an object's __call__
    cost 0.25 us more, and every request of a key is one."""
    count = usage.requests.add

    def answer(call: Call) -> Coroutine[Any, Any, None] | None:
        count()
        return endpoint(call)

    def take(call: Call, body: ArrivedBody) -> bool:
        taken: bool = endpoint.take(call, body)  # type: ignore[attr-defined]
        if taken:
            count()
        return taken

    if hasattr(endpoint, "take"):
        answer.take = take  # type: ignore[attr-defined]
    return answer


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
    if not usage.limited:
        return count_requests(usage, endpoint)
    made = TakingLimitedEndpoint if hasattr(endpoint, "take") else LimitedEndpoint
    return made(usage, endpoint, refuse)
