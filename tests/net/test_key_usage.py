"""Limits of keys: buckets and places that front processes share, and what is given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import Kind, RateLimitError, Reason
from fastserve.net.access_control import Opening, Scope
from fastserve.net.api_keys import WANTED, ApiKeyGate, Compartment, KeyTerms, keyed
from fastserve.net.key_usage import KeyCounts, KeyLimits, KeyUsage
from fastserve.net.request import RequestHead
from fastserve.server.key_shares import MOST_KEYS, KeyShares
from fastserve.settings.key_file import KeyEntry, changing, make_key
from tests.net.kit import Clock, Pipe, echo

HEAD = b"POST /echo HTTP/1.1\r\nHost: a\r\nx-api-key: %b\r\nContent-Length: 2\r\n\r\nhi"


OPEN: list[KeyShares] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def shares_of(number: int, fronts: int, owner: KeyShares | None = None) -> KeyShares:
    found = KeyShares(number, fronts)
    OPEN.append(found)
    if owner is not None:
        (record,) = owner.records()
        found.apply({}, [os.dup(fd) for fd in record.fds])
    return found


class Fronts:
    """The shares of several front processes, and what each of them knows of one key."""

    def __init__(self, count: int, limits: KeyLimits) -> None:
        owner = shares_of(0, count)
        self.shares = [owner, *(shares_of(number, count, owner) for number in range(1, count))]
        self.clock = Clock()
        self.clock.now = 5_000.0
        self.usages = [self.use(shares, limits) for shares in self.shares]

    def use(self, shares: KeyShares, limits: KeyLimits, name: str = "k") -> KeyUsage:
        usage = KeyUsage(name)
        usage.clock = self.clock
        usage.hold(limits, shares.find, len(self.shares))
        shares.find(name)
        return usage

    def take(self, turns: int) -> int:
        """How many of so many requests are taken, one front after the other."""
        taken = 0
        for turn in range(turns):
            try:
                self.usages[turn % len(self.usages)].take()
            except RateLimitError:
                continue
            taken += 1
        return taken


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_rate_is_that_of_all_fronts_together(count: int) -> None:
    fronts = Fronts(count, KeyLimits(requests=10))
    assert fronts.take(100) == 10  # a second's worth at once
    for _ in range(20):
        fronts.clock.now += 0.5
        assert fronts.take(100) == 5
    fronts.clock.now += 3600  # what flows into a full bucket is lost
    assert fronts.take(100) == 10
    fronts.clock.now += 0.25
    assert fronts.take(100) == 2


def test_one_front_may_use_all_of_it() -> None:
    fronts = Fronts(4, KeyLimits(requests=10))
    fronts.usages = fronts.usages[2:3]
    assert fronts.take(100) == 10


@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_paid_for_afterwards(count: int) -> None:
    """A request of any size is let in while there is no debt, and its rows are the debt of all fronts."""
    fronts = Fronts(count, KeyLimits(rows=10))
    assert fronts.take(5) == 5  # no rows yet
    fronts.usages[0].charge_rows(10)  # a second's worth
    assert fronts.take(1) == 1
    fronts.usages[-1].charge_rows(35)
    for usage in fronts.usages:
        with pytest.raises(RateLimitError) as caught:
            usage.take()
        fault = caught.value
        assert fault.retry_after_s == pytest.approx(3.5)
        assert (fault.resource, fault.limit, fault.remaining) == ("rows", 10, 0)
        assert fault.message == "this API key may send 10 rows a second"
    fronts.clock.now += 3.49
    assert fronts.take(count) == 0
    fronts.clock.now += 0.02
    assert fronts.take(count) == count
    fronts.clock.now += 3600  # a second's worth is there, and no more
    assert fronts.take(1) == 1
    fronts.usages[0].charge_rows(11)
    assert fronts.take(1) == 0


def test_tokens_are_counted_and_paid_for_as_they_come() -> None:
    counted: dict[str, int] = {}
    usage = KeyUsage("k", KeyCounts(tokens=Counted(counted, "tokens")))
    clock, shares = Clock(), shares_of(0, 1)
    clock.now = 5_000.0
    usage.clock = clock
    usage.hold(KeyLimits(tokens=100), shares.find)
    usage.take()
    for _ in range(30):
        usage.charge_tokens(10)
    assert counted == {"tokens": 300}
    with pytest.raises(RateLimitError, match="may use 100 tokens a second") as caught:
        usage.take()
    assert caught.value.retry_after_s == pytest.approx(2)
    clock.now += 2.001
    usage.take()
    usage.hold(KeyLimits(), shares.find)
    usage.charge_tokens(5)
    assert counted == {"tokens": 305}


def test_a_refusal_for_one_limit_spends_nothing_of_another() -> None:
    fronts = Fronts(1, KeyLimits(requests=2, rows=10, concurrency=5))
    (usage,) = fronts.usages
    usage.take()
    usage.charge_rows(11)
    for _ in range(10):
        with pytest.raises(RateLimitError, match="rows"):
            usage.take()
    assert fronts.shares[0].find("k").running.value == 1
    fronts.clock.now += 0.11
    usage.take()  # the second request of this second


def test_what_is_left_is_told_of_the_limit_that_is_nearest() -> None:
    fronts = Fronts(1, KeyLimits(requests=10, rows=1000))
    (usage,) = fronts.usages
    usage.take()
    assert dict(usage.describe_room()) == {
        b"x-ratelimit-resource": b"requests",
        b"x-ratelimit-limit": b"10",
        b"x-ratelimit-remaining": b"9",
        b"x-ratelimit-reset": b"0.100",
    }
    usage.charge_rows(600)
    told = dict(usage.describe_room())
    assert (told[b"x-ratelimit-resource"], told[b"x-ratelimit-remaining"]) == (b"rows", b"400")
    usage.charge_rows(600)
    assert dict(usage.describe_room())[b"x-ratelimit-remaining"] == b"0"
    usage.hold(KeyLimits(concurrency=1), fronts.shares[0].find)
    assert usage.describe_room() == ()


def test_rows_and_compute_are_moved_on_to_their_counts_whole() -> None:
    counted: dict[str, int] = {}
    counts = KeyCounts(rows=Counted(counted, "rows"), compute_ns=Counted(counted, "ns"))
    usage = KeyUsage("k", counts)
    usage.flush()
    assert counted == {}
    usage.rows, usage.compute_ns = 7, 10.75
    usage.flush()
    usage.compute_ns += 0.5
    usage.flush()
    assert counted == {"rows": 7, "ns": 11}
    assert (usage.rows, usage.compute_ns) == (0, 0.25)


def test_less_than_one_request_a_second() -> None:
    fronts = Fronts(2, KeyLimits(requests=0.1))
    assert fronts.take(10) == 1
    fronts.clock.now += 9.9
    with pytest.raises(RateLimitError) as caught:
        fronts.usages[0].take()
    fault = caught.value
    assert (fault.kind, fault.reason) == (Kind.RESOURCE_EXHAUSTED, Reason.KEY_LIMIT)
    assert (fault.limit, fault.remaining) == (0.1, 0)
    assert fault.retry_after_s == pytest.approx(0.1)
    assert fault.message == "this API key may send 0.1 requests a second"
    fronts.clock.now += 0.2
    assert fronts.take(10) == 1


def test_another_rate_holds_from_now_on() -> None:
    fronts = Fronts(2, KeyLimits(requests=1000))
    assert fronts.take(2000) == 1000
    for usage, shares in zip(fronts.usages, fronts.shares, strict=True):
        usage.hold(KeyLimits(requests=2), shares.find, 2)
    fronts.clock.now += 1
    assert fronts.take(10) == 2
    for usage, shares in zip(fronts.usages, fronts.shares, strict=True):
        usage.hold(KeyLimits(), shares.find, 2)
    assert not fronts.usages[0].limited


def test_two_fronts_that_see_a_full_bucket_at_once_forfeit_it_once() -> None:
    """As with any order of their steps: both have read before either writes."""
    fronts = Fronts(2, KeyLimits(requests=10))
    fronts.take(1)
    fronts.clock.now += 3600
    shares = [one.find("k") for one in fronts.shares]
    left = fronts.clock.now - sum(one.value for one in shares[0].requests.all_used)
    for share in shares:
        share.requests.forfeited.set(left - 1)
    assert fronts.take(100) == 10


@pytest.mark.parametrize("count", [1, 3])
def test_requests_under_way(count: int) -> None:
    fronts = Fronts(count, KeyLimits(concurrency=4))
    held = [fronts.usages[turn % count].take() for turn in range(4)]
    for usage in fronts.usages:
        with pytest.raises(RateLimitError, match="may have 4 requests under way") as caught:
            usage.take()
        assert caught.value.limit == 4
    held.pop().running.add(-1)
    assert fronts.take(12) == 1


def test_a_front_that_dies_gives_back_what_it_had() -> None:
    fronts = Fronts(3, KeyLimits(concurrency=4))
    for number in (1, 1, 2, 0):
        fronts.usages[number].take()
    assert fronts.take(3) == 0
    fronts.shares[0].front_ended(1)
    again = shares_of(1, 3, fronts.shares[0])  # its successor has the section
    fronts.usages[1] = fronts.use(again, KeyLimits(concurrency=4))
    assert fronts.take(9) == 2


def test_a_key_that_is_refused_for_its_rate_takes_no_place() -> None:
    fronts = Fronts(1, KeyLimits(requests=1, concurrency=2))
    assert fronts.take(5) == 1
    (share,) = {fronts.shares[0].find("k").running.value}
    assert share == 1


def test_a_front_without_the_memory_has_its_part_of_the_limits() -> None:
    """Until the first front has read the file, and where there are more keys than room."""
    owner = shares_of(0, 4)
    late = shares_of(2, 4, owner)
    clock = Clock()
    usage = KeyUsage("k")
    usage.clock = clock
    usage.hold(KeyLimits(requests=8, concurrency=8), late.find, 4)
    held = [usage.take() for _ in range(2)]
    with pytest.raises(RateLimitError):
        usage.take()
    owner.find("k")
    clock.now += 1
    held += [usage.take() for _ in range(4)]  # from now on those of all fronts
    assert held[-1].whole
    for share in held[:2]:
        share.running.add(-1)
    assert held[-1].running.value == 4
    for number in range(MOST_KEYS - 1):
        assert owner.find(f"k{number}").whole
    assert not owner.find("one more").whole
    assert owner.find("k5").whole


# ---- on the wire


class Rig:
    """A pipe behind keys with limits; `held` are calls that wait for an answer."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.path, self.held = folder / "keys.yaml", []  # type: ignore[var-annotated]
        text, entry = make_key("k", ("infer",), **limits)
        with changing(self.path) as entries:
            entries.append(entry)
        self.text, self.entry = text.encode(), entry
        self.shares = shares_of(0, 1)
        self.counted: dict[str, int] = {}
        self.clock = Clock()
        self.clock.now = 100.0
        self.gate = ApiKeyGate(self.path, make_usage=self.make_usage)
        self.gate.load()

    def make_usage(self, entry: KeyEntry, known: KeyUsage | None) -> KeyUsage:
        counts = KeyCounts(self, error_of=lambda code: Counted(self.counted, code))
        usage = known or KeyUsage(entry.name, counts)
        usage.clock = self.clock
        limits = KeyLimits(entry.requests_per_second, entry.rows_per_second, 0, entry.concurrency)
        usage.hold(limits, self.shares.find)
        return usage

    def add(self, n: int = 1) -> None:
        self.counted["requests"] = self.counted.get("requests", 0) + n

    @property
    def running(self) -> float:
        return self.shares.find("k").running.value

    def hold(self, call: Any) -> None:
        self.held.append(call)

    def pipe(self) -> Pipe:
        return Pipe({"/echo": self.hold}, gate=self.gate)

    def ask(self) -> bytes:
        return HEAD % self.text


