"""Requests split by weights: in front of every endpoint and RPC that infers, a draw leads to one of several
compartments, each with dialects of its own.

    SplitRule      of one model: the weight of each key, and the header that draws, or BY_VALUE
    TrafficSplit   a point in [0, 1) for each header that rules name -> a compartment

A draw is a point in [0, 1), and every rule divides [0, 1) by its weights. Rules that draw by the same header
have the same point: a compartment stands for the points between two borders of any rule, so their number is
the sum of the models' weights and not the product. Equal values of a header give the same point, in every
front process, over every protocol. A request without the header is drawn at random: by the nanosecond at
which it came, so that a second draw for the same request is the same.

Rules by an input's value have a point of their own. It is drawn at random, since the body is not read yet.
Where the value leads elsewhere the request stops (engine/schedulers/shadow.py), and runs again with the
point of the value.

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
from fastserve.util.model_demand import DRAW, VersionDrawn

if TYPE_CHECKING:
    from fastserve.net.api_keys import Compartment
    from fastserve.net.grpc.method import Method
    from fastserve.net.http1.large_bodies import ArrivedBody

MOST_KEPT = 256
"""Compartments that are kept: few rules have so many borders."""
BY_VALUE = b"\0"
"""The header of rules that draw by the value of an input."""
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

    def key_at(self, point: float) -> str:
        """Return the key of a point in [0, 1)."""
        return self.keys[bisect_right(self.borders(), point)]


MakeArm = Callable[[Mapping[str, str]], "Compartment"]
"""Make the compartment in which each model has this key."""


class TrafficSplit:
    """Draws the compartments of requests, in one front process and for clients of the same models."""

    def __init__(self, make: MakeArm) -> None:
        self.active = self.by_value = False
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
        self.by_value = BY_VALUE in borders
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

    def choose(self, fields: Fields, received_ns: int, value: float | None = None) -> Compartment:
        """Return the compartment of a request with these headers that came then, and with an input whose
        value has the point `value`."""
        places = tuple(
            [
                bisect_right(
                    borders,
                    value
                    if value is not None and header == BY_VALUE
                    else self._draw(header, fields, received_ns),
                )
                for header, borders in self._borders
            ]
        )
        return self._made.get(places) or self._open(places)

    def leads_away(self, model: str, fields: Fields, received_ns: int, value: float) -> bool:
        """Return whether a request of the model has another key with the point of its value than without."""
        rule = self._rules.get(model)
        before = self._draw(BY_VALUE, fields, received_ns)
        return rule is not None and rule.key_at(before) != rule.key_at(value)

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
            arms[model] = rule.key_at(point)
        if len(self._made) >= MOST_KEPT:
            del self._made[next(iter(self._made))]
        made = self._made[places] = self._make(arms)
        return made


def hash_point(value: bytes) -> float:
    """Return the point in [0, 1) of a header's value, the same everywhere."""
    digest = blake2b(value.strip(b" \t"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


class RequestDraw:
    """The draw of one request (util.model_demand.ValueDraw). `point` is that of its value, once known."""

    __slots__ = ("_fields", "_received_ns", "_split", "point", "version")

    def __init__(self, split: TrafficSplit, fields: Fields, received_ns: int) -> None:
        self._split, self._fields, self._received_ns = split, fields, received_ns
        self.point: float | None = None
        self.version: object = None

    def leads_away(self, model: str, value: bytes) -> bool:
        self.point, self.version = hash_point(value), None
        return self._split.leads_away(model, self._fields, self._received_ns, self.point)


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
        if self._split.by_value:
            return self._start_by_value(call)
        return self.choose(call)(call)

    def _start_by_value(self, call: Call) -> Coroutine[Any, Any, None] | None:
        draw = RequestDraw(self._split, call.head.headers, call.received_ns)
        DRAW.set(draw)
        try:
            work = self.choose(call)(call)
        finally:
            DRAW.set(None)
        return None if work is None else self._follow(call, draw, work)

    async def _follow(self, call: Call, draw: RequestDraw, work: Coroutine[Any, Any, None]) -> None:
        """Run the endpoint's coroutine, and another endpoint where the value of an input leads to it."""
        DRAW.set(draw)
        try:
            await work
            return
        except VersionDrawn:
            pass
        finally:
            DRAW.set(None)
        again = self.choose(call, draw.point)(call)
        if again is None:
            call.leave_open()
        else:
            await again

    def choose(self, call: Call, value: float | None = None) -> Endpoint:
        """Return the endpoint that is drawn for a call; `value` is the point of an input's value."""
        compartment = self._split.choose(call.head.headers, call.received_ns, value)
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

    def choose(self, rpc: Any, value: float | None = None) -> Method:
        """Return the method that is drawn for a call; `value` is the point of an input's value."""
        compartment = self._split.choose(rpc.head.headers, rpc.received_ns, value)
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
        if self._split.by_value and not self.method.takes_stream:  # a stream cannot be read again
            return self._run_by_value(request, rpc)
        work: Awaitable[Any] = self.choose(rpc).run(request, rpc)
        return work

    async def _run_by_value(self, request: Any, rpc: Any) -> Any:
        draw = RequestDraw(self._split, rpc.head.headers, rpc.received_ns)
        DRAW.set(draw)
        try:
            return await self.choose(rpc).run(request, rpc)
        except VersionDrawn:
            pass
        finally:
            DRAW.set(None)
        return await self.choose(rpc, draw.point).run(request, rpc)

    def _run_many(self, request: Any, rpc: Any) -> AsyncIterator[Any]:
        pieces: AsyncIterator[Any] = self.choose(rpc).run(request, rpc)
        return pieces
