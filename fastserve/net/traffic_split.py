"""Requests split by weights: in front of every endpoint and RPC that infers, a draw leads to one of several
compartments, each with dialects of its own.

    SplitRule      of one model: the weight of each key, and the header that draws
    TrafficSplit   a point in [0, 1) for each header that rules name -> a compartment

A draw is a point in [0, 1), and every rule divides [0, 1) by its weights. Rules that draw by the same header
have the same point: a compartment stands for the points between two borders of any rule, so their number is
the sum of the models' weights and not the product. Equal values of a header give the same point, in every
front process, over every protocol. A request without the header is drawn at random: by the nanosecond at
which it came, so that a second draw for the same request is the same.

While nothing is split, heads lead to the endpoints themselves, and requests pay nothing.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from fastserve.net.request import Call, Endpoint, RequestHead

if TYPE_CHECKING:
    from fastserve.net.api_keys import Compartment
    from fastserve.net.grpc.method import Method
    from fastserve.net.http1.large_bodies import ArrivedBody

MOST_KEPT = 256
"""Compartments that are kept: few rules have so many borders."""
_MASK = (1 << 64) - 1
_SCALE = 1.0 / (1 << 64)
Fields = Sequence[tuple[bytes, bytes]]


class SplitRule(NamedTuple):
    """How the requests of one model are split. `header` is in lower case; empty: at random."""

    weights: Sequence[float]
    keys: Sequence[str]
    header: bytes = b""

    def borders(self) -> list[float]:
        """Return where each share but the last one ends, in (0, 1)."""
        total = sum(self.weights)
        return [end / total for end in accumulate(self.weights)][:-1]


MakeArm = Callable[[Mapping[str, str]], "Compartment"]
"""Make the compartment in which each model has this key."""


class TrafficSplit:
    """Draws the compartments of requests, in one front process and for clients of the same models."""

    def __init__(self, make: MakeArm) -> None:
        self.active = False
        self._make = make
        self._rules: Mapping[str, SplitRule] = {}
        self._borders: list[tuple[bytes, list[float]]] = []  # by header
        self._made: dict[tuple[int, ...], Compartment] = {}
        self._seed = random.getrandbits(64)
        self._skipping: WeakKeyDictionary[RequestHead, SplitEndpoint] = WeakKeyDictionary()
        self.followers: WeakSet[SplitEndpoint | SplitRpc] = WeakSet()
        self.on_change: list[Callable[[], None]] = []

    def change(self, rules: Mapping[str, SplitRule]) -> None:
        """Split by these rules, by model, from the next request on."""
        if rules == self._rules:
            return
        borders: dict[bytes, set[float]] = {}
        for rule in rules.values():
            borders.setdefault(rule.header, set()).update(rule.borders())
        self._rules, self.active = dict(rules), bool(rules)
        self._borders = [(header, sorted(found)) for header, found in borders.items()]
        self._made.clear()
        for follower in list(self.followers):
            follower.arms.clear()
        for head, outer in list(self._skipping.items()):
            if head.endpoint is outer.inner:
                head.endpoint = outer
        self._skipping.clear()
        for callback in list(self.on_change):
            callback()

    def compartments(self) -> list[Compartment]:
        """Return those that were made for the rules of now."""
        return list(self._made.values())

    def skip(self, head: RequestHead, outer: SplitEndpoint) -> None:
        """Let requests with this head skip `outer` until something is split."""
        if head.endpoint is outer:
            head.endpoint = outer.inner
            self._skipping[head] = outer

    def choose(self, fields: Fields, received_ns: int) -> Compartment:
        """Return the compartment of a request with these headers that came then."""
        places = tuple(
            [
                bisect_right(borders, self._draw(header, fields, received_ns))
                for header, borders in self._borders
            ]
        )
        return self._made.get(places) or self._open(places)

    def _draw(self, header: bytes, fields: Fields, received_ns: int) -> float:
        if header:
            for name, value in fields:
                if name == header:
                    return hash_point(value)
        # splitmix64: neighbouring times are far from each other
        mixed = (received_ns + self._seed) * 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return (mixed ^ mixed >> 31) * _SCALE

    def _open(self, places: tuple[int, ...]) -> Compartment:
        arms = {}
        points = {
            header: ([0.0, *borders][place], place)
            for (header, borders), place in zip(self._borders, places, strict=True)
        }
        for model, rule in self._rules.items():
            point, _ = points[rule.header]
            arms[model] = rule.keys[bisect_right(rule.borders(), point)]
        if len(self._made) >= MOST_KEPT:
            del self._made[next(iter(self._made))]
        made = self._made[places] = self._make(arms)
        return made


def hash_point(value: bytes) -> float:
    """Return the point in [0, 1) of a header's value, the same everywhere."""
    digest = blake2b(value.strip(b" \t"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


FindArm = Callable[["Compartment"], Endpoint]


def split_endpoint(split: TrafficSplit | None, endpoint: Endpoint, find: FindArm) -> Endpoint:
    """Return an HTTP endpoint that infers, in front of its likes in compartments, which `find` finds."""
    if split is None:
        return endpoint
    made = TakingSplitEndpoint if hasattr(endpoint, "take") else SplitEndpoint
    return made(split, endpoint, find)


class SplitEndpoint:
    """An HTTP endpoint whose requests go to its likes in the compartments that are drawn."""

    __slots__ = ("__weakref__", "_find", "_split", "arms", "inner")

    def __init__(self, split: TrafficSplit, inner: Endpoint, find: FindArm) -> None:
        self._split, self.inner, self._find = split, inner, find
        self.arms: dict[Compartment, Endpoint] = {}
        split.followers.add(self)

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if not self._split.active:
            self._split.skip(call.head, self)
            return self.inner(call)
        return self.choose(call)(call)

    def choose(self, call: Call) -> Endpoint:
        """Return the endpoint that is drawn for a call."""
        compartment = self._split.choose(call.head.headers, call.received_ns)
        found = self.arms.get(compartment)
        if found is None:
            found = self.arms[compartment] = self._find(compartment)
        return found


class TakingSplitEndpoint(SplitEndpoint):
    """A SplitEndpoint of an endpoint that reads large bodies out of the socket itself."""

    __slots__ = ()

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Offer the body to the endpoint that is drawn."""
        endpoint = self.choose(call) if self._split.active else self.inner
        taken: bool = endpoint.take(call, body)  # type: ignore[attr-defined]
        return taken


FindMethods = Callable[["Compartment"], Mapping[str, "Method"]]


class SplitRpc:
    """An RPC whose calls go to its likes in the compartments that are drawn; `method` is for the transport.
    All requests of one stream go to the same."""

    __slots__ = ("__weakref__", "_find", "_path", "_split", "arms", "method")

    def __init__(self, split: TrafficSplit, method: Method, find: FindMethods) -> None:
        self._split, self._path, self._find = split, method.path, find
        self.arms: dict[Compartment, Method] = {}
        split.followers.add(self)
        self.method = replace(
            method,
            run=self._run_many if method.gives_stream else self._run,
            start=None if method.start is None else self._start,
            start_below=None if method.start_below is None else self._start_below,
            take=None if method.take is None else self._take,
        )

    def choose(self, rpc: Any) -> Method:
        """Return the method that is drawn for a call."""
        compartment = self._split.choose(rpc.head.headers, rpc.received_ns)
        found = self.arms.get(compartment)
        if found is None:
            found = self.arms[compartment] = self._find(compartment)[self._path]
        return found

    def _start(self, message: bytes, rpc: Any) -> bool:
        start = self.choose(rpc).start
        return start is not None and start(message, rpc)

    def _start_below(self, message: bytes, rpc: Any) -> bool:
        start = self.choose(rpc).start_below
        return start is not None and start(message, rpc)

    def _take(self, rpc: Any, body: ArrivedBody) -> bool:
        take = self.choose(rpc).take
        return take is not None and take(rpc, body)

    def _run(self, request: Any, rpc: Any) -> Awaitable[Any]:
        work: Awaitable[Any] = self.choose(rpc).run(request, rpc)
        return work

    def _run_many(self, request: Any, rpc: Any) -> AsyncIterator[Any]:
        pieces: AsyncIterator[Any] = self.choose(rpc).run(request, rpc)
        return pieces