class Counted:
    def __init__(self, counts: dict[str, int], name: str) -> None:
        self.counts, self.name = counts, name

    def add(self, n: int = 1) -> None:
        self.counts[self.name] = self.counts.get(self.name, 0) + n


def test_a_place_is_given_back_by_an_answer_and_by_a_client_that_leaves(tmp_path: Path) -> None:
    rig = Rig(tmp_path, concurrency=3)
    pipes = [rig.pipe() for _ in range(4)]
    for pipe in pipes:
        pipe.feed(rig.ask())
    assert (len(rig.held), rig.running) == (3, 3)
    (refused,) = pipes[3].replies()
    assert refused.body == b"this API key may have 3 requests under way"
    rig.held[0].reply(200, b"x")
    assert rig.running == 2
    pipes[1].connection.connection_lost(ConnectionResetError())
    assert rig.running == 1
    rig.held[1].reply(200, b"late")  # to nobody
    rig.held[2].fail(RuntimeError("x"))
    assert rig.running == 0
    pipes[0].feed(rig.ask())
    assert rig.running == 1
    assert rig.counted == {"requests": 5, "503": 1, "499": 1, "500": 1}  # 503: the kit's


def test_pipelined_calls_and_a_reset(tmp_path: Path) -> None:
    rig = Rig(tmp_path, concurrency=8)
    pipe = rig.pipe()
    pipe.feed(rig.ask() * 6)
    assert rig.running == 6
    rig.held[2].reply(200, b"x")  # it waits for its turn
    assert rig.running == 5
    pipe.connection.connection_lost(None)
    assert rig.running == 0


