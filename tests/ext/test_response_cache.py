"""The response cache and its oracle, side by side through any sequence of calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastserve._ext.response_cache import (
    COUNTS_BYTES,
    ENTRY_BYTES,
    WHOLE_BYTES,
    Counts,
    Miss,
    ResponseCache,
)
from tests.oracles.response_cache import PlainCache

HEADS = st.sampled_from([b"a", b"b1", b"b2"])
SMALL = st.binary(max_size=3)
INPUTS = st.lists(SMALL | st.sampled_from([b"x" * WHOLE_BYTES, b"y" * (WHOLE_BYTES + 1)]), max_size=2)
CAPACITY = 3 * ENTRY_BYTES + 3000


def ignore(ns: int, others: int, *, hit: bool) -> None:
    assert ns >= 0
    assert others in (1, 16)


def count_lookups() -> Counts:
    return Counts(ignore, bytearray(COUNTS_BYTES))


class Both(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ours, self.plain, self.counts = (
            self.make(),
            PlainCache(CAPACITY),
            count_lookups(),
        )
        self.misses: dict[bytes, Miss] = {}

    def make(self) -> ResponseCache:
        return ResponseCache(CAPACITY)

    @rule(head=HEADS, inputs=INPUTS)
    def find(self, head: bytes, inputs: list[bytes]) -> None:
        ours = self.ours.find(head, [memoryview(data) for data in inputs], self.counts)
        wanted = self.plain.find(head, inputs)
        if isinstance(ours, Miss):
            assert ours.key == wanted
            self.misses[ours.key] = ours
        else:
            assert (ours and (ours.form, ours.memory, ours.parameters)) == wanted

    @rule(
        data=st.data(),
        outputs=st.lists(st.sampled_from([b"", b"out", b"o" * 1500, b"o" * CAPACITY]), max_size=2),
        parameters=st.sampled_from([(), (("p", 1),)]),
    )
    def keep(self, data: Any, outputs: list[bytes], parameters: tuple[Any, ...]) -> None:
        if self.plain.running:
            key = data.draw(st.sampled_from(sorted(self.plain.running)))
            shared = [bytearray(output) for output in outputs]
            self.misses[key].keep("form", shared, parameters)
            for memory in shared:
                memory[:] = bytes(len(memory))  # what is kept is a copy
            self.plain.keep(key, "form", outputs, parameters)

    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        if self.plain.running:
            key = data.draw(st.sampled_from(sorted(self.plain.running)))
            self.misses[key].close()
            self.misses.pop(key).close()
            self.plain.leave(key)

    @rule(prefix=st.sampled_from([b"a", b"b", b"b1"]))
    def forget(self, prefix: bytes) -> None:
        self.ours.forget(prefix)
        self.plain.forget(prefix)

    @invariant()
    def alike(self) -> None:
        ours, plain = self.ours, self.plain
        assert (len(ours), ours.used, ours.evictions) == (len(plain.kept), plain.used, plain.evictions)
        assert (ours.hits, ours.misses) == (plain.hits, plain.misses)
        assert (self.counts.hits, self.counts.misses) == (plain.hits, plain.misses)
        assert set(ours.waiting()) == plain.running


TestBoth = Both.TestCase


@given(HEADS, INPUTS)
def test_keys(head: bytes, inputs: list[bytes]) -> None:
    assert ResponseCache(1).key(head, inputs) == PlainCache(1).key(head, inputs)


def test_who_waits_is_told_once() -> None:
    cache, counts, told = ResponseCache(1 << 20), count_lookups(), []
    miss = cache.find(b"h", [b"1"], counts)
    assert isinstance(miss, Miss)
    for number in range(2):
        assert cache.find(b"h", [b"1"], counts) is None
        cache.wait(miss.key, lambda number=number: told.append(number))
    miss.close()
    assert told == [0, 1]
    again = cache.find(b"h", [b"1"], counts)
    assert isinstance(again, Miss)
    miss.close()  # it is not the one under way now
    waiting, key = set(cache.waiting()), again.key
    assert waiting == {key}
    del again  # and one that is forgotten keeps nobody waiting
    assert cache.waiting() == {}
    for _ in range(3):  # also where another lay before
        cache.find(b"h", [b"2"], counts)
        assert cache.waiting() == {}
    with pytest.raises(KeyError):
        cache.wait(miss.key, ignore)
    cache.count_miss(counts)
    assert (cache.misses, counts.misses) == (6, 6)


def test_times_are_told_and_stand_for_all() -> None:
    said: list[tuple[int, bool]] = []
    cache = ResponseCache(1 << 20)
    counts = Counts(lambda ns, others, *, hit: said.append((others, hit)), bytearray(COUNTS_BYTES))
    for number in range(64):
        miss = cache.find(b"h", [bytes([number])], counts)
        assert isinstance(miss, Miss)
        miss.keep((), [b"out"])
        miss.close()
    assert sum(others for others, _ in said) == 64
    assert not any(hit for _, hit in said)
    cache.find(b"h", [b"\0"], counts)
    assert cache.lookup_ns > 0
    assert cache.insertion_ns == counts.insertion_ns > 0
    assert counts.last_ns > 0


def test_nothing_for_the_garbage_collector() -> None:
    cache, counts = ResponseCache(1 << 30), count_lookups()
    form = ("form",)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1000):
        miss = cache.find(b"h", [number.to_bytes(4, "big")], counts)
        assert isinstance(miss, Miss)
        miss.keep(form, [b"output"])
        miss.close()
    gc.collect()
    assert len(gc.get_objects()) - before < 50


def test_what_is_no_memory_is_refused_and_nothing_is_under_way() -> None:
    cache, counts = ResponseCache(1 << 20), count_lookups()
    with pytest.raises(TypeError):
        cache.find(b"h", [object()], counts)  # type: ignore[list-item]
    assert (cache.waiting(), cache.misses) == ({}, 0)
