"""The compiled fast path does what its oracle does, step by step, whatever any step raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext import fast_path, http2_path
from fastserve.metrics.names import Traffic
from fastserve.metrics.registry import Registry
from tests.oracles import fast_path as oracle


class RefusedError(Exception):
    """An error that a client may read."""


FAULTS: dict[str, type[BaseException]] = {
    "refused": RefusedError,
    "broken": RuntimeError,
    "memory": MemoryError,
    "stopped": KeyboardInterrupt,
}
STEPS = [
    "reserve",
    "note",
    "fill",
    "hold",
    "settle",
    "seq",
    "commit",
    "ended",
    "answered",
    "read",
    "add_writer",
]
OUTCOMES = ["write", "respond", "reply", "release", "refuse", "failed", "close"]


class Story:
    """One request on one implementation: what was called, in order; `raises`: what each step raises."""

    def __init__(self, of: Any, shape: dict[str, Any], raises: dict[str, str]) -> None:
        self.told: list[Any] = []
        self._raises, self._shape = raises, shape
        ring = SimpleNamespace(
            **{name: self.step(name) for name in ("seq", "commit", "release")},
            answered=self.step("answered", shape["end"]),
            ended=self.step("ended", (3, 3, 1, 1, 4.5, None)),
            failure=self.step("failed_batch", (5, "batch") if shape["failed"] else None),
        )
        story = self

        class Queue(of.TicketTable):  # type: ignore[misc]
            wake_soon, watch, settle = (story.method(name) for name in ("wake_soon", "watch", "settle"))
            failure = story.method("failure", RefusedError("batch"))
            own_fault = story.method("own_fault", RefusedError("own") if shape["end"] == 2 else None)
            undelivered, cancel = story.method("undelivered"), story.method("cancel")

            def look_around(self, account: Any, now_ns: int) -> None:
                story.step("look_around", times=True)(account, now_ns)
                self.look_ns = now_ns + 1_000_000_000_000

        class Client(of.Account):  # type: ignore[misc]
            charge_rows = story.method("charge_rows")

        class Path(of.Lifecycle):  # type: ignore[misc]
            respond, reply = story.method("respond"), story.method("reply")
            refuse, failed = story.method("refuse"), story.method("failed")

        self.queue = Queue(ring, 2, SimpleNamespace(record=self.step("record")))
        self.queue.room = SimpleNamespace(anyone=shape["anyone"])
        registry = Registry()
        metrics = Traffic(registry, "v2", ["m"])
        self.metrics = *metrics.succeeded("m", 1), *metrics.stages("m", 1)
        registry.close()
        answered = self.step("after", times=True) if shape["after"] else None
        self.traced: dict[Any, Any] = {}
        self.path = Path(self.queue, RefusedError, self.metrics, answered, self.traced, shape["replies"])
        self.accounts = Client(), Client()
        self.accounts[1].charged = True
        self.path.accounted = shape["accounted"] is not None
        usage = None if shape["accounted"] is None else (None, *self.accounts)[shape["accounted"]]
        head = SimpleNamespace(usage=usage)
        self.exchange = SimpleNamespace(received_ns=monotonic_ns(), on_gone="nobody", head=head)

    def step(self, name: str, gives: Any = None, *, times: bool = False) -> Callable[..., Any]:
        """A function that notes its call, but not the times it is given, and raises what it is to raise."""

        def run(*given: Any) -> Any:
            self.told.append(name if times else (name, *map(plain, given)))
            if name in self._raises:
                raise FAULTS[self._raises[name]](name)
            return gives

        return run

    def method(self, name: str, gives: Any = None) -> Callable[..., Any]:
        run = self.step(name, gives)
        return lambda _, *given: run(*given)

    def prepared(self) -> Any:
        shape, held = self._shape, SimpleNamespace(close=self.step("close"))
        offset = 64 if shape["slab"] else 0
        return SimpleNamespace(
            rows=3,
            noted=shape["noted"],
            outside=shape["outside"],
            note=self.step("note", b"note"),
            fill=self.step("fill", shape["fills"]),
            hold=self.step("hold", held),
            layout_in=SimpleNamespace(
                reserve=self.step("reserve", (65543, ["memory"], (offset, 9)) if shape["room"] else None),
                settle=self.step("settle"),
                abandon=self.step("abandon"),
            ),
            layout_out=SimpleNamespace(
                read=self.step("read", ("form", ["views"]) if shape["plain"] else None)
            ),
            writers={"form": "known"} if shape["known"] else {},
            add_writer=self.step("add_writer", "new" if shape["writable"] else None),
            write=self.step("write"),
        )

    def run(self) -> list[Any]:
        """Begin and end it; what came of it is the last that is told."""
        shape = self._shape
        try:
            taken = self.path.start(self.exchange, self.prepared(), b"body", "id", shape["deadline"])
            self.told.append(("taken", taken, plain(self.exchange.on_gone)))
            if shape["leaves"] and taken:
                self.exchange.on_gone()
                self.queue.by_slot[1][0].done = None  # as a queue's cancel does it
            self.queue.finish(1)
        except BaseException as error:
            self.told.append(("raised", plain(error)))
        queue = self.queue
        left = queue.waiting, queue.unreleased, list(map(len, queue.by_slot))
        self.told.append(("left", left, plain(self.exchange.on_gone)))
        counted, *took = self.metrics
        self.told.append(("counted", counted.value, *(sum(one.buckets) for one in took)))
        self.told += [("used", one.rows, one.compute_ns) for one in self.accounts]
        return self.told


def plain(value: Any) -> Any:
    """Return the fields that can be compared."""
    if isinstance(value, BaseException):
        return repr(value)
    return value if isinstance(value, str | bytes | int | tuple | list | None) else callable(value)


FLAGS = ["anyone", "after", "replies", "failed", "slab", "noted", "outside", "known", "writable", "leaves"]
flags = {name: st.booleans() for name in FLAGS}
mostly = dict.fromkeys(("fills", "room", "plain"), st.sampled_from([True, True, True, False]))
shapes = st.fixed_dictionaries(
    {
        **flags,
        **mostly,
        "end": st.sampled_from([1, 1, 0, 2]),
        "accounted": st.sampled_from([None, None, 0, 1, 2]),
        "deadline": st.sampled_from([0, 7]),
    }
)
faults = st.dictionaries(st.sampled_from(STEPS + OUTCOMES), st.sampled_from(sorted(FAULTS)), max_size=2)


@given(shape=shapes, raises=faults)
def test_step_by_step_as_the_oracle(shape: dict[str, Any], raises: dict[str, str]) -> None:
    assert Story(fast_path, shape, raises).run() == Story(oracle, shape, raises).run()


ORDINARY: dict[str, Any] = {**dict.fromkeys(flags, False), **dict.fromkeys(mostly, True)}
ORDINARY |= {"end": 1, "deadline": 0, "accounted": None}


@pytest.mark.parametrize("fault", ["refused", "broken", "memory"])
@pytest.mark.parametrize("step", [*STEPS, *OUTCOMES])
@pytest.mark.parametrize("kind", [{}, {"slab": True, "noted": True, "outside": True}, {"replies": True}])
def test_each_step_can_fail_by_itself(kind: dict[str, Any], step: str, fault: str) -> None:
    shape, raises = {**ORDINARY, "writable": True, **kind}, {step: fault}
    assert Story(fast_path, shape, raises).run() == Story(oracle, shape, raises).run()


def test_a_whole_story() -> None:
    told = Story(fast_path, ORDINARY | {"known": True}, {}).run()
    assert [one[0] if isinstance(one, tuple) else one for one in told] == [
        "reserve", "fill", "seq", "commit", "wake_soon", "taken",
        "ended", "record", "failed_batch", "answered", "read", "write", "release", "left", "counted",
        "used", "used",
    ]  # fmt: skip
    assert told[-4:-2] == [("left", (0, 0, [0, 0]), None), ("counted", 1, 1, 1, 1)]
    assert told[-2:] == [("used", 0, 0.0), ("used", 0, 0.0)]


def test_the_account_of_a_request() -> None:
    story = Story(fast_path, ORDINARY | {"known": True, "accounted": 2}, {})
    told = story.run()
    assert told[-2:] == [("used", 0, 0.0), ("used", 3, 13.5)]
    assert ("charge_rows", 3) in told
    assert story.queue.newest is story.accounts[1]


@pytest.mark.parametrize("fault", [None, RuntimeError, KeyboardInterrupt])
def test_a_counted_endpoint_says_whose_call_it_starts(fault: type[BaseException] | None) -> None:
    """It says so of that call alone, until it returns or raises. Other calls are their heads'."""
    story = Story(fast_path, ORDINARY | {"accounted": 1}, {})
    by_head, by_endpoint = story.accounts
    one, other = story.exchange, SimpleNamespace(received_ns=1, on_gone=None, head=story.exchange.head)
    counted: list[str] = []

    def counter(name: str) -> Any:
        return SimpleNamespace(add=lambda: counted.append(name))

    def start(exchange: Any) -> None:
        assert story.path.start(exchange, story.prepared(), b"body")

    def answer(call: Any) -> str:
        assert counted == ["outer"]  # before the endpoint
        start(call)
        start(other)
        inner(other)
        assert counted == ["outer", "inner"]
        start(call)
        if fault is not None:
            raise fault
        return "answered"

    inner = fast_path.CountedEndpoint(by_head, counter("inner"), start)
    outer = fast_path.CountedEndpoint(by_endpoint, counter("outer"), answer)
    with nullcontext() if fault is None else pytest.raises(fault):
        assert outer(one) == "answered"
    assert (by_endpoint.rows, by_head.rows) == (6, 6)
    start(one)
    assert (by_endpoint.rows, by_head.rows) == (6, 9)
    requests = story.metrics[0]
    compiled = fast_path.CountedEndpoint(by_head, requests, lambda call: requests.value)
    before = requests.value
    assert [compiled(one), compiled(one)] == [before + 1, before + 2]  # counted before the endpoint, here too
    with pytest.raises(ValueError, match="unpack"):
        outer()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        fast_path.CountedEndpoint(None, print, start)  # type: ignore[arg-type]