def test_limits_that_change_while_calls_are_under_way(tmp_path: Path) -> None:
    """A place belongs to a call, whatever its head and its key have become."""
    rig = Rig(tmp_path, concurrency=2)
    pipe = rig.pipe()
    pipe.feed(rig.ask() * 2)
    for limits in ({}, {"concurrency": 5}):
        entry = KeyEntry("k", ("infer",), rig.entry.id, rig.entry.hash, **limits)
        with changing(rig.path) as entries:
            entries[:] = [entry]
        rig.gate.renew()
        pipe.feed(rig.ask())
    assert (len(rig.held), rig.running) == (4, 3)
    with changing(rig.path) as entries:
        entries.clear()
    rig.gate.renew()
    pipe.feed(rig.ask())
    for call in rig.held:
        call.reply(200, b"x")
    assert rig.running == 0
    assert [reply.body for reply in pipe.replies()] == [b"x"] * 4 + [WANTED.encode()]


def test_no_request_but_the_first_pays_for_the_check(tmp_path: Path) -> None:
    """A key without limits: its endpoint counts, and nothing else stands before the dialect's."""
    rig = Rig(tmp_path)
    pipe = Pipe({"/echo": echo}, gate=rig.gate)
    pipe.feed(rig.ask() * 3)
    assert [reply.status for reply in pipe.replies()] == [200] * 3
    assert rig.counted == {"requests": 3}


class Taking:
    """An endpoint that reads large bodies itself, when it is `willing`."""

    def __init__(self, willing: bool) -> None:
        self.willing = willing

    def __call__(self, call: Any) -> None:
        raise AssertionError("not asked")

    def take(self, call: Any, body: Any) -> bool:
        return self.willing


@pytest.mark.parametrize("willing", [True, False])
def test_a_body_that_is_offered(tmp_path: Path, willing: bool) -> None:
    rig = Rig(tmp_path, concurrency=1, requests_per_second=5)

    def no_part(compartment: Compartment, head: RequestHead) -> Any:
        raise AssertionError

    terms = KeyTerms(rig.gate, Opening(), Scope.INFER, lambda call, fault: None, no_part)
    behind: Any = keyed(terms, Taking(willing))
    head = RequestHead(b"")
    head.headers = [(b"x-api-key", rig.text)]
    pipe = rig.pipe()
    pipe.feed(rig.ask())
    call = rig.held[0]
    call.reply(200, b"")
    call.head = head
    assert behind.take(call, None) is willing
    assert rig.running == int(willing)
    assert head.slow
    assert behind.take(call, None) is False  # one is under way, or it is unwilling
    assert rig.running == int(willing)