def test_a_call_of_grpc_is_started_for_the_account_it_began_with() -> None:
    """Its head's, looked at once: an epoch of keys may begin before the method asks."""
    story = Story(fast_path, ORDINARY | {"accounted": 1}, {})
    later, first = story.accounts

    def start(message: bytes, call: Any) -> bool:
        call.head.usage = later
        taken: bool = story.path.start(call, story.prepared(), message)
        return taken

    head = http2_path.HeadPath()
    head.calls = http2_path.CallsPath((b"", b"", "closed", http2_path.CallPath))
    head.calls.opening = SimpleNamespace(done=True)
    head.start, head.usage, head.ordinary = start, first, True
    connection = http2_path.Http2Path((1, 1, 1, "whole", "done", http2_path.StreamFields), 99, 2, 1)
    for _ in range(2):
        stream = http2_path.StreamFields(connection, 1, head, "whole")
        http2_path.CallPath(head, stream).begin(b"m", False)
    assert (first.rows, later.rows) == (3, 3)


def test_accounts_that_take_turns_are_looked_at_once_in_a_while() -> None:
    """At the first request, at the first of another account, and when `look_ns` says so."""
    story = Story(fast_path, ORDINARY, {})
    queue, (one, other) = story.queue, story.accounts

    def submit(account: Any) -> bool:
        story.told.clear()
        queue.submit(65543, 1, print, 0, None, account)
        return "look_around" in story.told

    assert [submit(one), submit(one)] == [True, False]
    assert queue.mixed_ns == 0
    assert [submit(other), submit(one), submit(other)] == [True, False, False]
    assert queue.mixed_ns > 0
    queue.look_ns = monotonic_ns()
    assert [submit(other), submit(other)] == [True, False]
    assert (one.rows, other.rows) == (3, 4)


class Sampled:
    """A countdown, and how often it has reached its end: the next one comes after `gap`. It traces nothing
    that `start` does not take."""

    def __init__(self, of: Any, gap: int, taking: list[bool]) -> None:
        self.countdown, self.gap, self.taking, self.turns = of.SampleCountdown(), gap, list(taking), 0
        self.countdown.left = gap
        self.call = of.sample_endpoint(self.countdown, self.start, self.turn)
        self.begin = of.sample_start(self.countdown, self.start, self.turn)

    def start(self, *given: Any) -> bool:
        return self.taking.pop(0)

    def turn(self, *given: Any) -> bool:
        self.countdown.left, self.turns = self.gap, self.turns + 1
        return self.start(*given)


@given(gap=st.integers(1, 5), taking=st.lists(st.booleans(), max_size=20))
def test_requests_are_counted_down_to_the_traced_one(gap: int, taking: list[bool]) -> None:
    compiled, plain = Sampled(fast_path, gap, taking), Sampled(oracle, gap, taking)
    for number in range(len(taking)):
        for one in compiled, plain:
            one.told = one.begin(b"", one) if number % 3 else one.call(one)  # type: ignore[attr-defined]
        assert compiled.told == plain.told  # type: ignore[attr-defined]
        assert (compiled.countdown.left, compiled.turns) == (plain.countdown.left, plain.turns)


@pytest.mark.parametrize("step", [None, *STEPS[:-4], *STEPS[-2:], *OUTCOMES, "leaves"])
def test_a_traced_request_ends_once_whatever_happens(step: str | None) -> None:
    """One that is not taken is its caller's again."""
    story = Story(fast_path, ORDINARY | {"known": True}, {} if step in (None, "leaves") else {step: "broken"})
    ends: list[Any] = []

    class Exchange(SimpleNamespace):
        __hash__ = object.__hash__

    run = SimpleNamespace(begun_ns=2, ended_ns=0, fail=lambda error: ends.append(("run", type(error))))
    span = SimpleNamespace(started_ns=1, children=[], begin_run=lambda *given: run)
    story.exchange = Exchange(**vars(story.exchange))
    story.queue.trace_lease = lambda *given: lambda: ends.append("batch")
    story.path.version = SimpleNamespace(model="m", number=1)
    fast = fast_path.FastSpan(span, story.exchange, lambda *given: ends.append(given), story.traced)
    taken = story.path.start(story.exchange, story.prepared(), b"body")
    if step == "leaves":
        story.exchange.on_gone()
    elif taken:
        story.queue.finish(1)
    if not fast.under_way:
        assert story.traced == {story.exchange: fast}
        assert ends == []
        return
    assert story.traced == {}
    told = [end for end in ends if isinstance(end, tuple) and end[0] is story.exchange]
    assert len(told) == 1
    assert told[0][1] is span
    names = [child[0] for child in span.children]
    error = told[0][2]
    assert names == (["decode", "encode"] if error is None else ["decode"])
    assert ("batch" in ends) is (step != "leaves")
    assert (error is None) is (step != "leaves")
